import { expect, test } from 'vitest'
import { growth, peaks, type TablePoint } from './latency-tables.js'

const points = (sizes: readonly number[]): TablePoint[] =>
  sizes.map((megabytes, second) => ({ second, megabytes, deadRows: megabytes * 10 }))

test('what rises and falls between the same bounds is flat', () => {
  expect(growth(points([1, 2, 8, 3, 8, 3, 8, 3, 8]), (p) => p.megabytes)).toBe(1)
})

test('what reached its size in the first third is flat', () => {
  expect(growth(points([1, 50, 100, 100, 100, 100, 100, 100, 100]), (p) => p.megabytes)).toBe(1)
})

test('a level that keeps rising is not', () => {
  expect(growth(points([10, 20, 30, 40, 50, 60, 70, 80, 90]), (p) => p.deadRows)).toBe(1.5)
})

test('too few samples are a fault, not a verdict', () => {
  expect(() => growth(points([1, 2]), (p) => p.megabytes)).toThrow(RangeError)
})

test('the peak of each part', () => {
  expect(peaks(points([1, 5, 2, 9, 3]), 2, (p) => p.megabytes)).toEqual([
    [0, 5],
    [2, 9],
    [4, 3],
  ])
})
