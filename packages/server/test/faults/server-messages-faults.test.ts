/** Messages while things break: what was answered is true, nothing is lost, twice or out of order, and consumers go on. */
import { randomUUID } from 'node:crypto'
import { chmod, mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { type EmbeddedServer, startEmbedded } from '@spillway/embedded-postgres'
import { afterAll, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import {
  ack,
  ackBatch,
  acked,
  ackOf,
  configure,
  dataOf,
  drained,
  later,
  type Message,
  messagesOf,
  operationsOf,
  pauseLane,
  pop,
  push,
  pushed,
  pushResults,
  resumeLane,
  take,
  takeAll,
  takeSome,
} from '../message-calls.js'
import { at, type Fleet, startFleet } from '../petitions-fleet.js'
import { type Answer, type ServerProcess, until, untilReady } from '../server-process.js'

const idOf = (partition: string, n: number): string => `${partition}/${n}`

/** One message of a producer, and its answer; null: none, the connection broke. */
interface Sent {
  partition: string
  n: number
  status: number | null
}

/** Pushes to one partition, one after the other, at once and by way of the operation queue in turn. */
async function produce(f: Fleet, queue: string, partition: string, sent: Sent[], over: () => boolean): Promise<void> {
  for (let n = 0; !over(); n++) {
    const items = [{ queue, partition, payload: n, transactionId: idOf(partition, n) }]
    const answer = await push(f.next(), items, n % 3 === 0 ? later : {}).catch(() => null)
    sent.push({ partition, n, status: answer?.status ?? null })
    if (answer !== null) expectHonest(answer)
  }
}

/** Stored, accepted, or a refusal that says when to come back. */
function expectHonest({ status, body, headers, text }: Answer): void {
  expect([200, 201, 202, 204, 503], text).toContain(status)
  if (status !== 503) return
  expect(Number(headers.get('retry-after'))).toBe(body.retry_after_seconds)
  expect(body.error).toEqual(expect.stringMatching(/./))
  expect(text).not.toMatch(/ECONN|pg_|SELECT|postgres|\.js:/i)
}

interface Consumed {
  /** In the order in which they were handed out. */
  delivered: Message[]
  /** Those whose ack succeeded, with the number of deliveries that had begun by then. */
  settled: Map<string, number>
}

async function consume(f: Fleet, queue: string, seen: Consumed, over: () => boolean): Promise<void> {
  while (!over()) {
    const answer = await pop(f.next(), queue, { batch: 5, partitions: 2, wait: true, timeout: 200 }).catch(() => null)
    if (answer === null) continue
    expectHonest(answer)
    const messages = messagesOf(answer)
    seen.delivered.push(...messages)
    if (messages.length === 0) continue
    const acks = messages.map((message) => ackOf(message))
    // An ack that failed or was not heard of: the lease ends, and they come again.
    const results = await ackBatch(f.next(), acks).catch(() => [])
    for (const { success, transactionId } of results) {
      if (success) seen.settled.set(transactionId, seen.delivered.length)
    }
  }
}

const logOf = (f: Fleet, queue: string) =>
  f.sql<{ partition: string; payload: unknown; transaction_id: string }>(
    `SELECT p.name AS partition, m.payload::json AS payload, m.transaction_id FROM spillway.mq_messages m
     JOIN spillway.mq_partitions p ON p.id = m.partition JOIN spillway.mq_queues q ON q.id = p.queue
     WHERE q.name = $1 ORDER BY p.name, m.seq`,
    [queue],
  )

const idle = (f: Fleet) =>
  until('nothing waits', async () => (await f.sql('SELECT FROM spillway.ops LIMIT 1')).length === 0, 30_000)

/** After 201 or 202 it is stored once, after any other answer at most once. In the order in which they were sent. */
async function expectTrue(f: Fleet, queue: string, sent: readonly Sent[]): Promise<void> {
  const log = await logOf(f, queue)
  const there = new Set(log.map(({ transaction_id }) => transaction_id))
  expect(there.size).toBe(log.length)
  const accepted = sent.filter(({ status }) => status === 201 || status === 202)
  expect(accepted.filter(({ partition, n }) => !there.has(idOf(partition, n)))).toEqual([])
  const known = new Set(sent.map(({ partition, n }) => idOf(partition, n)))
  expect([...there].filter((id) => !known.has(id))).toEqual([])
  expectGrowing(log.map(({ partition, payload }) => [partition, Number(payload)]))
}

function expectGrowing(entries: readonly (readonly [string, number])[]): void {
  const last = new Map<string, number>()
  for (const [partition, n] of entries) {
    expect(n, `in ${partition} behind ${last.get(partition)}`).toBeGreaterThan(last.get(partition) ?? -1)
    last.set(partition, n)
  }
}

/** New ones came in order, and nothing came again once it was known to be settled. */
function expectInOrder({ delivered, settled }: Consumed): void {
  const first = new Map<string, Message>()
  for (const message of delivered) {
    if (!first.has(message.transactionId)) first.set(message.transactionId, message)
  }
  expectGrowing([...first.values()].map(({ partition, data }) => [partition, Number(data)]))
  const again = delivered.filter(({ transactionId }, i) => i >= (settled.get(transactionId) ?? delivered.length))
  expect(again).toEqual([])
}

describe('PostgreSQL killed', () => {
  let dir: string
  let own: EmbeddedServer
  let f: Fleet
  let queue: string
  const log = { info: () => undefined, warn: () => undefined, error: () => undefined }

  beforeAll(async () => {
    dir = await mkdtemp(join(tmpdir(), 'spillway-messages-'))
    await chmod(dir, 0o755)
    const settings = { min_wal_size: '80MB', shared_buffers: '16MB' }
    own = await startEmbedded({ dataDir: join(dir, 'data'), log, settings })
    const env = { SPILLWAY_STORE_TIMEOUT_MS: '2000', SPILLWAY_LEASE_SECONDS: '5' }
    f = await startFleet({ instances: 2, url: own.url, env })
  })
  beforeEach(() => {
    queue = randomUUID()
  })
  afterAll(async () => {
    try {
      await f.close()
    } finally {
      await own.stop()
      await rm(dir, { recursive: true, force: true })
    }
  })

  const kill = async (): Promise<void> => {
    const { pid } = own
    process.kill(pid, 'SIGKILL')
    await until('PostgreSQL runs again', () => own.pid !== pid, 30_000)
  }
  const allReady = () => Promise.all(f.servers.map((server) => untilReady(server)))

  it('in the middle of pushes, pops and acks: every answer was correct, and everything continues in order', {
    timeout: 120_000,
  }, async () => {
    await configure(f.next(), queue, { leaseTime: 2, retryLimit: 100 })
    const sent: Sent[] = []
    const seen: Consumed = { delivered: [], settled: new Map() }
    let stopPushing = false
    let stop = false
    const producers = Array.from({ length: 12 }, (_, p) => produce(f, queue, `p${p}`, sent, () => stopPushing))
    const consumers = Array.from({ length: 6 }, () => consume(f, queue, seen, () => stop))
    const accepted = () => sent.filter(({ status }) => status === 201 || status === 202).length
    try {
      for (let round = 0; round < 2; round++) {
        const before = { accepted: accepted(), settled: seen.settled.size, refused: sent.length - accepted() }
        await until('work is done', () => accepted() > before.accepted + 100 && seen.settled.size > before.settled + 50)
        const killing = kill()
        await until('some are refused', () => sent.length - accepted() > before.refused)
        await killing
        const then = { accepted: accepted(), settled: seen.settled.size }
        await until(
          'pushes and pops go on',
          () => accepted() > then.accepted + 100 && seen.settled.size > then.settled + 100,
          30_000,
        )
      }
      stopPushing = true
      await Promise.all(producers)
      await idle(f)
      await expectTrue(f, queue, sent)
      await until(
        'nothing is left to read',
        async () =>
          (await f.sql('SELECT FROM spillway.mq_ready UNION ALL SELECT FROM spillway.mq_leases')).length === 0,
        60_000,
      )
    } finally {
      stopPushing = true
      stop = true
      await Promise.all([...producers, ...consumers])
    }
    // An ack whose answer was lost may have counted; every message was handed out, in any case.
    const delivered = new Set(seen.delivered.map(({ transactionId }) => transactionId))
    expect((await logOf(f, queue)).filter(({ transaction_id }) => !delivered.has(transaction_id))).toEqual([])
    expectInOrder(seen)
    expect(await f.sql('SELECT fault FROM spillway.audit()')).toEqual([])
    expect(await f.sql('SELECT FROM spillway.mq_dead')).toEqual([])
    expect(await take(f.next(), queue)).toEqual([])
  })

  it('a push without an answer, or with 503, is repeated with the same transactionId: stored once, with its status', async () => {
    const item = (id: string) => ({ queue, partition: id.slice(0, 1), payload: id, transactionId: id })
    const stored: string[] = []
    const uncertain: string[] = []
    const load = Array.from({ length: 32 }, async () => {
      while (uncertain.length < 32) {
        const id = randomUUID()
        const answer = await push(f.next(), [item(id)]).catch(() => null)
        ;(answer?.status === 201 ? stored : uncertain).push(id)
      }
    })
    await until('some are stored', () => stored.length > 100)
    await kill()
    await Promise.all(load)
    await allReady()
    await idle(f)
    const before = new Set((await logOf(f, queue)).map(({ transaction_id }) => transaction_id))
    for (const id of uncertain) {
      const [result] = await pushed(f.next(), [item(id)])
      expect([id, result?.status]).toEqual([id, before.has(id) ? 'duplicate' : 'queued'])
    }
    const there = (await takeAll(f.next(), queue, stored.length + uncertain.length)).map((m) => m.transactionId)
    expect(there.sort()).toEqual([...stored, ...uncertain].sort())
  })

  it('while lanes are held: accepted operations wait, and drain in order', async () => {
    await pauseLane(f.next(), queue)
    const send = async (n: number) => {
      const items = ['p', 'q'].map((partition) => ({ queue, partition, payload: n }))
      const answer = await push(f.next(), items)
      expect([answer.status, operationsOf(answer).length], answer.text).toEqual([202, 2])
      return answer
    }
    for (let n = 0; n < 20; n++) await send(n)
    await kill()
    await allReady()
    let last: Answer | undefined
    for (let n = 20; n < 40; n++) last = await send(n)
    // Pops go on: what is held is not there yet, what is elsewhere is.
    await pushed(f.next(), [{ queue: `${queue}-other`, payload: 'elsewhere' }])
    expect(dataOf(await take(f.next(), `${queue}-other`))).toEqual(['elsewhere'])
    expect(await take(f.next(), queue)).toEqual([])
    await resumeLane(f.next(), queue)
    if (last !== undefined) await drained(f.next(), last)
    const seen = await takeAll(f.next(), queue, 80)
    for (const partition of ['p', 'q']) {
      expect(dataOf(seen.filter((message) => message.partition === partition))).toEqual(Array.from(Array(40).keys()))
    }
  })
})

describe('a server killed', () => {
  let f: Fleet
  let survivor: ServerProcess
  let doomed: ServerProcess
  let queue: string
  let shiftSeconds = 0

  beforeAll(async () => {
    f = await startFleet()
    survivor = at(f.servers, 0)
  })
  beforeEach(async () => {
    queue = randomUUID()
    doomed = await f.start()
    await configure(doomed, queue, { leaseTime: 60, retryDelay: 0 })
    const items = Array.from({ length: 30 }, (_, n) => ({ queue, partition: `p${n % 3}`, payload: Math.floor(n / 3) }))
    await pushed(doomed, items)
  })
  afterAll(() => f.close())

  const forward = async (seconds: number) => {
    shiftSeconds += seconds
    await f.sql(`CREATE OR REPLACE FUNCTION spillway.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS
      $$ SELECT clock_timestamp() + interval '${shiftSeconds} seconds' $$`)
  }
  const numbers = (messages: readonly Message[]) => dataOf(messages) as number[]

  it('with abandoned leases: others get the messages after leaseTime, each partition in order', async () => {
    const held = await take(doomed, queue, { batch: 12, partitions: 2 })
    expect(numbers(held)).toEqual([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1])
    const free = await take(doomed, queue, { batch: 1 })
    await acked(doomed, free)
    await doomed.kill()
    // Partitions that nobody holds go on.
    const rest = await take(survivor, queue, { batch: 20, partitions: 3 })
    expect(rest.map(({ partition, data }) => [partition, data])).toEqual(
      Array.from({ length: 9 }, (_, n) => [free[0]?.partition, n + 1]),
    )
    await acked(survivor, rest)
    await forward(58)
    expect(await take(survivor, queue)).toEqual([])
    await forward(2)
    const again = new Map<string, number[]>()
    await until('all are delivered again', async () => {
      const found = await take(survivor, queue, { batch: 5, partitions: 2 })
      for (const { partition, data } of found) again.set(partition, [...(again.get(partition) ?? []), Number(data)])
      await (found.length > 0 && acked(survivor, found))
      return found.length === 0 && again.size === 2
    })
    const whole = Array.from(Array(10).keys())
    expect([...again.values()]).toEqual([whole, whole])
    // Who had them is late, wherever it asks.
    const late = await ackBatch(
      survivor,
      held.map((message) => ackOf(message)),
    )
    expect(late.filter(({ success }) => success)).toEqual([])
  })

  it("the lease is the consumer's, not the server's: it acks elsewhere", async () => {
    const held = await take(doomed, queue, { batch: 4 })
    await doomed.kill()
    await acked(survivor, held)
    const next = await take(survivor, queue, { batch: 1, partition: held[0]?.partition ?? '' })
    expect(numbers(next)).toEqual([4])
  })

  it('while consumers wait at it: later pushes reach consumers elsewhere', async () => {
    await takeAll(survivor, queue, 30)
    const lost = Array.from({ length: 5 }, () => pop(doomed, queue, { wait: true, timeout: 20_000 }).catch(() => null))
    const waiting = pop(survivor, queue, { wait: true, timeout: 20_000 })
    await doomed.kill()
    expect(await Promise.all(lost)).toEqual([null, null, null, null, null])
    const began = performance.now()
    await pushed(survivor, [{ queue, payload: 'later' }])
    expect(dataOf(messagesOf(await waiting))).toEqual(['later'])
    expect(performance.now() - began).toBeLessThan(5_000)
  })

  it('with pushes that it had accepted: others store them, in order', async () => {
    await pauseLane(doomed, queue)
    const answers: Answer[] = []
    for (let n = 10; n < 15; n++) answers.push(await push(doomed, [{ queue, partition: 'p0', payload: n }]))
    expect(answers.map(({ status }) => status)).toEqual(Array(5).fill(202))
    await doomed.kill()
    await resumeLane(survivor, queue)
    for (const answer of answers) await drained(survivor, answer)
    const [first] = await takeSome(survivor, queue, { partition: 'p0' })
    if (first === undefined) throw new Error('there was none')
    expect(await ack(survivor, first)).toMatchObject({ success: true })
    const rest = await take(survivor, queue, { partition: 'p0', batch: 100 })
    expect(numbers(rest)).toEqual(Array.from({ length: 14 }, (_, n) => n + 1))
    expect(rest.slice(-5).map(({ id }) => id)).toEqual(answers.map((answer) => pushResults(answer)[0]?.message_id))
  })
})
