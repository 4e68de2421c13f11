/** Consumer groups: each sees every message, in order, whatever becomes of the others, of leases and of deliveries. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  ack,
  ackBatch,
  acked,
  ackOf,
  calm,
  configure,
  dataOf,
  type Message,
  type MessageTables,
  openMessageTables,
  pop,
  push,
  pushed,
  take,
  takeAll,
  takeSome,
} from '../message-calls.js'
import { endAll, post, type ServerProcess, startServer, until } from '../server-process.js'

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

const numbers = (count: number): number[] => Array.from({ length: count }, (_, n) => n)
const fill = (queue: string, count: number, partition = 'Default') =>
  pushed(
    server,
    numbers(count).map((payload) => ({ queue, partition, payload, transactionId: `${partition} ${payload}` })),
  )

it('each group sees every message once, in order', async () => {
  const queue = randomUUID()
  await fill(queue, 30)
  for (const consumerGroup of ['one', 'two', '__QUEUE_MODE__']) {
    const seen: Message[] = []
    for (;;) {
      const batch = await take(server, queue, { consumerGroup, batch: 7 })
      if (batch.length === 0) break
      await acked(server, batch)
      seen.push(...batch)
    }
    expect(dataOf(seen), consumerGroup).toEqual(numbers(30))
    expect(new Set(seen.map((m) => m.consumerGroup))).toEqual(new Set([consumerGroup]))
  }
})

it('a consumer without a group is in __QUEUE_MODE__', async () => {
  const queue = randomUUID()
  await fill(queue, 1)
  expect(dataOf(await take(server, queue, { autoAck: true }))).toEqual([0])
  expect(await take(server, queue, { autoAck: true, consumerGroup: '__QUEUE_MODE__' })).toEqual([])
})

it('a lease of one group is in no other one’s way, and neither are its failures', async () => {
  const queue = randomUUID()
  await configure(server, queue, { retryLimit: 0 })
  await fill(queue, 3)
  const [first] = await take(server, queue, { consumerGroup: 'slow' })
  expect(dataOf(await take(server, queue, { consumerGroup: 'fast', batch: 10, autoAck: true }))).toEqual([0, 1, 2])
  await acked(server, first === undefined ? [] : [first], { status: 'failed', error: 'no' })
  expect(dataOf(await take(server, queue, { consumerGroup: 'third', batch: 10 }))).toEqual([0, 1, 2])
  expect(dataOf(await take(server, queue, { consumerGroup: 'slow', batch: 10 }))).toEqual([1, 2])
})

it('while a partition is leased no other consumer of the group gets it, and other partitions continue', async () => {
  const queue = randomUUID()
  await fill(queue, 2, 'a')
  await fill(queue, 2, 'b')
  // A consumer that dies: it never answers.
  const [held] = await take(server, queue)
  const other = held?.partition === 'a' ? 'b' : 'a'
  const [next] = await take(server, queue)
  expect(next?.partition).toBe(other)
  expect(await take(server, queue)).toEqual([])
  await acked(server, next === undefined ? [] : [next])
  expect(dataOf(await take(server, queue))).toEqual([1])
})

/** Two instances whose pushes may be held up for as long as a test wants. */
async function withTwo(
  schema: string,
  test: (one: ServerProcess, two: ServerProcess, held: MessageTables) => Promise<void>,
) {
  const env = {
    DATABASE_URL: database.url,
    SPILLWAY_DB_SCHEMA: schema,
    SPILLWAY_STORE_TIMEOUT_MS: '20000',
    ...calm,
  }
  const held = openMessageTables(database.url, schema)
  const [one, two] = [await startServer(env), await startServer(env)]
  try {
    await test(one, two, held)
  } finally {
    await held.close()
    await Promise.all([one.kill(), two.kill()])
  }
}

