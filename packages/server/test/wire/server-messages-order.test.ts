/** Order before load: whatever way a message takes into its partition, it stands where it was accepted. */
import { afterAll, afterEach, beforeAll, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  calm,
  dataOf,
  drained,
  later,
  type Message,
  openMessageTables,
  operationsOf,
  type PushItem,
  pauseLane,
  push,
  pushed,
  pushResults,
  resumeLane,
  takeAll,
  takeSome,
} from '../message-calls.js'
import { type Answer, endAll, type ServerProcess, startServer, until } from '../server-process.js'

let database: TestDatabase

beforeAll(async () => {
  database = await freshDatabase()
})
afterEach(() => endAll())
afterAll(() => database.drop())

const start = (schema: string, env: Record<string, string> = {}): Promise<ServerProcess> =>
  startServer({ DATABASE_URL: database.url, SPILLWAY_DB_SCHEMA: schema, ...calm, ...env })

/** Seeded, so that a failure can be had again. */
function randomFrom(seed: number): () => number {
  let state = seed
  return () => {
    state = (Math.imul(state, 1_103_515_245) + 12_345) >>> 0
    return state / 2 ** 32
  }
}

const byPartition = (messages: readonly Message[]): Map<string, Message[]> => {
  const out = new Map<string, Message[]>()
  for (const message of messages) out.set(message.partition, [...(out.get(message.partition) ?? []), message])
  return out
}

it('X direct, Y queued, Z that could run now: X, Y, Z', async () => {
  const server = await start('xyz')
  const item = (payload: string) => [{ queue: 'q', partition: 'p', payload }]
  await pushed(server, item('X'))
  await pauseLane(server, 'q', 'p')
  const y = await push(server, item('Y'), later)
  const z = await push(server, item('Z'))
  expect([y.status, y.body.reason, z.status, z.body.reason]).toEqual([202, 'requested', 202, 'maintaining_order'])
  expect(operationsOf(z)).toMatchObject([{ queue: 'q', partition: 'p', queuePosition: 1, reason: 'maintaining_order' }])
  expect(pushResults(z)).toMatchObject([{ index: 0, status: 'pending', queueName: 'q' }])
  await resumeLane(server, 'q', 'p')
  await drained(server, z)
  expect(dataOf(await takeAll(server, 'q', 3))).toEqual(['X', 'Y', 'Z'])
})

it('a queued push that nothing holds back is not overtaken by the direct one behind it', async () => {
  const server = await start('rounds')
  const lanes = Array.from({ length: 60 }, (_, n) => `p${n}`)
  const reasons = new Set<string>()
  await Promise.all(
    lanes.map(async (partition) => {
      await push(server, [{ queue: 'q', partition, payload: 'X' }])
      const y = await push(server, [{ queue: 'q', partition, payload: 'Y' }], later)
      const z = await push(server, [{ queue: 'q', partition, payload: 'Z' }])
      reasons.add(String(y.body.reason)).add(String(z.body.reason ?? z.status))
    }),
  )
  const seen = byPartition(await takeAll(server, 'q', 180))
  for (const partition of lanes) expect(dataOf(seen.get(partition) ?? []), partition).toEqual(['X', 'Y', 'Z'])
  expect(reasons.has('requested')).toBe(true)
})

it('system_busy: slow writes queue pushes, and each lane keeps its order', async () => {
  const server = await start('busy', {
    ...{ SPILLWAY_STORE_DELAY_MS: '120', SPILLWAY_ACCEPT_WAIT_BUDGET_MS: '40', SPILLWAY_BUSY_QUEUE_ABOVE: '0.7' },
  })
  const reasons = new Set<string>()
  let enough = false
  const sent = await Promise.all(
    Array.from({ length: 8 }, async (_, lane) => {
      let n = 0
      for (; !enough && n < 60; n++) {
        const { status, body } = await push(server, [{ queue: 'q', partition: `p${lane}`, payload: n }])
        expect([201, 202]).toContain(status)
        reasons.add(status === 201 ? 'direct' : String(body.reason))
        enough = reasons.has('system_busy') && reasons.has('direct') && n >= 10
      }
      return n
    }),
  )
  expect(reasons.has('system_busy')).toBe(true)
  const seen = byPartition(
    await takeAll(
      server,
      'q',
      sent.reduce((sum, n) => sum + n, 0),
    ),
  )
  for (const [lane, count] of sent.entries()) {
    expect(dataOf(seen.get(`p${lane}`) ?? []), `lane ${lane}`).toEqual(Array.from({ length: count }, (_, n) => n))
  }
}, 60_000)

