/**
 * Random producers and consumers against what must always hold: nobody is handed a message while an earlier one of its
 * partition is neither settled nor in the same batch, and in the end every group has settled every message once.
 */
import { afterAll, afterEach, beforeAll, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  ackBatch,
  ackOf,
  calm,
  configure,
  later,
  type Message,
  type MessageTables,
  messagesOf,
  openMessageTables,
  pop,
  push,
} from '../message-calls.js'
import { type Answer, endAll, post, type ServerProcess, startServer, until } from '../server-process.js'

let database: TestDatabase

beforeAll(async () => {
  database = await freshDatabase()
})
afterEach(() => endAll())
afterAll(() => database.drop())

const partitions = 5
const perPartition = 40
const groups = ['one', 'two', 'three']
const queue = 'model'

/** What one group knows of one partition. */
class Progress {
  /** Acked, whether or not the server accepted the ack. */
  readonly acked = new Set<number>()
  readonly completed: number[] = []
  readonly faults: string[] = []

  delivered(numbers: readonly number[]): void {
    const last = numbers.at(-1) ?? -1
    if (numbers.some((n, i) => i > 0 && n <= (numbers[i - 1] ?? -1)))
      this.faults.push(`batch ${numbers} is not in order`)
    for (let n = 0; n < last; n++) {
      if (!this.acked.has(n) && !numbers.includes(n)) this.faults.push(`${last} came before ${n}`)
    }
  }
}

function seeded(seed: number): () => number {
  let state = seed
  return () => {
    state = (Math.imul(state, 1_103_515_245) + 12_345) >>> 0
    return state / 2 ** 32
  }
}

const numberOf = ({ data }: Message): number => (data as { n: number }).n

/** No answer, or one that says to come again: as a client sees a store that is cut off, or a server that is gone. */
async function patiently(ask: () => Promise<Answer>): Promise<Answer> {
  return until('an answer', async () => {
    const answer = await ask().catch(() => null)
    if (answer !== null && answer.status >= 500 && answer.status !== 503) throw new Error(answer.text)
    return answer !== null && answer.status !== 503 && answer
  })
}

async function produce(servers: readonly ServerProcess[], partition: number, random: () => number): Promise<void> {
  for (let n = 0; n < perPartition; ) {
    const items: Record<string, unknown>[] = []
    for (const end = Math.min(perPartition, n + 1 + Math.floor(random() * 6)); n < end; n++) {
      items.push({ queue, partition: `p${partition}`, payload: { n }, transactionId: `${partition} ${n}` })
    }
    const server = servers[Math.floor(random() * servers.length)] as ServerProcess
    const asynchronous = random() < 0.3
    await patiently(() => push(server, items, asynchronous ? later : {}))
  }
}

interface Run {
  servers: readonly ServerProcess[]
  progress: Map<string, Progress>
  isDone(): boolean
}

/** Takes, and then completes, fails, hands back or forgets what it has; sometimes it says so twice. */
async function consume({ servers, progress, isDone }: Run, consumerGroup: string, random: () => number): Promise<void> {
  while (!isDone()) {
    const server = servers[Math.floor(random() * servers.length)] as ServerProcess
    const batch = 1 + Math.floor(random() * 9)
    const options = { consumerGroup, batch, partitions: 1 + Math.floor(random() * 3), wait: true, timeout: 200 }
    const messages = messagesOf(await patiently(() => pop(server, queue, options)))
    for (const partition of new Set(messages.map((message) => message.partition))) {
      const own = messages.filter((message) => message.partition === partition)
      progress.get(`${consumerGroup} ${partition}`)?.delivered(own.map(numberOf))
    }
    const kept = messages.filter(() => random() > 0.02)
    if (kept.length === 0) continue
    if (random() < 0.3) kept.reverse()
    const acks = kept.map((message) => ({
      message,
      status: random() < 0.8 ? 'completed' : random() < 0.5 ? 'failed' : 'retry',
    }))
    for (const { message, status } of acks) {
      if (status === 'completed') progress.get(`${consumerGroup} ${message.partition}`)?.acked.add(numberOf(message))
    }
    const body = acks.map(({ message, status }) => ackOf(message, { status }))
    const results = await ackBatch(server, random() < 0.1 ? [...body, ...body] : body).catch(() => null)
    // Who does not know what became of it does not count it; the tables tell.
    for (const [i, { message, status }] of acks.entries()) {
      if (results?.[i]?.success !== true || status !== 'completed') continue
      progress.get(`${consumerGroup} ${message.partition}`)?.completed.push(numberOf(message))
    }
  }
}

/** What the tables must always say (0007): something to read means ready or leased, never both, never neither. */
const broken = (tables: MessageTables) =>
  tables.query(`
    SELECT g.name, p.name AS partition, p.tail, c.head, c.lease, r.at FROM mq_groups g JOIN mq_partitions p ON p.queue = g.queue
      LEFT JOIN mq_cursors c ON c.partition = p.id AND c.grp = g.id LEFT JOIN mq_ready r ON r.partition = p.id AND r.grp = g.id
    WHERE (mq_head(c.head, r.head, g.reached, p.id, p.low, p.tail) < p.tail) <> ((r.at IS NOT NULL) <> (c.lease IS NOT NULL))
       OR c.lease IS NOT NULL AND NOT EXISTS (SELECT FROM mq_leases l WHERE l.id = c.lease AND p.id = ANY (l.partitions))`)