it('a message that commits late is not skipped: later messages wait for it', () =>
  withTwo('late', async (one, two, held) => {
    await pushed(one, [{ queue: 'q', payload: 'first' }])
    expect(dataOf(await take(two, 'q', { autoAck: true, batch: 10 }))).toEqual(['first'])
    const hold = await held.holdPushes()
    const late = push(one, [{ queue: 'q', payload: 'late' }])
    await until('the push has its place', async () => (await blocked()) === 1)
    const behind = push(two, [{ queue: 'q', payload: 'behind' }])
    await until('the one behind it waits', async () => (await blocked()) === 2)
    expect(await take(two, 'q', { autoAck: true, batch: 10 })).toEqual([])
    await hold.release()
    expect([(await late).status, (await behind).status]).toEqual([201, 201])
    expect(dataOf(await takeAll(two, 'q', 2))).toEqual(['late', 'behind'])
  }))

it('a message that commits late in one partition is seen by groups that have gone on in others', () =>
  withTwo('gone_on', async (one, two, held) => {
    const groups = ['a', 'b']
    await pushed(one, [{ queue: 'q', partition: 'late', payload: 0 }])
    for (const consumerGroup of groups) await take(two, 'q', { consumerGroup, autoAck: true })
    // Another's uncommitted row with the same transaction id: the push has its number, and has to wait to know.
    const open = await held.begin()
    await open.query(
      `INSERT INTO mq_messages (partition, seq, id, transaction_id, sealed, payload, created_at)
       SELECT id, 1000, gen_random_uuid(), 'same', false, '0', now() FROM mq_partitions`,
    )
    const late = push(one, [{ queue: 'q', partition: 'late', payload: 'late', transactionId: 'same' }])
    await until('the push waits', async () => (await blocked()) === 1)
    await pushed(
      two,
      numbers(5).map((payload) => ({ queue: 'q', partition: 'other', payload })),
    )
    for (const consumerGroup of groups) {
      expect(dataOf(await takeAll(two, 'q', 5, { consumerGroup }))).toEqual(numbers(5))
    }
    await open.rollback()
    expect((await late).status).toBe(201)
    for (const consumerGroup of groups) {
      expect(dataOf(await takeAll(two, 'q', 1, { consumerGroup }))).toEqual(['late'])
    }
  }))

async function blocked(): Promise<number> {
  const [row] = await tables.query<{ n: number }>(
    `SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()`,
  )
  return row?.n ?? 0
}

it('groups that read while many push see every message once, in order', async () => {
  const queue = randomUUID()
  const lanes = 4
  const each = 100
  let pushing = true
  const producers = Promise.all(
    numbers(lanes).map(async (lane) => {
      for (let n = 0; n < each; n += 2) {
        const items = [n, n + 1].map((payload) => ({ queue, partition: `p${lane}`, payload }))
        expect([201, 202]).toContain((await push(server, items)).status)
      }
    }),
  ).finally(() => {
    pushing = false
  })
  const read = async (consumerGroup: string) => {
    const seen = new Map<string, unknown[]>()
    let count = 0
    for (let idle = 0; count < lanes * each && (pushing || idle < 200); ) {
      const batch = await take(server, queue, { consumerGroup, batch: 11, partitions: 2 })
      idle = batch.length === 0 ? idle + 1 : 0
      for (const { partition, data } of batch) seen.set(partition, [...(seen.get(partition) ?? []), data])
      if (batch.length > 0) await acked(server, batch)
      count += batch.length
    }
    return seen
  }
  const all = await Promise.all(['a', 'b', 'c'].map(read))
  await producers
  for (const seen of all) for (let lane = 0; lane < lanes; lane++) expect(seen.get(`p${lane}`)).toEqual(numbers(each))
}, 60_000)

it('a late ack, after the lease is lost, changes nothing', async () => {
  const queue = randomUUID()
  await configure(server, queue, { leaseTime: 1 })
  await fill(queue, 2)
  const [first] = await take(server, queue)
  const [again] = await takeSome(server, queue)
  if (first === undefined || again === undefined) throw new Error('nothing was delivered')
  expect([first.data, again.data, first.retryCount, again.retryCount]).toEqual([0, 0, 0, 1])
  expect(await ack(server, first)).toMatchObject({ success: false, error: expect.stringMatching(/lease/i), dlq: false })
  expect(await ack(server, first, { status: 'failed' })).toMatchObject({ success: false })
  expect(await take(server, queue)).toEqual([])
  expect(await ack(server, again)).toMatchObject({ success: true, error: null })
  expect(dataOf(await take(server, queue))).toEqual([1])
})

