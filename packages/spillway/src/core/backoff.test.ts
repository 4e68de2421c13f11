import { describe, expect, it } from 'vitest'
import { backoffMs } from './backoff.js'

const options = { baseMs: 1_000, maxMs: 60_000 }
const most = () => 0.999_999_999

describe('backoffMs', () => {
  it.each([
    [1, 1_000],
    [2, 2_000],
    [3, 4_000],
    [6, 32_000],
    [7, 60_000],
    [1_000, 60_000],
  ])('attempt %i waits less than %i ms', (attempt, ceiling) => {
    expect(backoffMs(attempt, options, most)).toBe(ceiling - 1)
  })

  it('spreads over the full range', () => {
    expect(backoffMs(3, options, () => 0)).toBe(0)
    expect(backoffMs(3, options, () => 0.5)).toBe(2_000)
  })

  it('is random by itself', () => {
    const seen = new Set(Array.from({ length: 20 }, () => backoffMs(7, options)))
    expect(seen.size).toBeGreaterThan(1)
    for (const ms of seen) expect(ms).toBeLessThan(60_000)
  })
})
