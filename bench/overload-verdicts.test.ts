import { expect, test } from 'vitest'
import type { StepResult } from './overload-run.js'
import { figuresOf, plotsOf, verdictsOf } from './overload-verdicts.js'
import type { Spread } from './overload-wire.js'

const spread = (p99: number, count = 1): Spread => ({ count, p50: p99 / 2, p99, max: p99 })

/** A step that meets every target; the test says what is otherwise. */
function step(
  ratePerSecond: number,
  other: {
    good?: number
    p99?: number
    healthMs?: number
    rssMb?: number[]
    withoutRetryAfter?: number
    lost?: number
  } = {},
): StepResult {
  const good = other.good ?? Math.min(ratePerSecond, 1_000) * 10
  const refused = ratePerSecond * 10 - good
  return {
    door: 'spillway',
    ratePerSecond,
    seconds: 10,
    restarted: false,
    clients: {
      due: ratePerSecond * 10,
      sent: ratePerSecond * 10,
      lagMs: spread(1),
      cores: 0.1,
      good,
      goodDuring: good,
      goodMs: spread(other.p99 ?? 40, good),
      byStatus: refused > 0 ? { 200: good, 503: refused } : { 200: good },
      refusedMs: spread(2, refused),
      withoutRetryAfter: other.withoutRetryAfter ?? 0,
      retryAfterSeconds: spread(2, refused),
      timedOut: 0,
      connectionLost: 0,
      noConnection: 0,
    },
    effects: { lostDone: other.lost ?? 0, queuedUndone: 0, queued: 0, doneTwice: 0, wasted: 0 },
    health: {
      tookMs: [1, 1, other.healthMs ?? 2],
      unanswered: 0,
      rssMb: other.rssMb ?? [100, 100, 100, 100, 100, 100],
      cores: 0.5,
    },
    downstream: { inFlight: 0, done: good, lateMs: spread(1) },
  }
}

const missed = (results: readonly StepResult[]): string[] =>
  verdictsOf(results, 'spillway')
    .filter(({ met }) => !met)
    .map(({ what }) => what.replace('overload, spillway: ', ''))

test('steps that hold meet every target', () => {
  expect(missed([step(500), step(1_000), step(10_000)])).toEqual([])
})

test('each target is missed by its own figure, and by no other', () => {
  const all = (worse: StepResult): string[] => missed([step(500), step(1_000), worse])
  expect(all(step(5_000, { good: 8_900 }))).toEqual(['goodput at every step from 1 × on, of its peak'])
  expect(all(step(5_000, { p99: 81 }))).toEqual(['p99 of good answers, of that at 0.5 ×'])
  expect(all(step(5_000, { healthMs: 51 }))).toEqual(['health p99 at every step'])
  expect(all(step(5_000, { withoutRetryAfter: 1 }))).toEqual(['refusals without Retry-After'])
  expect(all(step(5_000, { lost: 1 }))).toEqual(['answered done or queued, and not done'])
  expect(all(step(5_000, { rssMb: [100, 111, 111, 111, 111, 111] }))).toEqual(['growth of RSS after the first step'])
})

test('goodput below capacity is not held against a door, nor is one late garbage collection', () => {
  expect(missed([step(500), step(800), step(1_000)])).toEqual([])
  expect(missed([step(500), step(1_000, { rssMb: [100, 100, 150, 150, 100, 100] })])).toEqual([])
})

test('a door that answered nothing well has no latency to report, and no point in the plots', () => {
  const results = [step(500), step(5_000, { good: 0 })]
  const figures = figuresOf(results).filter(({ what }) => what.startsWith('5000/s'))
  expect(figures.find(({ what }) => what.endsWith('goodput'))?.value).toBe(0)
  expect(figures.some(({ what }) => what.includes('good answers'))).toBe(false)
  for (const { name, series } of plotsOf(results)) {
    expect(series[0]?.points.map(([x]) => x)).toEqual(name === 'overload-goodput' ? [500, 5_000] : [500])
  }
})

test('a run without a step at capacity is refused: there would be nothing to judge', () => {
  expect(() => verdictsOf([step(500)], 'spillway')).toThrow('was not measured')
})
