import { expect, test } from 'vitest'
import { type LatencyTask, OpenLoop } from './latency-load.js'

const task = (more: Partial<LatencyTask> = {}): LatencyTask => ({
  url: '',
  ratePerSecond: 200,
  seconds: 0.2,
  warmUpSeconds: 0.05,
  lanes: 1,
  pointSeconds: 0.1,
  settings: {},
  ...more,
})

const quietly = (): void => undefined

test('makes every submission once, in order, and leaves the warm-up out', async () => {
  const loop = new OpenLoop(task())
  const made: number[] = []
  const report = await loop.run(async (n) => {
    made.push(n)
    loop.ran(n)
    loop.completed(n)
  }, quietly)
  expect(made).toEqual(Array.from({ length: 50 }, (_, n) => n))
  expect(report).toMatchObject({ count: 40, refused: 0 })
  expect(report.series).toHaveLength(2)
  expect(report.ran).not.toBeNull()
})

test('a stall counts for all that were meant for its time', async () => {
  const loop = new OpenLoop(task({ warmUpSeconds: 0 }))
  const stallMs = 100
  const report = await loop.run(async (n) => {
    // Blocks the event loop: the next twenty cannot be made in time.
    const until = performance.now() + stallMs
    while (n === 10 && performance.now() < until);
    loop.completed(n)
  }, quietly)
  expect(report.completed.max).toBeGreaterThanOrEqual(stallMs)
  // Half of the twenty that fell into the stall waited for more than half of it.
  expect(report.completed.p95).toBeGreaterThan(stallMs / 2)
})

test('refusals have no latency', async () => {
  const loop = new OpenLoop(task({ warmUpSeconds: 0 }))
  const report = await loop.run(async (n) => {
    if (n % 2 === 0) loop.refused(n)
    else loop.completed(n)
  }, quietly)
  expect(report).toMatchObject({ count: 20, refused: 20 })
  expect(Number.isFinite(report.completed.max)).toBe(true)
})

test('a completion that is reported twice is a fault', async () => {
  const loop = new OpenLoop(task())
  const running = loop.run(async (n) => {
    loop.completed(n)
    loop.completed(n)
  }, quietly)
  await expect(running).rejects.toThrow('twice')
})
