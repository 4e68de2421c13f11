import { describe, expect, it } from 'vitest'
import { figure, verdict } from './figures.js'

describe('figure', () => {
  it('is the median of its runs, and keeps them all', () => {
    const runs = [3, 1, 2]
    expect(figure({ what: 'w', variant: 'v', unit: '/s', runs })).toEqual({
      what: 'w',
      variant: 'v',
      unit: '/s',
      value: 2,
      runs,
    })
  })
})

describe('verdict', () => {
  const claim = { what: 'w', unit: '×', target: 0.8 } as const

  it.each([
    ['at-least', 0.8, true],
    ['at-least', 0.799, false],
    ['at-most', 0.8, true],
    ['at-most', 0.801, false],
  ] as const)('%s 0.8: %s is %s', (rule, value, met) => {
    expect(verdict({ ...claim, rule, value }).met).toBe(met)
  })

  it('does not call a figure met that is no number', () => {
    expect(verdict({ ...claim, rule: 'at-least', value: Number.NaN }).met).toBe(false)
    expect(verdict({ ...claim, rule: 'at-most', value: Number.NaN }).met).toBe(false)
  })
})
