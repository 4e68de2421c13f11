/** Consumers that wait: woken at once by what they wait for, at no cost while there is nothing, gone without a trace. */
import { randomUUID } from 'node:crypto'
import { setMaxListeners } from 'node:events'
import { afterAll, beforeAll, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  ack,
  acked,
  calm,
  configure,
  dataOf,
  later,
  type Message,
  messagesOf,
  openMessageTables,
  type PopOptions,
  pop,
  popPath,
  push,
  pushed,
  take,
} from '../message-calls.js'
import { type Answer, endAll, get, type ServerProcess, sample, startServer, until } from '../server-process.js'

let database: TestDatabase
let one: ServerProcess
let two: ServerProcess

beforeAll(async () => {
  database = await freshDatabase()
  one = await startServer({ DATABASE_URL: database.url, ...calm })
  two = await startServer({ DATABASE_URL: database.url, ...calm })
})
afterAll(async () => {
  await endAll()
  await database.drop()
})

const waitMs = 20_000
async function waiting(server: ServerProcess): Promise<number> {
  const found = sample((await get(server, '/metrics')).text, 'spillway_messages_waiting_consumers')
  if (found === undefined) throw new Error('the gauge is not there')
  return found
}
const untilWaiting = (server: ServerProcess, count: number) =>
  until(`${count} wait`, async () => (await waiting(server)) === count)
const wait = (server: ServerProcess, queue: string | null, options: PopOptions = {}) =>
  pop(server, queue, { wait: true, timeout: waitMs, ...options }, waitMs + 10_000)
const numbers = (count: number): number[] => Array.from({ length: count }, (_, n) => n)

const median = (values: readonly number[]): number => [...values].sort((a, b) => a - b)[values.length >> 1] ?? Infinity

/** How long after a push was answered the waiting pop is, one round after the other. */
async function wakeTimes(from: ServerProcess, to: ServerProcess, rounds: number, fresh: boolean): Promise<number[]> {
  const queue = randomUUID()
  const times: number[] = []
  for (let round = 0; round < rounds; round++) {
    const name = fresh ? `${queue} ${round}` : queue
    const woken = wait(to, name, { autoAck: true }).then((answer) => ({ answer, at: performance.now() }))
    await untilWaiting(to, 1)
    await pushed(from, [{ queue: name, payload: round }])
    const answered = performance.now()
    const { answer, at } = await woken
    expect(dataOf(messagesOf(answer))).toEqual([round])
    times.push(at - answered)
  }
  return times
}

it('a push wakes a pop on the same instance within 50 ms', async () => {
  expect(median(await wakeTimes(one, one, 15, false))).toBeLessThan(50)
})

it('a push wakes a pop on another instance within 50 ms', async () => {
  expect(median(await wakeTimes(one, two, 15, false))).toBeLessThan(50)
})

it('the first push to a queue wakes pops that waited for it before it existed', async () => {
  expect(median(await wakeTimes(one, two, 9, true))).toBeLessThan(50)
})

it('a queued push wakes waiting pops once it is stored', async () => {
  const queue = randomUUID()
  const times: number[] = []
  for (let round = 0; round < 9; round++) {
    const woken = wait(two, queue, { autoAck: true }).then(() => performance.now())
    await untilWaiting(two, 1)
    const answer = await push(one, [{ queue, payload: round }], { ...later, prefer: 'respond-async, wait=10' })
    expect(answer.status).toBe(201)
    const stored = performance.now()
    times.push((await woken) - stored)
  }
  expect(median(times)).toBeLessThan(50)
})

it('of many who wait for a partition each, the one whose partition it is is woken', async () => {
  const queue = randomUUID()
  const partitions = numbers(30).map((n) => `p${n}`)
  const answers = partitions.map((partition) => wait(two, queue, { partition, autoAck: true }))
  await untilWaiting(two, 30)
  const times: number[] = []
  for (const [n, partition] of [...partitions.entries()].reverse()) {
    await pushed(one, [{ queue, partition, payload: n }])
    const sent = performance.now()
    expect(dataOf(messagesOf((await answers[n]) as Answer))).toEqual([n])
    times.push(performance.now() - sent)
  }
  expect(median(times)).toBeLessThan(50)
})

it('of many who wait for a namespace each, the one whose namespace it is is woken', async () => {
  const queues = numbers(10).map(() => randomUUID())
  for (const queue of queues) await configure(one, queue, {}, { namespace: `of ${queue}` })
  const answers = queues.map((queue) => wait(two, null, { namespace: `of ${queue}`, autoAck: true }))
  await untilWaiting(two, 10)
  const times: number[] = []
  for (const [n, queue] of [...queues.entries()].reverse()) {
    await pushed(one, [{ queue, payload: n }])
    const sent = performance.now()
    expect(dataOf(messagesOf((await answers[n]) as Answer))).toEqual([n])
    times.push(performance.now() - sent)
  }
  expect(median(times)).toBeLessThan(50)
})

it('one push to many partitions serves all who wait, each with a partition of its own', async () => {
  const queue = randomUUID()
  const answers = numbers(40).map((n) => wait(n % 2 === 0 ? one : two, queue))
  await untilWaiting(one, 20)
  await untilWaiting(two, 20)
  await pushed(
    one,
    numbers(40).map((n) => ({ queue, partition: `p${n}`, payload: n })),
  )
  const began = performance.now()
  const found = (await Promise.all(answers)).flatMap(messagesOf)
  expect(performance.now() - began).toBeLessThan(5_000)
  expect(dataOf(found).sort((a, b) => Number(a) - Number(b))).toEqual(numbers(40))
})