it('an ack with a made-up lease, for another group, or once more is refused and moves nothing', async () => {
  const queue = randomUUID()
  await fill(queue, 2)
  const [message] = await take(server, queue, { consumerGroup: 'mine' })
  await take(server, queue, { consumerGroup: 'other' })
  if (message === undefined) throw new Error('nothing was delivered')
  const refused = [
    await ack(server, message, { leaseId: randomUUID() }),
    await ack(server, message, { leaseId: 'no lease at all' }),
    await ack(server, message, { consumerGroup: 'other' }),
    await ack(server, message, { consumerGroup: 'nobody' }),
    await ack(server, message, { partitionId: randomUUID() }),
    await ack(server, message, { transactionId: 'Default 1' }),
  ]
  for (const result of refused) expect(result).toMatchObject({ success: false, error: expect.any(String) })
  for (const consumerGroup of ['mine', 'other']) expect(await take(server, queue, { consumerGroup })).toEqual([])
  expect(await ack(server, message)).toMatchObject({ success: true })
  expect(await ack(server, message)).toMatchObject({ success: false })
  expect(dataOf(await take(server, queue, { consumerGroup: 'mine', batch: 5 }))).toEqual([1])
})

it('failed acks: the message is redelivered in its place, after retryDelay, until retryLimit is used up', async () => {
  const queue = randomUUID()
  const delayMs = 300
  await configure(server, queue, { retryLimit: 2, retryDelay: delayMs, deadLetterQueue: true })
  await fill(queue, 2)
  for (let n = 0; n <= 2; n++) {
    const [message] = await takeSome(server, queue)
    expect([message?.data, message?.retryCount]).toEqual([0, n])
    const failedAt = performance.now()
    const result = await ack(server, message as Message, { status: 'failed', error: `try ${n}` })
    expect(result).toMatchObject({ success: true, dlq: n === 2 })
    if (n === 2) break
    await until('it comes again', async () => (await readyCount(queue)) > 0)
    expect(performance.now() - failedAt).toBeGreaterThan(delayMs - 20)
  }
  const [next] = await takeSome(server, queue)
  expect([next?.data, next?.retryCount]).toEqual([1, 0])
  expect(await deadOf(queue)).toEqual([
    { transaction_id: 'Default 0', error: 'try 2', is_letter: true, retry_count: 3 },
  ])
})

async function readyCount(queue: string): Promise<number> {
  const [row] = await tables.query<{ n: number }>(
    `SELECT count(*)::int AS n FROM mq_ready r JOIN mq_groups g ON g.id = r.grp JOIN mq_queues q ON q.id = g.queue WHERE q.name = $1 AND r.at <= clock()`,
    [queue],
  )
  return row?.n ?? 0
}

const deadOf = (queue: string) =>
  tables.query('SELECT transaction_id, error, is_letter, retry_count FROM mq_dead WHERE queue = $1 ORDER BY seq', [
    queue,
  ])

it('without dead letters, what used up its tries is skipped and a record of it is kept', async () => {
  const queue = randomUUID()
  await configure(server, queue, { retryLimit: 0, retryDelay: 0 })
  await fill(queue, 2)
  const [message] = await take(server, queue)
  expect(await ack(server, message as Message, { status: 'failed', error: 'no use' })).toMatchObject({
    success: true,
    dlq: false,
  })
  expect(dataOf(await take(server, queue))).toEqual([1])
  expect(await deadOf(queue)).toMatchObject([{ transaction_id: 'Default 0', error: 'no use', is_letter: false }])
})

it('status dlq puts a message aside at once, and retry hands it back uncounted', async () => {
  const queue = randomUUID()
  await fill(queue, 2)
  const [first] = await take(server, queue)
  expect(await ack(server, first as Message, { status: 'retry' })).toMatchObject({ success: true, dlq: false })
  const [again] = await take(server, queue)
  expect([again?.data, again?.retryCount]).toEqual([0, 0])
  expect(await ack(server, again as Message, { status: 'dlq', error: 'poison' })).toMatchObject({
    success: true,
    dlq: true,
  })
  expect(dataOf(await take(server, queue))).toEqual([1])
  expect(await deadOf(queue)).toMatchObject([{ transaction_id: 'Default 0', error: 'poison', is_letter: true }])
})

