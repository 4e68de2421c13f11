/** Single messages and dead letters. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { type Called, type MessagesBench, messagesBench, partitionOf } from '../messages-administration-fixture.js'

let m: MessagesBench
beforeAll(async () => {
  m = await messagesBench()
})
afterAll(() => m.close())

const numbered = (count: number, prefix = 'tx') =>
  Array.from({ length: count }, (_, n) => ({ payload: { n }, transactionId: `${prefix}-${n}` }))
const get = (url: string) => m.call('GET', `/api/v1${url}`)
const messageUrl = (queue: string, partition: string, transactionId: string) =>
  `/messages/${partitionOf(queue, partition)}/${encodeURIComponent(transactionId)}`
const nowhere = { status: 404, body: { code: 'not_found', error: expect.any(String) } }
const idsOf = ({ body }: Called): string[] => body.messages.map(({ transactionId }) => transactionId)
const killed = async (queue: string, group: string, error?: string) => {
  const popped = await m.pop(queue, group)
  expect(await m.ack(popped, group, 'dlq', error)).toEqual(['dead'])
  return popped.transactions[0] ?? ''
}

describe('dead letters', () => {
  it('are listed with all members, newest first', async () => {
    await m.configure('dead', { namespace: 'ns', task: 'tk' })
    await m.push('dead', 'p', [{ payload: { a: [1, null] }, transactionId: 'first' }, { transactionId: 'second' }])
    await killed('dead', 'g', 'no such order')
    await killed('dead', 'g', 'again')
    const all = await get('/dlq?queue=dead&limit=100000')
    expect(all.body).toMatchObject({ total: 2, limit: 200, pagination: { limit: 200, offset: 0, nextOffset: null } })
    const { body } = await get('/dlq?queue=dead&limit=1&offset=1')
    expect(body).toEqual({
      messages: [
        {
          id: expect.any(String),
          messageId: expect.any(String),
          partitionId: partitionOf('dead', 'p'),
          transactionId: 'first',
          traceId: null,
          consumerGroup: 'g',
          errorMessage: 'no such order',
          retryCount: 1,
          skipped: false,
          queue: 'dead',
          queueName: 'dead',
          partition: 'p',
          partitionName: 'p',
          namespace: 'ns',
          task: 'tk',
          createdAt: expect.any(String),
          originalCreatedAt: expect.any(String),
          failedAt: expect.any(String),
          movedToDlqAt: expect.any(String),
          data: { a: [1, null] },
        },
      ],
      total: 2,
      limit: 1,
      offset: 1,
      pagination: { limit: 1, offset: 1, nextOffset: null },
    })
  })

  it('are found by group, partition and time', async () => {
    await m.push('found', 'p', numbered(1))
    await killed('found', 'g')
    const total = async (query: string) => (await get(`/dlq?queue=found&${query}`)).body.total
    expect(await total('consumerGroup=g&partition=p')).toBe(1)
    expect(await total('consumerGroup=h')).toBe(0)
    expect(await total('partition=q')).toBe(0)
    const hour = (hours: number) => new Date(Date.now() + hours * 3_600_000).toISOString()
    expect(await total(`from=${hour(-1)}&to=${hour(1)}`)).toBe(1)
    expect(await total(`from=${hour(1)}`)).toBe(0)
    expect(await total(`to=${hour(-1)}`)).toBe(0)
  })

  it('do not include skipped messages unless asked', async () => {
    await m.configure('skips', { retry_limit: 0 })
    await m.push('skips', 'p', numbered(1))
    expect(await m.ack(await m.pop('skips', 'g'), 'g', 'failed')).toEqual(['skipped'])
    expect((await get('/dlq?queue=skips')).body.messages).toEqual([])
    expect((await get('/dlq?queue=skips&skipped=true')).body.messages).toMatchObject([{ skipped: true }])
    expect((await get('/messages?queue=skips&status=failed')).body.messages).toMatchObject([{ status: 'failed' }])
  })

  it('go back to the end of their partition, for their group alone', async () => {
    await m.push('back', 'p', numbered(2))
    await m.pop('back', 'other', 2, { auto: true })
    const transactionId = await killed('back', 'g')
    const id = (await get('/dlq?queue=back')).body.messages[0]?.id
    const replayed = await m.call('POST', `/api/v1/dlq/${id}/replay`)
    expect(replayed).toMatchObject({ status: 200, body: { replayed: true, queue: 'back', transactionId } })
    expect(m.woken).toContain('back')
    expect((await m.pop('back', 'g', 5)).transactions).toEqual(['tx-1', 'tx-0'])
    expect((await m.pop('back', 'other', 5)).transactions).toEqual([])
    expect(await m.call('POST', `/api/v1/dlq/${id}/replay`)).toMatchObject(nowhere)
  })

  it('are deleted by queue, group and age, and nothing else is', async () => {
    await m.push('purged', 'p', numbered(2))
    await killed('purged', 'g')
    await killed('purged', 'h')
    await m.push('kept', 'p', numbered(1))
    await killed('kept', 'g')
    const hourAgo = new Date(Date.now() - 3_600_000).toISOString()
    const purge = async (query: string) => (await m.call('DELETE', `/api/v1/dlq?${query}`)).body
    expect(await purge(`queue=purged&to=${hourAgo}`)).toEqual({ purged: 0 })
    expect(await purge('queue=purged&consumerGroup=h')).toEqual({ purged: 1 })
    expect((await get('/dlq?queue=purged')).body.messages).toMatchObject([{ consumerGroup: 'g' }])
    expect(await purge('queue=purged')).toEqual({ purged: 1 })
    expect((await get('/dlq?queue=kept')).body.total).toBe(1)
    expect((await m.call('DELETE', '/api/v1/dlq')).status).toBe(400)
  })

  it.each(['not-a-uuid', randomUUID()])('%s cannot be replayed', async (id) => {
    expect(await m.call('POST', `/api/v1/dlq/${id}/replay`)).toMatchObject(nowhere)
  })

  it('are opened when they are sealed; one that was changed says so, and the list stands', async () => {
    await m.configure('sealed', { encryption_enabled: true })
    await m.push('sealed', 'p', [{ payload: 'secret' }, { payload: 'broken' }])
    await killed('sealed', 'g')
    await killed('sealed', 'g')
    await m.bench.sql(
      `UPDATE spillway.mq_dead SET payload = overlay(payload placing 'AAAA' from 20) WHERE queue = 'sealed' AND seq = 2`,
    )
    expect((await get('/dlq?queue=sealed')).body.messages).toMatchObject([
      { data: null, error: expect.any(String) },
      { data: 'secret' },
    ])
  })

  it('that are long leave out their data', async () => {
    const payload = 'x'.repeat(5 * 1_048_576)
    await m.push('large', 'p', [{ payload }, { payload }])
    await killed('large', 'g')
    await killed('large', 'g')
    const { messages } = (await get('/dlq?queue=large')).body
    for (const message of messages) {
      expect(message).toMatchObject({ data: null, data_bytes: payload.length + 2, truncated: true })
      expect(message.error).toEqual(expect.any(String))
    }
  })
})

describe('the list of messages', () => {
  it('is newest first over partitions, and pages', async () => {
    for (const n of [0, 1, 2]) await m.push('list', `p${n % 2}`, [{ transactionId: `t${n}` }])
    expect(idsOf(await get('/messages?queue=list'))).toEqual(['t2', 't1', 't0'])
    expect(idsOf(await get('/messages?queue=list&limit=1&offset=1'))).toEqual(['t1'])
    expect(idsOf(await get('/messages?queue=list&partition=p0'))).toEqual(['t2', 't0'])
    expect((await get('/messages?queue=list&limit=200&offset=900')).body.pagination).toMatchObject({ limit: 100 })
    expect((await get('/messages?queue=list&limit=1&offset=1000')).status).toBe(400)
    expect((await get('/messages?queue=list&limit=5000')).body.pagination).toEqual({
      limit: 200,
      offset: 0,
      nextOffset: null,
    })
    for (const list of ['/resources/queues', '/status/queues', '/consumer-groups', '/resources/queues/list']) {
      expect((await get(`${list}?limit=5000`)).status, list).toBe(200)
    }
    expect((await get('/status/queues?limit=5000')).body.pagination).toEqual({
      limit: 1_000,
      offset: 0,
      nextOffset: null,
    })
    expect((await get('/messages?queue=list&partition=p0&limit=200&offset=900')).status).toBe(200)
  })

  it('shows the status of each, and filters by status', async () => {
    await m.push('states', 'p', numbered(5))
    await killed('states', 'g')
    await m.pop('states', 'g', 1, { auto: true })
    await m.pop('states', 'g', 2)
    const { messages } = (await get('/messages?queue=states')).body
    expect(messages.map(({ status }) => status)).toEqual([
      'pending',
      'processing',
      'processing',
      'completed',
      'dead_letter',
    ])
    expect(messages[1]?.leaseExpiresAt).toEqual(expect.any(String))
    const by = async (status: string) => idsOf(await get(`/messages?queue=states&status=${status}`))
    expect(await by('pending')).toEqual(['tx-4'])
    expect(await by('processing')).toEqual(['tx-3', 'tx-2'])
    expect(await by('completed')).toEqual(['tx-1'])
    expect(await by('dead_letter')).toEqual(['tx-0'])
    expect(await by('failed')).toEqual([])
    expect((await get('/messages?status=lost')).status).toBe(400)
  })

  it('shows a message as completed only when every group has settled it', async () => {
    await m.push('bus', 'p', numbered(1))
    await m.pop('bus', 'a', 1, { auto: true })
    await m.pop('bus', 'b', 1)
    const { messages, mode } = (await get('/messages?queue=bus')).body
    expect(messages).toMatchObject([{ status: 'processing', busStatus: { consumedBy: 1, totalGroups: 2 } }])
    expect(mode).toEqual({ hasQueueMode: false, busGroupsCount: 2, type: 'bus' })
  })

  it('finds operations that were settled out of order', async () => {
    await m.push('gaps', 'p', numbered(3))
    const popped = await m.pop('gaps', 'g', 3)
    await m.ack({ ...popped, transactions: ['tx-1'], partitions: popped.partitions.slice(1, 2) }, 'g')
    const by = async (status: string) => idsOf(await get(`/messages?queue=gaps&status=${status}`))
    expect(await by('completed')).toEqual(['tx-1'])
    expect(await by('processing')).toEqual(['tx-2', 'tx-0'])
  })

  it('finds the one that is completed behind very many that are not', async () => {
    await m.push('rare', 'p', numbered(150))
    await m.pop('rare', 'g', 1, { auto: true })
    await m.ack(await m.pop('rare', 'g', 149), 'g', 'dlq')
    expect(idsOf(await get('/messages?queue=rare&status=completed&limit=1'))).toEqual(['tx-0'])
  })

  it('goes from a time to a time, both included', async () => {
    await m.push('times', 'p', numbered(3))
    const at = (n: number) => new Date(Date.UTC(2030, 0, 1, 0, n))
    for (const n of [0, 1, 2]) {
      await m.bench.sql(`UPDATE spillway.mq_messages SET created_at = $1 WHERE partition = $2 AND seq = $3`, [
        at(n),
        partitionOf('times', 'p'),
        n + 1,
      ])
    }
    await m.bench.sql(`UPDATE spillway.mq_partitions SET pushed_at = $1 WHERE id = $2`, [
      at(2),
      partitionOf('times', 'p'),
    ])
    const between = (from: number, to: number) =>
      get(`/messages?queue=times&from=${at(from).toISOString()}&to=${at(to).toISOString()}`)
    expect(idsOf(await between(1, 1))).toEqual(['tx-1'])
    expect(idsOf(await between(0, 1))).toEqual(['tx-1', 'tx-0'])
    expect(idsOf(await between(3, 4))).toEqual([])
  })
})

describe('one message', () => {
  it('is returned with its payload, its groups and its outcome', async () => {
    await m.configure('one', { encryption_enabled: true })
    await m.push('one', 'p', [{ payload: { secret: 1 }, transactionId: 'a/b' }])
    await m.ack(await m.pop('one', 'g'), 'g', 'dlq', 'no')
    const { status, body } = await get(messageUrl('one', 'p', 'a/b'))
    expect(status).toBe(200)
    expect(body).toMatchObject({
      transactionId: 'a/b',
      queuePath: 'one/p',
      status: 'dead_letter',
      payload: { secret: 1 },
      data: { secret: 1 },
      isEncrypted: true,
      inLog: true,
      errorMessage: 'no',
      retryCount: 1,
      queueConfig: { leaseTime: 300 },
      mode: { type: 'bus', consumedByGroups: 1 },
      consumerGroups: [{ name: 'g', consumed: true, processing: false }],
      deadLetters: [{ consumerGroup: 'g', errorMessage: 'no' }],
    })
  })

  it('is known by its dead letter when the log is gone', async () => {
    await m.push('gone', 'p', [{ payload: 7, transactionId: 't' }])
    await killed('gone', 'g')
    await m.call('DELETE', '/api/v1/resources/queues/gone')
    expect((await get(messageUrl('gone', 'p', 't'))).body).toMatchObject({
      data: 7,
      inLog: false,
      status: 'dead_letter',
    })
  })

  it.each([
    ['another name', () => messageUrl('list', 'p0', 'none')],
    ['no partition', () => `/messages/${randomUUID()}/t0`],
    ['no id', () => '/messages/p0/t0'],
  ])('is not found by %s on any route', async (_, url) => {
    expect(await get(url())).toMatchObject(nowhere)
    expect(await m.call('DELETE', `/api/v1${url()}`)).toMatchObject(nowhere)
    expect(await m.call('POST', `/api/v1${url()}/retry`)).toMatchObject(nowhere)
    expect(await m.call('POST', `/api/v1${url()}/dlq`)).toMatchObject(nowhere)
  })

  it('is removed from the log, and the group that leased it continues', async () => {
    await m.push('out', 'p', numbered(2))
    await m.pop('out', 'g', 1)
    const url = `/api/v1${messageUrl('out', 'p', 'tx-0')}`
    expect(await m.call('DELETE', url)).toMatchObject({ status: 200, body: { success: true, transactionId: 'tx-0' } })
    expect(await m.call('DELETE', url)).toMatchObject(nowhere)
    expect((await m.pop('out', 'g', 5)).transactions).toEqual(['tx-1'])
    expect(m.woken).toContain('out')
  })

  it('is retried from its newest dead letter', async () => {
    await m.push('retried', 'p', numbered(1))
    await killed('retried', 'g')
    const url = `/api/v1${messageUrl('retried', 'p', 'tx-0')}/retry`
    expect((await m.call('POST', url)).body).toMatchObject({ retried: true, transactionId: 'tx-0', queue: 'retried' })
    expect((await m.pop('retried', 'g')).transactions).toEqual(['tx-0'])
    expect(await m.call('POST', url)).toMatchObject(nowhere)
  })

  it('is dead-lettered only for groups that have not reached it', async () => {
    await m.push('buried', 'p', numbered(3))
    await m.pop('buried', 'done', 3, { auto: true })
    await m.pop('buried', 'busy', 1)
    await m.bench.sql(`SELECT spillway.mq_subscribe(spillway.mq_queue('buried'), 'new', 'all', NULL)`)
    const url = `/api/v1${messageUrl('buried', 'p', 'tx-0')}/dlq`
    expect((await m.call('POST', url)).body).toMatchObject({ movedToDLQ: true, consumerGroups: ['new'] })
    expect((await get('/dlq?queue=buried')).body.messages).toMatchObject([{ consumerGroup: 'new', data: { n: 0 } }])
    expect((await m.pop('buried', 'new', 5)).transactions).toEqual(['tx-1', 'tx-2'])
    expect(await m.call('POST', url)).toMatchObject({ status: 409, body: { code: 'conflict' } })
  })

  it('that is dead-lettered behind leased messages is skipped later', async () => {
    await m.push('behind', 'p', numbered(3))
    const first = await m.pop('behind', 'g', 1)
    await m.call('POST', `/api/v1${messageUrl('behind', 'p', 'tx-2')}/dlq`)
    await m.ack(first, 'g')
    const second = await m.pop('behind', 'g', 5)
    expect(second.transactions).toEqual(['tx-1'])
    await m.ack(second, 'g')
    expect((await m.pop('behind', 'g', 5)).transactions).toEqual([])
    await m.push('behind', 'p', [{ transactionId: 'next' }])
    expect((await m.pop('behind', 'g', 5)).transactions).toEqual(['next'])
  })
})