/** Sends until it is known to be accepted; the transaction id makes what came twice one. */
async function acceptedBy(servers: ServerProcess[], pick: () => number, items: PushItem[], asynchronous: boolean) {
  for (;;) {
    const server = servers[Math.floor(pick() * servers.length)] ?? servers[0]
    if (server === undefined) throw new Error('no server is left')
    const answer = await push(server, items, asynchronous ? later : {}).catch((): Answer | null => null)
    if (answer?.status === 201 || answer?.status === 202) return answer
    if (answer !== null && answer.status !== 503) throw new Error(`${answer.status} ${answer.text}`)
  }
}

it('two instances, flips between direct and queued, one of them killed: every producer in order, nothing lost or doubled', async () => {
  const seed = Math.floor(Math.random() * 2 ** 31)
  const random = randomFrom(seed)
  const env = { SPILLWAY_LEASE_SECONDS: '2' }
  const servers = [await start('fleet', env), await start('fleet', env)]
  const [doomed, survivor] = servers as [ServerProcess, ServerProcess]
  const producers = Array.from({ length: 8 }, (_, n) => `producer ${n}`)
  const partitions = ['a', 'b', 'c']
  const perProducer = 120
  const reasons = new Set<string>()
  let sent = 0
  const flips = (async () => {
    while (sent < producers.length * perProducer) {
      const partition = partitions[Math.floor(random() * 3)]
      await pauseLane(survivor, 'q', partition)
      await resumeLane(survivor, 'q', partition)
    }
  })()
  await Promise.all([
    ...producers.map(async (producer, p) => {
      for (let n = 0; n < perProducer; ) {
        const items: PushItem[] = []
        for (const end = Math.min(perProducer, n + 1 + Math.floor(random() * 5)); n < end; n++) {
          const partition = partitions[p % 3] ?? 'a'
          items.push({ queue: 'q', partition, payload: { producer, n }, transactionId: `${producer} ${n}` })
        }
        const answer = await acceptedBy(servers, random, items, random() < 0.4)
        reasons.add(answer.status === 201 ? 'direct' : String(answer.body.reason))
        sent += items.length
      }
    }),
    (async () => {
      await until('half is sent', () => sent > (producers.length * perProducer) / 2, 40_000)
      servers.splice(servers.indexOf(doomed), 1)
      await doomed.kill()
    })(),
  ])
  await flips
  const seen = await takeAll(survivor, 'q', producers.length * perProducer, {}, 60_000)
  const whole = Array.from({ length: perProducer }, (_, n) => n)
  for (const producer of producers) {
    const own = seen.map(({ data }) => data as { producer: string; n: number }).filter((d) => d.producer === producer)
    expect(
      own.map(({ n }) => n),
      `seed ${seed}, ${producer}`,
    ).toEqual(whole)
  }
  expect([...reasons], `seed ${seed}`).toEqual(expect.arrayContaining(['direct', 'maintaining_order', 'requested']))
}, 120_000)

it('a mixed batch over 50 lanes, some of them pending: every item has its result once, and is stored once', async () => {
  const server = await start('mixed')
  const held = new Set(Array.from({ length: 10 }, (_, n) => `p${n * 5}`))
  for (const partition of held) await pauseLane(server, 'q', partition)
  const items = Array.from({ length: 200 }, (_, n) => ({ queue: 'q', partition: `p${(n * 7) % 50}`, payload: n }))
  const answer = await push(server, items)
  expect(answer.status).toBe(202)
  const results = pushResults(answer)
  expect(results.map(({ index }) => index)).toEqual(items.map((_, n) => n))
  expect(results.map(({ status }) => status)).toEqual(
    items.map(({ partition }) => (held.has(partition) ? 'pending' : 'queued')),
  )
  expect(new Set(results.map(({ message_id }) => message_id)).size).toBe(200)
  const operations = operationsOf(answer)
  expect(operations.map(({ partition }) => partition).sort()).toEqual([...held].sort())
  expect(answer.body.operationId).toBe(operations[0]?.operationId)
  expect(answer.headers.get('location')).toBe(`/api/v1/operations/${operations[0]?.operationId}`)
  for (const partition of held) await resumeLane(server, 'q', partition)
  const seen = byPartition(await takeAll(server, 'q', 200))
  for (let lane = 0; lane < 50; lane++) {
    const sent = items.filter(({ partition }) => partition === `p${lane}`).map(({ payload }) => payload)
    expect(dataOf(seen.get(`p${lane}`) ?? []), `lane ${lane}`).toEqual(sent)
  }
  const ids = new Set([...seen.values()].flat().map(({ id }) => id))
  expect(ids).toEqual(new Set(results.map(({ message_id }) => message_id)))
}, 60_000)

