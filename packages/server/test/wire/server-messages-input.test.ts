/** Bad input, and input that only looks bad: a clear answer, and nothing half done. */
import { randomUUID } from 'node:crypto'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  ackBatch,
  ackOf,
  calm,
  configure,
  dataOf,
  type MessageTables,
  openMessageTables,
  popPath,
  push,
  pushed,
  pushResults,
  take,
  takeAll,
  transaction,
} from '../message-calls.js'
import { expectProblem } from '../petition-calls.js'
import { type Answer, call, endAll, get, post, type ServerProcess, startServer } from '../server-process.js'

let database: TestDatabase
let server: ServerProcess
let tables: MessageTables

beforeAll(async () => {
  database = await freshDatabase()
  server = await startServer({ DATABASE_URL: database.url, ...calm })
  tables = openMessageTables(database.url)
})
afterAll(async () => {
  await tables.close()
  await endAll()
  await database.drop()
})

/** A problem document (docs/reference/errors.md), with the member that clients of this API read. */
function expectRefused(answer: Answer, status = 400, code = 'invalid_request'): void {
  expectProblem(answer, status, code)
  expect(answer.body.error).toEqual(expect.stringMatching(/./))
}

const raw = (path: string, body: string, type = 'application/json') =>
  call(server, 'POST', path, { body, headers: { 'content-type': type } })

