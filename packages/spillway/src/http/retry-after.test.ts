import { describe, expect, it } from 'vitest'
import { retryAfterSeconds } from './retry-after.js'

const almostOne = () => 1 - Number.EPSILON

describe('retryAfterSeconds', () => {
  it.each([
    [0, 1, 1],
    [0.2, 1, 1],
    [1, 1, 2],
    [5, 5, 6],
    [10, 10, 11],
    [30, 30, 33],
    [60, 60, 66],
    [59.5, 60, 66],
    [3600, 3600, 3960],
  ])('spreads a base of %d from %d to %d', (base, low, high) => {
    expect(retryAfterSeconds(base, () => 0)).toBe(low)
    expect(retryAfterSeconds(base, almostOne)).toBe(high)
  })

  it('uses the whole range', () => {
    const seen = new Set(Array.from({ length: 7 }, (_, step) => retryAfterSeconds(60, () => (step + 0.5) / 7)))
    expect([...seen].sort()).toEqual([60, 61, 62, 63, 64, 65, 66])
  })
})
