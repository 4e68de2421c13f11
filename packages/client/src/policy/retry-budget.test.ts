import { describe, expect, it } from 'vitest'
import { RetryBudget } from './retry-budget.js'

function budget(options = {}) {
  const time = { ms: 0 }
  return { time, budget: new RetryBudget({ ratio: 0.1, perSecond: 1, reserve: 2, ...options }, () => time.ms) }
}

describe('a retry budget', () => {
  it('spends its saved budget at once, then makes callers wait', () => {
    const { budget: own } = budget()
    expect([own.take(), own.take(), own.take(), own.take()]).toEqual([0, 0, 1_000, 2_000])
  })

  it('earns a share of the requests', () => {
    const { budget: own } = budget({ reserve: 1 })
    own.take()
    for (let i = 0; i < 10; i++) own.earn()
    expect(own.take()).toBeCloseTo(0)
  })

  it('earns with time, up to its reserve', () => {
    const { budget: own, time } = budget()
    own.take()
    own.take()
    time.ms = 60_000
    expect([own.take(), own.take(), own.take()]).toEqual([0, 0, 1_000])
  })

  it('has released space again', () => {
    const { budget: own } = budget({ reserve: 1 })
    own.take()
    own.take()
    own.refund()
    expect(own.take()).toBe(1_000)
  })
})
