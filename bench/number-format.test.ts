import { describe, expect, it } from 'vitest'
import { formatDuration, formatNumber, formatQuantity } from './number-format.js'

describe('formatNumber', () => {
  it.each([
    [0, '0'],
    [0.000_451, '0.00045'],
    [0.8333, '0.833'],
    [12.345, '12.3'],
    [999.4, '999'],
    [12_345.6, '12,350'],
    [1_234_567, '1,235,000'],
    [-2_500, '-2,500'],
  ])('%s is %s', (value, text) => {
    expect(formatNumber(value)).toBe(text)
  })
})

describe('formatQuantity', () => {
  it.each([
    [10_000, '/s', '10,000/s'],
    [1.25, 'ms', '1.25 ms'],
    [50, '%', '50%'],
    [7, '', '7'],
  ])('%s and %s is %s', (value, unit, text) => {
    expect(formatQuantity(value, unit)).toBe(text)
  })
})

describe('formatDuration', () => {
  it.each([
    [7, '0:07'],
    [59.6, '1:00'],
    [750, '12:30'],
    [3_723, '1:02:03'],
    [-1, '0:00'],
  ])('%s s is %s', (seconds, text) => {
    expect(formatDuration(seconds)).toBe(text)
  })
})