describe('a refused request stores nothing', () => {
  let before: unknown
  const rows = () =>
    tables.query(`SELECT (SELECT count(*) FROM mq_queues) q, (SELECT count(*) FROM mq_partitions) p, (SELECT count(*) FROM mq_messages) m,
      (SELECT count(*) FROM mq_groups) g, (SELECT count(*) FROM ops) o, (SELECT count(*) FROM idempotency) i, (SELECT count(*) FROM mq_leases) l`)

  beforeEach(async () => {
    before = await rows()
  })
  afterEach(async () => {
    expect(await rows()).toEqual(before)
  })

  const good = { queue: 'good', payload: 1 }

  it('a push of 0 items', async () => expectRefused(await push(server, [])))
  it('a push of 1,001 items', async () =>
    expectRefused(
      await push(
        server,
        Array.from({ length: 1_001 }, () => good),
      ),
    ))
  it.each([
    ['no items', {}],
    ['items that are no list', { items: good }],
    ['null items', { items: null }],
    ['a list', [good]],
    ['null', null],
  ])('a push whose body is %s', async (_, body) => expectRefused(await raw('/api/v1/push', JSON.stringify(body))))
  it.each([
    ['no queue', { payload: 1 }],
    ['an empty queue', { queue: '', payload: 1 }],
    ['a queue that is no text', { queue: 7, payload: 1 }],
    ['a queue of 10,000 characters', { queue: 'x'.repeat(10_000), payload: 1 }],
    ['a queue of 256 characters', { queue: '\u{1f600}'.repeat(256), payload: 1 }],
    ['a partition of 256 characters', { queue: 'q', partition: 'x'.repeat(256), payload: 1 }],
    ['an empty partition', { queue: 'q', partition: '', payload: 1 }],
    ['a transactionId that is no text', { queue: 'q', payload: 1, transactionId: 5 }],
    ['a transactionId of 256 characters', { queue: 'q', payload: 1, transactionId: 'x'.repeat(256) }],
    ['NUL in its queue', { queue: 'a\0b', payload: 1 }],
    ['NUL in its payload', { queue: 'q', payload: { deep: ['a\0b'] } }],
    ['a lone surrogate in its payload', { queue: 'q', payload: '\ud800' }],
    ['a lone surrogate in its transactionId', { queue: 'q', payload: 1, transactionId: '\udc00' }],
    ['a reserved queue', { queue: 'spillway:petitions', payload: 1 }],
    ['null for an item', null],
  ])('one item with %s, among good ones', async (_, item) => expectRefused(await push(server, [good, item, good])))

  it.each([
    ['62 deep, 65 with what it stands in', `${'['.repeat(62)}${']'.repeat(62)}`],
    ['10,000 deep', `${'['.repeat(10_000)}${']'.repeat(10_000)}`],
    ['a number that is not finite', '1e999'],
    ['a member named __proto__', '{"__proto__":{"x":1}}'],
  ])('a payload that is %s', async (_, payload) =>
    expectRefused(
      await raw('/api/v1/push', `{"items":[{"queue":"good","payload":1},{"queue":"q","payload":${payload}}]}`),
    ),
  )

  it('malformed JSON', async () => expectRefused(await raw('/api/v1/push', '{"items":[{"queue":"q","payload":')))
  it('another media type', async () =>
    expectRefused(await raw('/api/v1/push', '{}', 'text/plain'), 415, 'unsupported_media_type'))
  it('a body beyond 8 MiB', async () =>
    expectRefused(
      await push(server, [good, { queue: 'q', payload: 'x'.repeat(9 * 1_048_576) }]),
      413,
      'body_too_large',
    ))
  it('an Idempotency-Key that is too long', async () =>
    expectRefused(await push(server, [good], { 'idempotency-key': 'k'.repeat(256) })))
  it('another method', async () => {
    const answer = await call(server, 'PUT', '/api/v1/push', { body: {} })
    expect([answer.status, answer.headers.get('allow')]).toEqual([405, expect.stringContaining('POST')])
  })

  it.each(['/api/v1/pop', '/api/v1/pop/queue/heads', '/api/v1/pop/queue/heads/partition/Default'])(
    'HEAD %s: it would take messages',
    async (path) => {
      await pushed(server, [{ queue: 'heads', payload: 1, transactionId: 'once' }])
      await take(server, 'heads', { batch: 1, consumerGroup: 'there already', autoAck: true })
      before = await rows()
      const answer = await call(server, 'HEAD', `${path}?consumerGroup=there%20already&subscriptionMode=new`)
      expect([answer.status, answer.headers.get('allow')]).toEqual([405, 'GET'])
    },
  )

  it.each([
    'batch=0',
    'batch=-1',
    'batch=1001',
    'batch=1.5',
    'batch=many',
    'wait=perhaps',
    'timeout=-1',
    'timeout=1e99',
    'partitions=0',
    'subscriptionMode=some',
    'subscriptionFrom=yesterday',
    'subscriptionFrom=2026-13-45T00:00:00Z',
    'subscriptionFrom=2026-02-30T00:00:00Z',
    'subscriptionFrom=2026-02-03T24:00:00Z',
    'subscriptionFrom=2026-02-03%2000:00:00Z',
    'subscriptionFrom=2026-12-31T23:59:60Z',
    'subscriptionFrom=0000-01-01T00:00:00Z',
    'subscriptionFrom=0001-01-01T00:00:00%2B01:00',
    'subscriptionFrom=9999-12-31T23:59:59-23:59',
    'consumerGroup=',
    `consumerGroup=${'x'.repeat(256)}`,
    'consumerGroup=%00',
    'consumerGroup=%E0%A4%A',
    'consumerGroup=%',
  ])('a pop with %s', async (query) => expectRefused(await get(server, `/api/v1/pop/queue/good?${query}`)))

  it.each([
    '/',
    `/${'x'.repeat(256)}`,
    `/${'%F0%9F%98%80'.repeat(255)}x`,
    '/spillway:petitions',
    '/q/partition/',
    `/q/partition/${'x'.repeat(256)}`,
  ])('a pop of the queue %s', async (place) => {
    expectRefused(await get(server, `/api/v1/pop/queue${place}?subscriptionMode=new`))
    expectRefused(await get(server, `/api/v1/pop/queue${place}`))
  })

  it.each([
    ['/api/v1/ack', {}],
    ['/api/v1/ack', { transactionId: 'x' }],
    ['/api/v1/ack', { transactionId: 'x', partitionId: randomUUID(), status: 'perhaps' }],
    ['/api/v1/ack', { transactionId: 'x', partitionId: randomUUID(), status: true }],
    ['/api/v1/ack', { transactionId: 'x\0', partitionId: randomUUID(), status: 'completed' }],
    ['/api/v1/ack/batch', {}],
    ['/api/v1/ack/batch', { acknowledgments: [] }],
    ['/api/v1/ack/batch', { acknowledgments: [{ transactionId: 'x', status: 'completed' }] }],
    ['/api/v1/transaction', {}],
    ['/api/v1/transaction', { operations: [] }],
    ['/api/v1/transaction', { operations: [{ type: 'pop', queue: 'q' }] }],
    [
      '/api/v1/transaction',
      {
        operations: [
          { type: 'push', items: [good] },
          { type: 'push', items: [] },
        ],
      },
    ],
    [
      '/api/v1/transaction',
      {
        operations: [
          { type: 'push', items: [good] },
          { type: 'push', items: [{ queue: '' }] },
        ],
      },
    ],
    ['/api/v1/transaction', { operations: [{ type: 'push', items: [good] }], requiredLeases: 'x' }],
    ['/api/v1/transaction', { operations: [{ type: 'push', items: [good, { ...good, queue: 'spillway:x' }] }] }],
    ['/api/v1/configure', {}],
    ['/api/v1/configure', { queue: '' }],
    ['/api/v1/configure', { queue: 'spillway:x' }],
    ['/api/v1/configure', { queue: 'q', options: { leaseTime: 'long' } }],
    ['/api/v1/configure', { queue: 'q', options: { retentionEnabled: 'yes' } }],
    ['/api/v1/configure', { queue: 'q', options: [] }],
  ])('%s %j', async (path, body) => expectRefused(await post(server, path, body)))

  it.each(['0001-01-01T00:00:00+01:00', '9999-12-31T23:59:59-23:59', '0000-01-01T00:00:00Z'])(
    'the time %s',
    async (time) => {
      const at = encodeURIComponent(time)
      const group = '/api/v1/consumer-groups/g'
      expectRefused(await post(server, `${group}/queues/q/seek`, { timestamp: time }))
      expectRefused(await post(server, `${group}/subscription`, { subscriptionTimestamp: time }))
      expectRefused(await get(server, `/api/v1/dlq?from=${at}`))
      expectRefused(await get(server, `/api/v1/messages?to=${at}`))
    },
  )

  it('acks of 1,001 messages', async () => {
    const acknowledgments = Array.from({ length: 1_001 }, () => ({ transactionId: 'x', partitionId: randomUUID() }))
    expectRefused(await post(server, '/api/v1/ack/batch', { acknowledgments }))
  })

  it('acks for unknown messages: a failure each', async () => {
    const results = await ackBatch(server, [
      { transactionId: 'x', partitionId: randomUUID(), status: 'completed' },
      { transactionId: 'x', partitionId: 'no uuid', status: 'failed' },
      { transactionId: '\u{1f600}', partitionId: randomUUID(), leaseId: 'no uuid', status: 'dlq' },
    ])
    expect(results.map(({ index, success, error }) => [index, success, typeof error])).toEqual(
      [0, 1, 2].map((index) => [index, false, 'string']),
    )
  })

  it('a transaction that names an unknown message', async () => {
    const operations = [
      { type: 'push', items: [good] },
      { type: 'ack', transactionId: 'x', partitionId: 'none' },
    ]
    const answer = await transaction(server, operations)
    expect([answer.status, answer.body.success, typeof answer.body.error]).toEqual([200, false, 'string'])
  })
})