it('groups that wait for the same queue are all woken by one push', async () => {
  const queue = randomUUID()
  const answers = numbers(10).map((n) => wait(two, queue, { consumerGroup: `g${n}` }))
  await untilWaiting(two, 10)
  await pushed(one, [{ queue, payload: 'for all' }])
  for (const answer of answers) expect(dataOf(messagesOf(await answer))).toEqual(['for all'])
})

it('an ack wakes a pop that waits for that partition within 50 ms', async () => {
  const queue = randomUUID()
  await pushed(
    one,
    numbers(10).map((payload) => ({ queue, payload })),
  )
  const times: number[] = []
  let [held] = await take(one, queue)
  for (let round = 1; round < 10; round++) {
    const next = wait(one, queue)
    await untilWaiting(one, 1)
    await acked(one, [held as Message])
    const settled = performance.now()
    ;[held] = messagesOf(await next)
    times.push(performance.now() - settled)
    expect(held?.data).toBe(round)
  }
  expect(median(times)).toBeLessThan(50)
})

it('a waiting pop gets leased messages once the lease ends, and delayed ones once they are due', async () => {
  const [leased, delayed] = [randomUUID(), randomUUID()]
  await configure(one, leased, { leaseTime: 1 })
  await configure(one, delayed, { delayedProcessing: 1 })
  await pushed(one, [{ queue: leased, payload: 'leased' }])
  await take(one, leased)
  const began = performance.now()
  await pushed(one, [{ queue: delayed, payload: 'delayed' }])
  const [a, b] = await Promise.all([wait(two, leased), wait(two, delayed)])
  expect([...dataOf(messagesOf(a)), ...dataOf(messagesOf(b))]).toEqual(['leased', 'delayed'])
  expect(performance.now() - began).toBeGreaterThan(900)
  expect(performance.now() - began).toBeLessThan(5_000)
})

it('nothing until the timeout: 204, and not before', async () => {
  const answer = await wait(one, randomUUID(), { timeout: 400 })
  expect(answer.status).toBe(204)
  expect(answer.ms).toBeGreaterThan(390)
  expect(answer.ms).toBeLessThan(3_000)
})

it('a client that leaves while it waits leaves no lease behind: the next one gets the message', async () => {
  const queue = randomUUID()
  const gone = new AbortController()
  const lost = numbers(10).map(() =>
    fetch(`${one.origin}${popPath(queue, { wait: true, timeout: waitMs })}`, { signal: gone.signal }).catch(() => null),
  )
  await untilWaiting(one, 10)
  gone.abort()
  await Promise.all(lost)
  await untilWaiting(one, 0)
  await pushed(one, [{ queue, payload: 'still here' }])
  const [found] = await take(one, queue)
  expect([found?.data, found?.retryCount]).toEqual(['still here', 0])
  expect(await ack(one, found as Message)).toMatchObject({ success: true })
})

it('2,000 who wait cost at most 5 statements a second in all, and are still woken', async () => {
  const own = await freshDatabase()
  const counting = openMessageTables(own.url)
  const server = await startServer({ DATABASE_URL: own.url, ...calm })
  const gone = new AbortController()
  setMaxListeners(0, gone.signal)
  const answers = numbers(2_000).map((n) => {
    const options = { wait: true, timeout: 100_000, ...(n % 5 === 0 && { partition: `p${n}` }) }
    const path =
      n % 25 === 1 ? popPath(null, { ...options, namespace: `none ${n}` }) : popPath(`queue ${n % 50}`, options)
    return fetch(`${server.origin}${path}`, { signal: gone.signal }).catch(() => null)
  })
  await untilWaiting(server, 2_000)
  const look = async (): Promise<{ n: number; at: number }> => {
    const [row] = await counting.query<{ n: string }>(
      'SELECT xact_commit + xact_rollback AS n FROM pg_stat_database WHERE datname = current_database()',
    )
    return { n: Number(row?.n), at: performance.now() / 1_000 }
  }
  // Sessions report what they did up to 10 s later, so the start is seen in the first windows; what goes on is seen in all.
  const windowSeconds = 5
  const rates: number[] = []
  let last = await look()
  await until(
    'a window with at most 5 statements a second',
    async () => {
      if (performance.now() / 1_000 < last.at + windowSeconds) return false
      const now = await look()
      rates.push((now.n - last.n) / (now.at - last.at))
      last = now
      return (rates.at(-1) ?? Infinity) <= 5
    },
    60_000,
  ).catch((fault: unknown) => Promise.reject(new Error(`statements a second: ${rates}`, { cause: fault })))
  expect(await waiting(server)).toBe(2_000)
  await pushed(server, [{ queue: 'queue 2', payload: 'wake' }])
  await until('one is woken', async () => (await waiting(server)) === 1_999, 5_000)
  gone.abort()
  await Promise.all(answers)
  await server.kill()
  await counting.close()
  await own.drop()
}, 90_000)

it('a server that is stopped releases waiting requests, and ends', async () => {
  const short = await startServer({ DATABASE_URL: database.url, SPILLWAY_DRAIN_SECONDS: '10' })
  const answers = numbers(20).map(() => wait(short, randomUUID()).then((answer) => answer.status))
  await untilWaiting(short, 20)
  const began = performance.now()
  const ended = await short.stop()
  expect(ended.code).toBe(0)
  expect(performance.now() - began).toBeLessThan(8_000)
  for (const status of await Promise.all(answers)) expect([204, 503]).toContain(status)
})
