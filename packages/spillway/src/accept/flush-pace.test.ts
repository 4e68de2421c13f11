import { describe, expect, it } from 'vitest'
import { FlushPace } from './flush.js'

function paceOf(flushes: readonly (readonly [count: number, ms: number])[]): FlushPace {
  const pace = new FlushPace()
  pace.add(1, 10_000)
  for (const [count, ms] of flushes) pace.add(count, ms)
  return pace
}

describe('the pace of flushes', () => {
  it('expects nothing while nothing is known, and does not count the first', () => {
    expect(paceOf([]).expectedMs(100)).toBe(0)
  })

  it('does not take a burst after lone ones for slow', () => {
    expect(paceOf(Array.from({ length: 50 }, () => [1, 5] as const)).expectedMs(100)).toBe(5)
  })

  it('learns what an item adds to the fixed part', () => {
    const flushes = Array.from({ length: 60 }, (_, i) => [10 + (i % 7) * 20, 4 + 0.2 * (10 + (i % 7) * 20)] as const)
    const pace = paceOf(flushes)
    expect(pace.expectedMs(1)).toBeCloseTo(4.2)
    expect(pace.expectedMs(500)).toBeCloseTo(104)
  })

  it('expects no less of a larger one, and no more than in proportion', () => {
    expect(paceOf([...Array(20)].map((_, i) => [10 + i, 30 - i] as const)).expectedMs(1_000)).toBeLessThan(30)
    const steep = paceOf([
      [10, 10],
      [11, 100],
    ])
    expect(steep.expectedMs(20)).toBeLessThan(60)
  })

  it('is not taken in by one that stalled, and follows when all are slow', () => {
    const pace = paceOf([...Array(20)].map(() => [10, 5] as const))
    pace.add(10, 200)
    expect(pace.expectedMs(10)).toBeLessThan(50)
    for (let i = 0; i < 10; i++) pace.add(10, 200)
    expect(pace.expectedMs(10)).toBeGreaterThan(150)
  })

  it('sends nothing without a target', () => {
    expect(paceOf([[5, 5]]).expectedMs(0)).toBe(0)
  })
})
