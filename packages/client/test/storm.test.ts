import { beforeAll, describe, expect, it } from 'vitest'
import { drawn, histogram, type Storm, storm, thirtySeconds } from './storm.js'
import { virtualClock } from './virtual-clock.js'

const seeds = [1, 2]
const { clients, calls, thinkMsMax, refusesFromMs, refusesUntilMs, retryAfterSeconds, deadlineMs } = thirtySeconds
/** Requests per second while the server is healthy. */
const usual = clients / (thinkMsMax / 2_000)

async function simulated(seed: number, hasManners = true): Promise<Storm> {
  const clock = virtualClock(seed)
  let isOver = false
  const run = storm({ ...thirtySeconds, hasManners }, clock, async (arrive) => {
    await clock.sleep(2 + clock.random() * 6)
    const answer = arrive()
    await clock.sleep(2 + clock.random() * 6)
    return answer
  }).finally(() => {
    isOver = true
  })
  await clock.run(() => isOver)
  return run
}

describe.each(seeds)('200 clients of a server that refuses 90 of 100 for 30 s (seed %i)', (seed) => {
  let seen: Storm
  let bins: number[] = []

  beforeAll(async () => {
    seen = await simulated(seed)
    bins = histogram(seen)
    const ratio = (seen.sent / seen.useful).toFixed(2)
    const longest = (seen.longestMs / 1_000).toFixed(1)
    const summary = `${seen.sent} requests for ${seen.useful} useful ones (${ratio}), longest call ${longest} s`
    console.log(`seed ${seed}: ${summary}\n${drawn(bins)}`)
  })

  it('all succeed within their deadlines', () => {
    expect(seen.failed).toEqual([])
    expect(seen.useful).toBe(clients * calls)
    expect(seen.longestMs).toBeLessThan(deadlineMs)
  })

  it('make at most twice the useful requests', () => {
    expect(seen.sent).toBeLessThanOrEqual(2 * seen.useful)
  })

  it('send less than half of the usual while they are refused, evenly', () => {
    const from = refusesFromMs / 1_000 + 2 * retryAfterSeconds
    const refused = bins.slice(from, refusesUntilMs / 1_000)
    const mean = refused.reduce((sum, count) => sum + count, 0) / refused.length
    expect(mean).toBeGreaterThan(0)
    expect(Math.max(...refused)).toBeLessThan(usual / 2)
    expect(Math.max(...refused)).toBeLessThan(3 * mean)
  })

  it('return spread over time', () => {
    expect(Math.max(...bins.slice(refusesUntilMs / 1_000))).toBeLessThan(1.2 * usual)
  })
})

it('the same clients without manners make more than twice the useful requests', async () => {
  const seen = await simulated(1, false)
  expect(seen.useful).toBe(clients * calls)
  expect(seen.sent).toBeGreaterThan(2 * seen.useful)
})
