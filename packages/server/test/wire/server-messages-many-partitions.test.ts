/** A queue with 20,000 partitions: a new group costs little, misses nothing, and its queue can still be looked at. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  acked,
  calm,
  type Message,
  type MessageTables,
  messagesOf,
  openMessageTables,
  pop,
  pushed,
  take,
  takeAll,
} from '../message-calls.js'
import { call, endAll, get, type ServerProcess, startServer, until } from '../server-process.js'

const partitionCount = 20_000
const queue = 'wide'

let database: TestDatabase
let server: ServerProcess
let tables: MessageTables

beforeAll(async () => {
  database = await freshDatabase()
  server = await startServer({ DATABASE_URL: database.url, ...calm, SPILLWAY_GROUPS_PER_QUEUE_MAX: '70' })
  tables = openMessageTables(database.url)
  await fill(queue, partitionCount)
}, 120_000)
afterAll(async () => {
  await tables.close()
  await endAll()
  await database.drop()
})

const numbers = (count: number): number[] => Array.from({ length: count }, (_, n) => n)

async function fill(into: string, count: number): Promise<void> {
  for (let at = 0; at < count; at += 1_000) {
    const some = numbers(Math.min(1_000, count - at)).map((n) => at + n)
    await pushed(
      server,
      some.map((n) => ({ queue: into, partition: `p${n}`, payload: n, transactionId: `tx-${n}` })),
    )
  }
}

/** Rows that belong to groups. */
const groupRows = async (): Promise<number> =>
  Number(
    (
      await tables.query<{ n: string }>(
        'SELECT (SELECT count(*) FROM mq_groups) + (SELECT count(*) FROM mq_cursors) + (SELECT count(*) FROM mq_ready) + (SELECT count(*) FROM mq_leases) AS n',
      )
    )[0]?.n,
  )

/** See the heads of the messages workload's .sql files. */
const broken = () =>
  tables.query(`
    SELECT g.name, p.name AS partition, p.tail, mq_head(c.head, r.head, g.reached, p.id, p.low, p.tail) AS head, c.lease, r.at
    FROM mq_groups g JOIN mq_partitions p ON p.queue = g.queue
      LEFT JOIN mq_cursors c ON c.partition = p.id AND c.grp = g.id LEFT JOIN mq_ready r ON r.partition = p.id AND r.grp = g.id
    WHERE CASE WHEN c.partition IS NULL AND p.id > g.reached THEN r.at IS NOT NULL
      ELSE (mq_head(c.head, r.head, g.reached, p.id, p.low, p.tail) < p.tail) <> ((r.at IS NOT NULL) <> (c.lease IS NOT NULL)) END LIMIT 10`)

it('a new group’s first pop is quick and writes few rows', async () => {
  const before = await groupRows()
  const started = performance.now()
  const messages = await take(server, queue, { consumerGroup: 'first', batch: 10, partitions: 10 })
  const tookMs = performance.now() - started
  expect(messages).toHaveLength(10)
  expect((await groupRows()) - before).toBeLessThan(2_000)
  expect(tookMs).toBeLessThan(1_000)
  await acked(server, messages)
})

it('a group gets all existing messages once, and those pushed meanwhile', async () => {
  const consumerGroup = 'every'
  const seen: Message[] = []
  const took = async (batch: number): Promise<number> => {
    const messages = await take(server, queue, { consumerGroup, batch, partitions: 100, autoAck: true })
    seen.push(...messages)
    return messages.length
  }
  await took(100)
  // Into partitions that it has reached, into those that it has not, and into new ones.
  const late = numbers(300).map((n) => ({ partition: n < 250 ? `p${n * 79}` : `late${n}`, n: partitionCount + n }))
  await pushed(
    server,
    late.map(({ partition, n }) => ({ queue, partition, payload: n, transactionId: `tx-${n}` })),
  )
  while ((await took(1_000)) > 0);
  const got = seen.map(({ data }) => data as number).sort((a, b) => a - b)
  expect(got).toEqual(numbers(partitionCount + 300))
  const last = new Map<string, number>()
  for (const { partition, data } of seen) {
    expect(data, partition).toBeGreaterThan(last.get(partition) ?? -1)
    last.set(partition, data as number)
  }
  expect(await broken()).toEqual([])
}, 120_000)

it('several pops of a new group at once do not get in each other’s way', async () => {
  const consumerGroup = 'together'
  const seen = new Map<string, number>()
  const consume = async (): Promise<void> => {
    for (;;) {
      const messages = await take(server, queue, { consumerGroup, batch: 500, partitions: 100, autoAck: true })
      for (const { id } of messages) seen.set(id, (seen.get(id) ?? 0) + 1)
      if (messages.length === 0) return
    }
  }
  await Promise.all([consume(), consume(), consume(), consume()])
  expect(seen.size).toBe(partitionCount + 300)
  expect([...seen.values()].filter((times) => times > 1)).toEqual([])
}, 120_000)

