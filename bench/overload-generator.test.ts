import { createServer, type Server, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { afterEach, expect, test } from 'vitest'
import { poissonArrivals } from './overload-arrivals.js'
import { Step } from './overload-generator.js'
import { deadlineMs, firstNumber } from './overload-wire.js'

let server: Server | undefined

afterEach(async () => {
  const open = server
  server = undefined
  open?.closeAllConnections()
  await new Promise<void>((resolve) => (open === undefined ? resolve() : open.close(() => resolve())))
})

/** A door that answers with `answer`. */
async function stepAgainst(
  answer: (n: number, response: ServerResponse) => void,
  load = { ratePerSecond: 200, seconds: 0.5 },
): Promise<Step> {
  const door = createServer((request, response) => {
    let text = ''
    request.setEncoding('utf8').on('data', (chunk: string) => {
      text += chunk
    })
    request.on('end', () => answer((JSON.parse(text) as { n: number }).n, response))
  })
  server = door
  await new Promise<void>((resolve) => door.listen(0, '127.0.0.1', resolve))
  const { port } = door.address() as AddressInfo
  return new Step({ host: '127.0.0.1', port, first: firstNumber, seed: 7, ...load })
}

function send(response: ServerResponse, status: number, body: string, headers: Record<string, string> = {}): void {
  response.writeHead(status, { 'content-length': body.length, ...headers }).end(body)
}

const done = (n: number): string => `{"n":${n},"fulfilled":true}`

test('arrivals come at the rate that was asked for, the same for the same seed', () => {
  const load = { ratePerSecond: 1_000, seconds: 20, seed: 3 }
  const arrivals = poissonArrivals(load)
  // Four standard deviations of a Poisson count of 20,000.
  expect(Math.abs(arrivals.length - 20_000)).toBeLessThan(4 * Math.sqrt(20_000))
  const gaps = [...arrivals].map((at, i) => at - (arrivals[i - 1] ?? 0))
  expect(Math.min(...gaps)).toBeGreaterThanOrEqual(0)
  // Exponential gaps: about e⁻¹ of them are longer than the mean.
  expect(gaps.filter((gap) => gap > 1).length / gaps.length).toBeCloseTo(Math.exp(-1), 1)
  expect(poissonArrivals(load)).toEqual(arrivals)
  expect(poissonArrivals({ ...load, seed: 4 })).not.toEqual(arrivals)
})

test('every outcome of an order is counted: good, refused with and without Retry-After, queued, cut off', async () => {
  const step = await stepAgainst((n, response) => {
    switch (n % 5) {
      case 0:
        return send(response, 200, done(n))
      case 1:
        return send(response, 503, 'later', { 'Retry-After': '3' })
      case 2:
        return send(response, 503, 'later', { 'retry-after': 'soon' })
      case 3:
        return send(response, 202, '{"status":"queued"}')
      default:
        return response.destroy()
    }
  })
  const report = await step.run()
  const ofKind = (kind: number): number =>
    Array.from({ length: step.count }, (_, i) => i % 5).filter((k) => k === kind).length
  expect(report.due).toBe(step.count)
  expect(report.good).toBe(ofKind(0))
  expect(report.byStatus).toEqual({ 200: ofKind(0), 202: ofKind(3), 503: ofKind(1) + ofKind(2) })
  expect(report.withoutRetryAfter).toBe(ofKind(2))
  expect(report.retryAfterSeconds).toMatchObject({ count: ofKind(1), max: 3 })
  expect(report.connectionLost).toBe(ofKind(4))
  expect(report.timedOut).toBe(0)
})

test(
  'an answer after the deadline is no good answer, and its time counts from when it was due',
  async () => {
    const waiting: (() => void)[] = []
    const step = await stepAgainst((n, response) => void waiting.push(() => send(response, 200, done(n))), {
      ratePerSecond: 20,
      seconds: 0.3,
    })
    const report = await step.run()
    expect(waiting.length).toBe(step.count)
    expect(report.timedOut).toBe(step.count)
    expect(report.good).toBe(0)
  },
  deadlineMs * 3,
)

test('a backlog that is worked off after the last order was due is good, and no goodput', async () => {
  let held: (() => void)[] | undefined = []
  const step = await stepAgainst((n, response) => {
    const answer = (): void => send(response, 200, done(n))
    if (held === undefined) return answer()
    held.push(answer)
    if (held.length < step.count) return
    const all = held
    held = undefined
    // After the last order, by as much as the whole step takes.
    setTimeout(() => all.forEach((each) => void each()), 500)
  })
  const report = await step.run()
  expect(report.good).toBe(step.count)
  expect(report.goodDuring).toBe(0)
})

test('an answer with the result of another order stops the measurement', async () => {
  const step = await stepAgainst((n, response) => send(response, 200, done(n + 1)))
  await expect(step.run()).rejects.toThrow('another order')
})

test('effects are compared with the answers that the clients got', async () => {
  const step = await stepAgainst((n, response) => {
    if (n % 3 === 0) send(response, 200, done(n))
    else if (n % 3 === 1) send(response, 202, '{}')
    else send(response, 503, '', { 'retry-after': '1' })
  })
  await step.run()
  const times = (of: (kind: number) => number): Uint8Array =>
    Uint8Array.from({ length: step.count }, (_, i) => of((firstNumber + i) % 3))
  const count = (kind: number): number => times((k) => (k === kind ? 1 : 0)).reduce((sum, n) => sum + n, 0)
  expect(step.compare(times((kind) => (kind === 2 ? 0 : 1)))).toEqual({
    lostDone: 0,
    queuedUndone: 0,
    queued: count(1),
    doneTwice: 0,
    wasted: 0,
  })
  expect(step.compare(times((kind) => (kind === 2 ? 2 : 0)))).toEqual({
    lostDone: count(0),
    queuedUndone: count(1),
    queued: count(1),
    doneTwice: count(2),
    wasted: count(2),
  })
})
