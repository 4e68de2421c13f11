import { expect, it } from 'vitest'
import { firstDifference } from './first-difference.mjs'

it('is undefined for equal texts', () => {
  expect(firstDifference('a\nb\n', 'a\nb\n')).toBeUndefined()
})

it('names the line and both sides', () => {
  expect(firstDifference('a\nb\nc', 'a\nx\nc')).toEqual({ line: 2, left: 'b', right: 'x' })
})

it('tells which side ended first', () => {
  expect(firstDifference('a', 'a\nb')).toEqual({ line: 2, left: undefined, right: 'b' })
  expect(firstDifference('a\nb', 'a')).toEqual({ line: 2, left: 'b', right: undefined })
})