it('10,000 lanes at once, half of them through the operation queue: every message, once', async () => {
  const server = await start('lanes')
  const lane = (n: number) => ({ queue: 'q', partition: `p${n}`, payload: n })
  const batches = Array.from({ length: 10 }, (_, b) => Array.from({ length: 1_000 }, (_, n) => lane(b * 1_000 + n)))
  for (const [b, items] of batches.entries()) {
    const answer = await push(server, items, b % 2 === 0 ? {} : later)
    expect([201, 202], answer.text.slice(0, 500)).toContain(answer.status)
    expect(pushResults(answer)).toHaveLength(1_000)
  }
  const seen = await takeAll(server, 'q', 10_000, { partitions: 200 }, 90_000)
  expect(dataOf(seen).sort((a, b) => Number(a) - Number(b))).toEqual(Array.from({ length: 10_000 }, (_, n) => n))
}, 120_000)

it('a full operation queue refuses a push that would have to wait, and stores nothing of the batch', async () => {
  const server = await start('full', { SPILLWAY_OPERATIONS_MAX: '3' })
  const tables = openMessageTables(database.url, 'full')
  await pauseLane(server, 'q', 'held')
  for (let n = 0; n < 3; n++)
    expect((await push(server, [{ queue: 'q', partition: 'held', payload: n }])).status).toBe(202)
  const before = await tables.counts()
  const mixed = ['free', 'held', 'other'].map((partition) => ({ queue: 'q', partition, payload: 'mixed' }))
  const refused = await push(server, mixed)
  expect(refused.status).toBe(429)
  expect(refused.body).toMatchObject({ error: 'System overloaded, queue full', queueDepth: 3, status: 429 })
  const retryAfter = Number(refused.headers.get('retry-after'))
  expect(refused.body.retry_after_seconds).toBe(retryAfter)
  expect([5, 6]).toContain(retryAfter)
  expect(await tables.counts()).toEqual(before)
  // Only what has to wait is refused.
  await pushed(server, [{ queue: 'q', partition: 'free', payload: 'direct' }])
  await resumeLane(server, 'q', 'held')
  expect(dataOf(await takeAll(server, 'q', 4)).sort()).toEqual([0, 1, 2, 'direct'])
  await tables.close()
})

it('room in the operation queue is room for pushes again', async () => {
  const server = await start('room', { SPILLWAY_PUSH_PENDING_MAX: '2' })
  const item = (payload: unknown) => [{ queue: 'q', partition: 'held', payload }]
  await pauseLane(server, 'q')
  for (const n of [0, 1]) await push(server, item(n))
  expect((await push(server, item('refused'))).status).toBe(429)
  await resumeLane(server, 'q')
  await takeSome(server, 'q', { autoAck: true, batch: 2 })
  await until('a push is taken', async () => [201, 202].includes((await push(server, item('taken'))).status))
  expect(dataOf(await takeSome(server, 'q', { autoAck: true }))).toEqual(['taken'])
})

it('finished operations do not count: sequential pushes are never too many', async () => {
  const server = await start('sequence', { SPILLWAY_PUSH_PENDING_MAX: '3' })
  for (let n = 0; n < 40; n++) {
    const answer = await push(server, [{ queue: 'q', partition: `p${n % 3}`, payload: n }], later)
    expect([n, answer.status], answer.text).toEqual([n, 202])
    await drained(server, answer)
  }
})
