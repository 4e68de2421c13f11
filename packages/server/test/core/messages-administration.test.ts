/** Queues and consumer groups as operators see and move them. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { type Entry, type MessagesBench, messagesBench, partitionOf } from '../messages-administration-fixture.js'

let m: MessagesBench
beforeAll(async () => {
  m = await messagesBench()
})
afterAll(() => m.close())

const numbered = (count: number, prefix = 'tx') =>
  Array.from({ length: count }, (_, n) => ({ payload: { n }, transactionId: `${prefix}-${n}` }))
const get = (url: string) => m.call('GET', `/api/v1${url}`)
const path = encodeURIComponent
const counts = { total: 0, pending: 0, processing: 0, completed: 0, failed: 0, deadLetter: 0 }
const nowhere = { status: 404, body: { code: 'not_found', error: expect.any(String), detail: expect.any(String) } }

describe('queues', () => {
  it('count pending, leased and settled messages', async () => {
    await m.push('figures', 'a', numbered(5))
    await m.push('figures', 'b', numbered(2))
    await m.ack(await m.pop('figures', 'g', 2), 'g')
    await m.pop('figures', 'g', 2)
    const { status, body } = await get('/resources/queues/figures')
    expect(status).toBe(200)
    expect(body).toMatchObject({
      name: 'figures',
      partitionCount: 2,
      totals: { ...counts, total: 7, pending: 3, processing: 2, completed: 2 },
    })
    expect(body.partitions.map(({ name }) => name)).toEqual(['a', 'b'])
    const listed = (await get('/resources/queues?search=figur')).body.queues
    expect(listed).toMatchObject([
      { name: 'figures', partitions: 2, messages: { total: 7, pending: 3, processing: 2 } },
    ])
  })

  it('counts what the slowest group has still to read', async () => {
    await m.push('slow', 'a', numbered(4))
    await m.pop('slow', 'quick', 4, { auto: true })
    await m.pop('slow', 'lazy', 1, { auto: true })
    expect((await get('/resources/queues/slow')).body.totals).toMatchObject({ pending: 3, completed: 1 })
  })

  it('counts everything as pending while no group reads it', async () => {
    await m.push('unread', 'a', numbered(3))
    expect((await get('/resources/queues/unread')).body.totals).toMatchObject({ total: 3, pending: 3, completed: 0 })
  })

  it('counts an expired lease as waiting, not as processing', async () => {
    await m.push('expired', 'a', numbered(1))
    await m.pop('expired', 'g', 1)
    await m.bench.sql(`UPDATE spillway.mq_leases SET until = now() - interval '1 s'`)
    expect((await get('/resources/queues/expired')).body.totals).toMatchObject({ pending: 1, processing: 0 })
  })

  it('may have any name in the path', async () => {
    const name = 'a/b c:%?#😀'
    await m.push(name, name, numbered(2))
    expect((await get(`/resources/queues/${path(name)}`)).body).toMatchObject({ name, partitions: [{ name }] })
    const cleared = await m.call('DELETE', `/api/v1/queues/${path(name)}/clear?partition=${path(name)}`)
    expect(cleared).toMatchObject({ status: 200, body: { cleared: true, count: 2, queue: name, partition: name } })
  })

  it('that is not there is not found', async () => {
    expect(await get('/resources/queues/none')).toMatchObject(nowhere)
    expect(await get('/status/queues/none')).toMatchObject(nowhere)
    expect(await m.call('DELETE', '/api/v1/queues/none/clear')).toMatchObject(nowhere)
  })

  it('is emptied for all groups, and continues', async () => {
    await m.push('cleared', 'a', numbered(500))
    const popped = await m.pop('cleared', 'g', 1)
    expect((await m.call('DELETE', '/api/v1/queues/cleared/clear')).body).toMatchObject({
      count: 500,
      partition: 'all',
    })
    expect(await m.ack(popped, 'g')).toEqual(['unknown'])
    await m.push('cleared', 'a', [{ payload: 'next' }])
    expect((await m.pop('cleared', 'g')).payloads).toEqual(['next'])
    expect((await m.pop('cleared', 'late')).payloads).toEqual(['next'])
  })

  it('loses nothing but its own messages when one partition is emptied', async () => {
    await m.push('partly', 'a', numbered(2))
    await m.push('partly', 'b', numbered(2))
    await m.call('DELETE', '/api/v1/queues/partly/clear?partition=a')
    const { partitions } = (await get('/resources/queues/partly')).body
    expect(partitions.map(({ stats }) => stats.total)).toEqual([0, 2])
  })

  it('is deleted with its messages and groups; once more says that it was not there', async () => {
    await m.push('deleted', 'a', numbered(300))
    await m.pop('deleted', 'g')
    const url = '/api/v1/resources/queues/deleted'
    expect((await m.call('DELETE', url)).body).toEqual({ deleted: true, queue: 'deleted', existed: true })
    expect((await m.call('DELETE', url)).body).toMatchObject({ existed: false })
    const left = await m.bench.sql('SELECT FROM spillway.mq_messages WHERE partition = $1', [
      partitionOf('deleted', 'a'),
    ])
    expect(left).toEqual([])
    expect((await get('/consumer-groups')).body).not.toContainEqual(expect.objectContaining({ queueName: 'deleted' }))
  })

  it('are listed by namespace and task', async () => {
    await m.configure('ns.one', { namespace: 'billing', task: 'send' })
    await m.configure('ns.two', { namespace: 'billing' })
    expect((await get('/resources/queues?task=send')).body.queues).toMatchObject([{ name: 'ns.one' }])
    expect((await get('/resources/queues?namespace=billing')).body.queues).toHaveLength(2)
  })
})

describe('status', () => {
  it('shows depth and lag of a queue by partition and group', async () => {
    await m.push('status', 'a', numbered(3))
    await m.push('status', 'b', numbered(1))
    await m.bench.sql(`UPDATE spillway.mq_messages SET created_at = now() - interval '90 s' WHERE partition = $1`, [
      partitionOf('status', 'a'),
    ])
    await m.pop('status', 'g1', 4, { auto: true, partitions: 2 })
    await m.pop('status', 'g2', 1)
    const { body } = await get('/status/queues/status')
    expect(body.queue).toMatchObject({ name: 'status', config: { leaseTime: 300, retryLimit: 3 } })
    expect(body.consumerGroups).toMatchObject([
      { name: 'g1', depth: 0, consumed: 4, maxTimeLag: 0 },
      { name: 'g2', depth: 4, processing: 1, partitionsWithLag: 2 },
    ])
    expect(body.consumerGroups[1]?.maxTimeLag).toBeGreaterThanOrEqual(90)
    expect(body.partitions[0]).toMatchObject({ name: 'a', consumerGroups: [{ name: 'g1', depth: 0 }, { depth: 3 }] })
  })

  it('knows no throughput at the first look', async () => {
    await m.push('rates', 'a', numbered(1))
    expect((await get('/status/queues/rates')).body.throughput).toEqual([])
  })

  it('puts all queues together, with leases and dead letters', async () => {
    await m.push('whole', 'a', numbered(3))
    await m.ack(await m.pop('whole', 'g', 1), 'g', 'dlq', 'broken')
    await m.pop('whole', 'g', 2)
    const { body } = await get('/status?queue=whole')
    expect(body).toMatchObject({
      queues: [{ name: 'whole' }],
      messages: { total: 3, processing: 2, deadLetter: 1 },
      leases: { active: 1, partitionsWithLeases: 1, totalBatchSize: 2, totalAcked: 0 },
      deadLetterQueue: { totalMessages: 1, affectedPartitions: 1, topErrors: [{ error: 'broken', count: 1 }] },
    })
    expect((await get('/resources/overview')).body).toMatchObject({
      queues: expect.any(Number),
      lag: { time: { max: expect.any(Number) }, offset: { max: expect.any(Number) } },
    })
  })
})

describe('consumer groups', () => {
  const groupOf = async (queue: string, name: string) =>
    ((await get('/consumer-groups')).body as unknown as Entry[]).find(
      (group) => group.queueName === queue && group.name === name,
    )

  it('are listed for each queue, with their lag', async () => {
    await m.push('lag', 'a', numbered(3))
    await m.pop('lag', 'g', 1, { auto: true })
    await m.bench.sql(`UPDATE spillway.mq_messages SET created_at = now() - interval '400 s' WHERE partition = $1`, [
      partitionOf('lag', 'a'),
    ])
    const group = await groupOf('lag', 'g')
    expect(group).toMatchObject({ members: 1, partitionsWithLag: 1, totalLag: 2, state: 'Lagging', topics: ['lag'] })
    expect(group?.maxTimeLag).toBeGreaterThanOrEqual(400)
  })

  it('are listed by queue and partition', async () => {
    await m.push('detail', 'a', numbered(2))
    await m.pop('detail', 'alone', 1)
    expect((await get('/consumer-groups/alone')).body).toEqual({
      detail: {
        partitions: [expect.objectContaining({ partition: 'a', offsetLag: 2, leaseActive: true, totalConsumed: 0 })],
      },
    })
    expect(await get('/consumer-groups/nobody')).toMatchObject(nowhere)
  })

  it('go to the end, to the beginning, and to a time', async () => {
    await m.push('seek', 'a', numbered(2, 'early'))
    const [{ at }] = (await m.bench.sql<{ at: Date }>('SELECT clock_timestamp() AS at')) as [{ at: Date }]
    await m.push('seek', 'a', [{ payload: 'late', transactionId: 'late' }])
    await m.pop('seek', 'g', 1)
    const seek = (body: unknown) => m.call('POST', '/api/v1/consumer-groups/g/queues/seek/seek', { body })
    expect(await seek({ toEnd: true })).toMatchObject({ status: 200, body: { seekToEnd: true, partitionsUpdated: 1 } })
    expect((await m.pop('seek', 'g', 5)).transactions).toEqual([])
    expect((await seek({ timestamp: at.toISOString(), toEnd: null })).body.targetTimestamp).toBe(at.toISOString())
    expect((await m.pop('seek', 'g', 5)).transactions).toContain('late')
    await seek({ toBeginning: true })
    expect((await m.pop('seek', 'g', 5)).transactions).toEqual(['early-0', 'early-1', 'late'])
    expect(m.woken).toContain('seek')
  })

  it.each([
    ['nothing', {}],
    ['two targets', { toEnd: true, toBeginning: true }],
    ['no time', { timestamp: 'yesterday' }],
    ['only false', { toEnd: false }],
  ])('do not go to %s', async (_, body) => {
    await m.push('stay', 'a', [{}])
    await m.pop('stay', 'g', 1, { auto: true })
    const answer = await m.call('POST', '/api/v1/consumer-groups/g/queues/stay/seek', { body })
    expect(answer).toMatchObject({ status: 400, body: { code: 'invalid_request', error: expect.any(String) } })
  })

  it('that are unknown are not made by seeking', async () => {
    await m.push('typo', 'a', numbered(1))
    expect(await m.call('POST', '/api/v1/consumer-groups/g/queues/typo/seek', { body: { toEnd: true } })).toMatchObject(
      nowhere,
    )
    expect(await groupOf('typo', 'g')).toBeUndefined()
  })

  it('start again after they were ended', async () => {
    await m.push('ended', 'a', numbered(2))
    await m.pop('ended', 'g', 2, { auto: true })
    const ended = await m.call('DELETE', '/api/v1/consumer-groups/g/queues/ended')
    expect(ended.body).toEqual({
      success: true,
      consumerGroup: 'g',
      queueName: 'ended',
      deletedPartitions: 1,
      metadataDeleted: true,
    })
    expect(await groupOf('ended', 'g')).toBeUndefined()
    expect((await m.pop('ended', 'g', 5)).transactions).toHaveLength(2)
  })

  it('that are ended and not forgotten begin behind the time that was set', async () => {
    await m.push('kept', 'a', numbered(1, 'early'))
    const [{ at }] = (await m.bench.sql<{ at: Date }>('SELECT clock_timestamp() AS at')) as [{ at: Date }]
    await m.push('kept', 'a', [{ transactionId: 'late' }])
    await m.pop('kept', 'keeper', 2, { auto: true })
    const moved = await m.call('POST', '/api/v1/consumer-groups/keeper/subscription', {
      body: { subscriptionTimestamp: new Date(at.getTime() + 1).toISOString() },
    })
    expect(moved.body).toMatchObject({ success: true, rowsUpdated: 1 })
    // The log’s times are set apart: a millisecond is too coarse for two pushes.
    await m.bench.sql(`UPDATE spillway.mq_messages SET created_at = $1 WHERE transaction_id = 'late'`, [
      new Date(at.getTime() + 5),
    ])
    await m.call('DELETE', '/api/v1/consumer-groups/keeper?deleteMetadata=false')
    expect(await groupOf('kept', 'keeper')).toMatchObject({ subscriptionMode: 'timestamp' })
    expect((await m.pop('kept', 'keeper', 5)).transactions).toEqual(['late'])
  })

  it('need a time to begin from', async () => {
    const url = '/api/v1/consumer-groups/g/subscription'
    expect((await m.call('POST', url, { body: {} })).status).toBe(400)
    expect((await m.call('POST', url, { body: { subscriptionTimestamp: 'soon' } })).status).toBe(400)
  })
})

describe('maintenance', () => {
  it('is switched on and off, and reported', async () => {
    const url = '/api/v1/system/maintenance'
    expect((await m.call('POST', url, { body: { enabled: true } })).body).toMatchObject({ maintenanceMode: true })
    expect((await m.call('GET', url)).body).toMatchObject({ maintenanceMode: true, bufferedMessages: 0 })
    expect((await m.call('POST', url, { body: { enabled: false, extra: 1 } })).body).toMatchObject({
      maintenanceMode: false,
    })
    expect((await m.call('POST', url, { body: { enabled: 'yes' } })).status).toBe(400)
  })
})