describe('names', () => {
  it.each([
    'with:colon',
    'with/slash',
    'with spaces ',
    '\u{1f680}\u{1f600} emoji',
    '...',
    '%2F%',
    'quote\'"\\',
    'ünïcode\u202e',
    'x'.repeat(255),
    '\u{1f600}'.repeat(255),
    'a,b;c=d?e&f#g',
    '\n\t',
  ])('queue, partition, transactionId and group %j are used unchanged', async (name) => {
    const queue = name
    const results = await pushed(server, [
      { queue, partition: name, payload: 'named', transactionId: name.slice(0, 100) },
      { queue, payload: 'default' },
    ])
    expect(results.map(({ queueName }) => queueName)).toEqual([queue, queue])
    const [found] = await take(server, queue, { partition: name, consumerGroup: name })
    expect(found).toMatchObject({ queue, partition: name, consumerGroup: name, data: 'named' })
    const [result] = await ackBatch(server, found === undefined ? [] : [ackOf(found)])
    expect(result).toMatchObject({ success: true, transactionId: name.slice(0, 100) })
    expect(dataOf(await take(server, queue, { consumerGroup: name, batch: 5 }))).toEqual(['default'])
  })

  it('queues and partitions whose names joined are the same are not the same', async () => {
    const pairs = [
      ['a:b', 'c'],
      ['a', 'b:c'],
      ['a\u001fb', 'c'],
      ['a', 'b\u001fc'],
    ] as const
    await pushed(
      server,
      pairs.map(([queue, partition]) => ({ queue, partition, payload: [queue, partition], transactionId: 'same' })),
    )
    for (const [queue, partition] of pairs) {
      expect(dataOf(await take(server, queue, { partition, autoAck: true, batch: 5 }))).toEqual([[queue, partition]])
    }
  })
})

