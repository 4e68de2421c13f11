import { describe, expect, it } from 'vitest'
import { type Counted, objectiveView } from './figures.js'

const nothing: Counted = { good: 0, total: 0 }

describe('an objective', () => {
  it('has no indicator, and all of its budget, while nothing was counted', () => {
    expect(objectiveView('latency', { '1h': nothing, '30d': nothing })).toEqual({
      ...{ name: 'latency', target: 0.99, window: '1h', sli: null, good: 0, total: 0 },
      ...{ error_budget_left: 1, burn_rate: 0, met: true },
    })
  })

  it('has half of its budget when half of the errors that it allows were made', () => {
    // 10,000 messages may have 100 slow ones; 50 were.
    const view = objectiveView('latency', { '1h': { good: 9_950, total: 10_000 }, '30d': nothing })
    expect(view.sli).toBe(0.995)
    expect(view.error_budget_left).toBeCloseTo(0.5, 9)
    expect(view.burn_rate).toBeCloseTo(0.5, 9)
  })

  it('is met with its budget used up to the last', () => {
    const view = objectiveView('availability', { '1h': nothing, '30d': { good: 999, total: 1_000 } })
    expect(view).toMatchObject({ sli: 0.999, error_budget_left: 0, met: true })
  })

  it('is not met one error later', () => {
    const view = objectiveView('availability', { '1h': nothing, '30d': { good: 998, total: 1_000 } })
    expect(view.met).toBe(false)
    expect(view.error_budget_left).toBeCloseTo(-1, 9)
  })

  it('burns by the last hour, whatever its window is', () => {
    // 1% of the last hour failed and 0.1% is allowed: ten times too fast. Of 30 days, 20 of the 1,000 allowed failed.
    const view = objectiveView('availability', {
      '1h': { good: 990, total: 1_000 },
      '30d': { good: 999_980, total: 1_000_000 },
    })
    expect(view.burn_rate).toBeCloseTo(10, 9)
    expect(view.error_budget_left).toBeCloseTo(0.98, 9)
  })

  it('of depth is of seconds, in parts too', () => {
    const view = objectiveView('depth', { '1h': { good: 3_582, total: 3_600 }, '30d': nothing })
    expect(view.error_budget_left).toBeCloseTo(0.5, 9)
  })
})