const settledCount = async (tables: MessageTables): Promise<number> =>
  Number((await tables.query<{ n: string }>('SELECT coalesce(sum(head), 0) AS n FROM mq_cursors'))[0]?.n)

async function simulate(
  schema: string,
  disturb?: (tables: MessageTables) => Promise<unknown>,
  prepare?: (tables: MessageTables) => Promise<unknown>,
) {
  const seed = Math.floor(Math.random() * 2 ** 31)
  const env = { DATABASE_URL: database.url, SPILLWAY_DB_SCHEMA: schema, SPILLWAY_LEASE_SECONDS: '2', ...calm }
  const servers = await Promise.all([startServer(env), startServer(env)])
  const tables = openMessageTables(database.url, schema)
  await prepare?.(tables)
  const options = { leaseTime: 1, retryLimit: 1_000, retryDelay: 5 }
  expect((await configure(servers[0], queue, options)).status).toBe(201)
  const progress = new Map<string, Progress>()
  for (const group of groups) for (let p = 0; p < partitions; p++) progress.set(`${group} p${p}`, new Progress())
  let done = false
  let disturbed = false
  const total = groups.length * partitions * perPartition
  const run: Run = { servers, progress, isDone: () => done }
  const random = seeded(seed)
  const work = [
    ...Array.from({ length: partitions }, (_, p) => produce(servers, p, seeded(seed + p + 1))),
    ...groups.flatMap((group, g) => [0, 1, 2].map((n) => consume(run, group, seeded(seed + 100 + 10 * g + n)))),
  ]
  const ended = Promise.allSettled(
    work.map((each) =>
      each.catch((fault: unknown) => {
        done = true
        throw fault
      }),
    ),
  )
  await until(
    `all is settled, seed ${seed}`,
    async () => {
      const settled = await settledCount(tables)
      // Once for certain, in the midst of it: how often chance comes by depends on how quick the machine is.
      const isDue = (!disturbed && settled > total / 10) || random() < 0.02
      if (disturb !== undefined && isDue) {
        disturbed = true
        await disturb(tables)
      }
      return done || settled >= total
    },
    60_000,
  ).finally(() => {
    done = true
  })
  const faults = (await ended).flatMap((end) => (end.status === 'rejected' ? [end.reason as unknown] : []))
  expect(faults, `seed ${seed}`).toEqual([])
  expect(await broken(tables), `seed ${seed}`).toEqual([])
  await tables.close()
  return { progress, seed, servers }
}

it('two instances: in order, none skipped, each settled once by each group', async () => {
  const { progress, seed } = await simulate('plain')
  for (const [name, { completed, faults }] of progress) {
    expect(faults, `seed ${seed}, ${name}`).toEqual([])
    expect(
      [...completed].sort((a, b) => a - b),
      `seed ${seed}, ${name}`,
    ).toEqual(Array.from({ length: perPartition }, (_, n) => n))
  }
}, 120_000)

it('groups that join one partition at a time, all at once: in order, none skipped, each settled once', async () => {
  const { progress, seed } = await simulate('joining', undefined, async (tables) => {
    const [row] = await tables.query<{ text: string }>(`SELECT pg_get_functiondef('mq_subscribe'::regproc) AS text`)
    await tables.query(row?.text.replace('DEFAULT 500', 'DEFAULT 1') ?? '')
  })
  for (const [name, { completed, faults }] of progress) {
    expect(faults, `seed ${seed}, ${name}`).toEqual([])
    expect(
      [...completed].sort((a, b) => a - b),
      `seed ${seed}, ${name}`,
    ).toEqual(Array.from({ length: perPartition }, (_, n) => n))
  }
}, 120_000)

it('with every connection to the database cut again and again: in order, none skipped, nothing doubled in the log', async () => {
  let cuts = 0
  const { progress, seed, servers } = await simulate('cut', async (tables) => {
    const ended = await tables.query(
      `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
       WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE 'spillway%'`,
    )
    cuts += ended.length
  })
  expect(cuts, `seed ${seed}`).toBeGreaterThan(0)
  for (const [name, { completed, faults }] of progress) {
    expect(faults, `seed ${seed}, ${name}`).toEqual([])
    expect(new Set(completed).size, `seed ${seed}, ${name}: settled twice`).toBe(completed.length)
  }
  const tables = openMessageTables(database.url, 'cut')
  expect((await tables.counts()).messages).toBe(partitions * perPartition)
  await tables.close()
  expect((await post(servers[0], '/api/v1/push', { items: [{ queue: 'after', payload: 1 }] })).status).toBe(201)
}, 120_000)
