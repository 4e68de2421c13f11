import { describe, expect, it } from 'vitest'
import { parseCpuTime, stolenPercent } from './stolen.js'

describe('stolen time', () => {
  it('is read from the line of all cores', () => {
    const stat = 'cpu  100 0 50 800 10 0 5 35 7 0\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 5\n'
    expect(parseCpuTime(stat)).toEqual({ total: 1_000, stolen: 35 })
  })

  it('is unknown if the system does not report it', () => {
    expect(parseCpuTime('cpu  1 2 3\n')).toBeNull()
    expect(parseCpuTime('')).toBeNull()
  })

  it('is the share of the time that has passed', () => {
    expect(stolenPercent({ total: 1_000, stolen: 35 }, { total: 2_000, stolen: 335 })).toBe(30)
    expect(stolenPercent(null, { total: 1, stolen: 1 })).toBeNull()
    expect(stolenPercent({ total: 5, stolen: 0 }, { total: 5, stolen: 0 })).toBeNull()
  })
})
