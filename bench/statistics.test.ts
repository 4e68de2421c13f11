import { describe, expect, it } from 'vitest'
import { median, pairedRatio, percentile, range } from './statistics.js'

describe('median', () => {
  it('is the middle one, whatever the order', () => {
    expect(median([9, 1, 5])).toBe(5)
  })

  it('is the mean of the two in the middle of an even count', () => {
    expect(median([10, 1, 2, 4])).toBe(3)
  })

  it('compares numbers, not texts', () => {
    expect(median([100, 9, 20])).toBe(20)
  })

  it('leaves its input as it is', () => {
    const values = [3, 1, 2]
    median(values)
    expect(values).toEqual([3, 1, 2])
  })

  it('of nothing is an error, not a NaN in a table', () => {
    expect(() => median([])).toThrow(RangeError)
  })
})

describe('percentile', () => {
  const hundred = Array.from({ length: 100 }, (_, n) => 100 - n)

  it('is the nearest rank', () => {
    expect(percentile(hundred, 0.99)).toBe(99)
    expect(percentile(hundred, 0.5)).toBe(50)
    expect(percentile(hundred, 1)).toBe(100)
    expect(percentile(hundred, 0)).toBe(1)
  })

  it('is not moved by the rounding of shares', () => {
    // 0.07 × 100 is a little more than 7 in binary.
    expect(percentile(hundred, 0.07)).toBe(7)
  })

  it('of few is the largest', () => {
    expect(percentile([1, 2, 3], 0.99)).toBe(3)
  })

  it('refuses a share that was meant as a percentage', () => {
    expect(() => percentile(hundred, 99)).toThrow(RangeError)
  })
})

describe('range', () => {
  it('is the smallest and the largest', () => {
    expect(range([3, -1, 2])).toEqual({ min: -1, max: 3 })
  })
})

describe('pairedRatio', () => {
  it('is not touched by what slows both sides of a round', () => {
    // The second round ran on a machine ten times as slow: each round says 2, the medians would say 20.
    expect(pairedRatio([20, 2, 200], [10, 1, 100])).toBe(2)
  })

  it('refuses rounds that do not pair', () => {
    expect(() => pairedRatio([1, 2], [1])).toThrow(RangeError)
  })
})