it('a group that begins with new messages writes no rows for old ones', async () => {
  const consumerGroup = 'fresh'
  const before = await groupRows()
  expect(await take(server, queue, { consumerGroup, subscriptionMode: 'new' })).toEqual([])
  expect((await groupRows()) - before).toBe(1)
  const partitions = ['p1', 'p19999', 'newest']
  await pushed(
    server,
    partitions.map((partition) => ({ queue, partition, payload: partition, transactionId: randomUUID() })),
  )
  const got = await takeAll(server, queue, 3, { consumerGroup })
  expect(got.map(({ data }) => data).sort()).toEqual([...partitions].sort())
  const { body } = await get(server, `/api/v1/consumer-groups/${consumerGroup}?limit=1`)
  expect(JSON.stringify(body)).toContain('"offsetLag":0')
})

it('a group that begins at a time gets the messages from then on', async () => {
  const consumerGroup = 'timed'
  const [row] = await tables.query<{ at: Date }>(
    `SELECT max(created_at) AS at FROM mq_messages WHERE transaction_id = 'tx-${partitionCount}'`,
  )
  const got = await takeAll(server, queue, 303, { consumerGroup, subscriptionFrom: row?.at.toISOString() ?? '' })
  const [counted] = await tables.query<{ n: string }>('SELECT count(*) AS n FROM mq_messages WHERE created_at >= $1', [
    row?.at,
  ])
  expect(got).toHaveLength(Number(counted?.n))
}, 60_000)

it('one partition is found at once, wherever it is, and once', async () => {
  const consumerGroup = 'picky'
  const before = await groupRows()
  for (const partition of ['p3', 'p17000']) {
    const [message] = await take(server, queue, { consumerGroup, partition, autoAck: true })
    expect(message?.partition).toBe(partition)
  }
  expect((await groupRows()) - before).toBe(3)
  await fill('narrower', 1_200)
  const picked = numbers(20).map((n) => `p${n * 60}`)
  const seen: Message[] = []
  for (const partition of picked) {
    seen.push(...(await take(server, 'narrower', { consumerGroup, partition, autoAck: true })))
  }
  expect(seen.map(({ partition }) => partition)).toEqual(picked)
  seen.push(...(await takeAll(server, 'narrower', 1_180, { consumerGroup })))
  expect(seen.map(({ data }) => data as number).sort((a, b) => a - b)).toEqual(numbers(1_200))
  // A partition that does not exist has nothing, and is found when it does.
  const late = pop(server, 'narrower', { consumerGroup: 'early', partition: 'later', wait: true, timeout: 20_000 })
  await until('somebody waits', async () => (await get(server, '/metrics')).text.includes('waiting_consumers 1'))
  await pushed(server, [{ queue: 'narrower', partition: 'later', payload: 'came' }])
  expect(messagesOf(await late)).toMatchObject([{ data: 'came' }])
  expect(await broken()).toEqual([])
}, 60_000)

it('fifty new groups do not write a million rows, and what there is can be looked at', async () => {
  const before = await groupRows()
  for (const n of numbers(50)) await take(server, queue, { consumerGroup: `random ${n}` })
  expect((await groupRows()) - before).toBeLessThan(60_000)
  const pages = [
    '/api/v1/status',
    '/api/v1/status/queues',
    `/api/v1/status/queues/${queue}`,
    '/api/v1/resources/overview',
    '/api/v1/resources/queues',
    `/api/v1/resources/queues/${queue}`,
    '/api/v1/consumer-groups',
    '/api/v1/consumer-groups/first',
  ]
  for (const path of pages) {
    const answer = await get(server, path)
    expect(answer.status, `${path} ${answer.text.slice(0, 300)}`).toBe(200)
  }
}, 120_000)

it('a queue has at most its maximum of groups, and existing groups continue', async () => {
  const narrow = 'narrow'
  await pushed(server, [{ queue: narrow, payload: 1 }])
  for (const n of numbers(70)) expect((await pop(server, narrow, { consumerGroup: `g${n}` })).status).toBe(200)
  const refused = await pop(server, narrow, { consumerGroup: 'one more' })
  expect(refused.status).toBe(409)
  expect(refused.body).toMatchObject({ code: 'group_limit', detail: expect.stringContaining('70') })
  expect(await tables.query(`SELECT FROM mq_groups WHERE name = 'one more'`)).toEqual([])
  await pushed(server, [{ queue: narrow, partition: 'other', payload: 2 }])
  expect((await pop(server, narrow, { consumerGroup: 'g69' })).status).toBe(200)
  await call(server, 'DELETE', `/api/v1/consumer-groups/g0/queues/${narrow}`)
  expect((await pop(server, narrow, { consumerGroup: 'one more' })).status).toBe(200)
})