it('a poison message whose consumer dies each time is the only dead letter: its neighbours are delivered', async () => {
  const queue = randomUUID()
  await configure(server, queue, { leaseTime: 1, retryLimit: 1, deadLetterQueue: true })
  await fill(queue, 4)
  expect(dataOf(await take(server, queue, { batch: 4 }))).toEqual(numbers(4))
  const settled: unknown[] = []
  await until(
    'the good ones are settled',
    async () => {
      const batch = await take(server, queue, { batch: 4 })
      // A consumer that gets the second message dies.
      if (batch.some(({ data }) => data === 1)) return false
      if (batch.length > 0) await acked(server, batch)
      settled.push(...dataOf(batch))
      return settled.length >= 3
    },
    20_000,
  )
  expect(settled).toEqual([0, 2, 3])
  expect(await deadOf(queue)).toMatchObject([{ transaction_id: 'Default 1', is_letter: true, retry_count: 2 }])
}, 30_000)

it('acks within a batch may come in any order; open messages are redelivered in order when the lease ends', async () => {
  const queue = randomUUID()
  await configure(server, queue, { leaseTime: 1 })
  await fill(queue, 6)
  const batch = await take(server, queue, { batch: 5 })
  const chosen = [4, 2, 0].flatMap((n) => batch[n] ?? [])
  const results = await ackBatch(
    server,
    chosen.map((message) => ackOf(message)),
  )
  expect(results.map(({ index, success }) => [index, success])).toEqual([0, 1, 2].map((index) => [index, true]))
  const seen: Message[] = []
  while (seen.length < 3) {
    const next = await takeSome(server, queue, { batch: 5 })
    await acked(server, next)
    seen.push(...next)
  }
  expect(seen.map(({ data, retryCount }) => [data, retryCount])).toEqual([
    [1, 1],
    [3, 1],
    [5, 0],
  ])
})

it('one lease covers all partitions of a pop, and is extended as one', async () => {
  const queue = randomUUID()
  await configure(server, queue, { leaseTime: 1 })
  for (const partition of ['a', 'b', 'c']) await fill(queue, 2, partition)
  const batch = await take(server, queue, { batch: 6, partitions: 3 })
  expect(new Set(batch.map(({ leaseId }) => leaseId)).size).toBe(1)
  expect(new Set(batch.map(({ partition }) => partition)).size).toBe(3)
  const leaseId = batch[0]?.leaseId ?? ''
  const extended = await post(server, `/api/v1/lease/${leaseId}/extend`, { seconds: 60 })
  expect(Date.parse(String(extended.body.newExpiresAt)) - Date.now()).toBeGreaterThan(50_000)
  // Past the first end, by the database's clock.
  await until('the first lease would have ended', async () => {
    const [row] = await tables.query<{ over: boolean }>(
      `SELECT clock() > max(moved_at) + interval '1500 ms' AS over FROM (SELECT created_at AS moved_at FROM mq_groups g WHERE g.queue = (SELECT id FROM mq_queues WHERE name = $1)) x`,
      [queue],
    )
    return row?.over === true
  })
  expect((await pop(server, queue)).status).toBe(204)
  await acked(server, batch)
})

it('groups that begin in many queues and pushes to all of them do not block each other', async () => {
  const queues = numbers(12).map((n) => `${randomUUID()} ${n}`)
  const batch = queues.map((queue) => ({ queue, payload: 0 }))
  await pushed(server, batch)
  const other = await startServer({ DATABASE_URL: database.url, ...calm })
  const statuses = new Set<number>()
  let beginning = true
  const producers = [server, server, other, other].map(async (to) => {
    while (beginning) statuses.add((await push(to, batch)).status)
  })
  const beginners = [server, other].map(async (at, n) => {
    for (let round = 0; round < 12; round++) {
      const pops = [...queues].reverse().map((queue) => pop(at, queue, { consumerGroup: `${n} begins ${round}` }))
      for (const { status, text } of await Promise.all(pops)) expect(status, text).toBe(200)
    }
  })
  await Promise.all(beginners).finally(() => {
    beginning = false
  })
  await Promise.all(producers)
  await other.kill()
  expect([...statuses].filter((status) => status !== 201 && status !== 202)).toEqual([])
}, 60_000)