it('accepts a batch of 5 MB, and one of 1,000 items', async () => {
  const queue = randomUUID()
  const large = Array.from({ length: 50 }, (_, n) => ({
    queue,
    partition: `p${n % 7}`,
    payload: `${n} ${'ä'.repeat(50_000)}`,
  }))
  const answer = await push(server, large)
  expect([201, 202], answer.text.slice(0, 300)).toContain(answer.status)
  expect(pushResults(answer).map(({ index }) => index)).toEqual(large.map((_, n) => n))
  const many = await push(
    server,
    Array.from({ length: 1_000 }, (_, n) => ({ queue, partition: `p${n % 300}`, payload: n })),
  )
  expect([201, 202]).toContain(many.status)
  const seen = await takeAll(server, queue, 1_050)
  expect(new Set(dataOf(seen))).toEqual(
    new Set([...large.map(({ payload }) => payload), ...Array.from({ length: 1_000 }, (_, n) => n)]),
  )
})

it('a payload may be 61 deep, 59 in a transaction', async () => {
  const deep = (levels: number) => `{"queue":"deep","payload":${'['.repeat(levels)}${']'.repeat(levels)}}`
  expect((await raw('/api/v1/push', `{"items":[${deep(61)}]}`)).status).toBe(201)
  const within = (levels: number) =>
    raw('/api/v1/transaction', `{"operations":[{"type":"push","items":[${deep(levels)}]}]}`)
  expect((await within(59)).body.success).toBe(true)
  expectRefused(await within(60))
})

it('one item that cannot be stored does not take the requests beside it with it', async () => {
  const queue = randomUUID()
  await configure(server, queue)
  const answers = await Promise.all(
    Array.from({ length: 20 }, (_, n) =>
      push(server, n % 5 === 0 ? [{ queue, payload: 'a\0b' }] : [{ queue, partition: `p${n}`, payload: n }]),
    ),
  )
  expect(answers.map(({ status }) => status)).toEqual(
    Array.from({ length: 20 }, (_, n) => (n % 5 === 0 ? 400 : expect.toSatisfy((s: number) => s === 201 || s === 202))),
  )
  expect(await takeAll(server, queue, 16)).toHaveLength(16)
})

it.each(['/api/v1/operations/x/stream', '/api/v1/streams/x'])('HEAD %s: it would hold a stream open', async (path) => {
  const answer = await call(server, 'HEAD', path)
  expect([answer.status, answer.headers.get('allow')]).toEqual([405, 'GET'])
})

it('a path that is not decodable is refused, not an error', async () => {
  expect([400, 404]).toContain((await get(server, '/api/v1/pop/queue/%E0%A4%A')).status)
  expect([400, 404]).toContain((await get(server, `${popPath('x').split('?')[0]}%00`)).status)
})
