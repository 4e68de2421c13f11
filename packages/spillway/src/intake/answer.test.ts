import { describe, expect, it } from 'vitest'
import { queuedBody } from './answer.js'
import { rateStatus } from './refusal.js'

const queued = { kind: 'queued', operationId: 'id', position: 2, reason: 'maintaining_order', replayed: false } as const

describe('queuedBody', () => {
  it('has the wait in seconds, and rounded up as text', () => {
    expect(queuedBody({ ...queued, waitMs: 2_345.6 })).toEqual({
      status: 'queued',
      operationId: 'id',
      queuePosition: 2,
      estimatedWaitSeconds: 2.346,
      estimatedWait: '3s',
      reason: 'maintaining_order',
    })
  })

  it('never has a negative wait', () => {
    expect(queuedBody({ ...queued, waitMs: -1 })).toMatchObject({ estimatedWaitSeconds: 0, estimatedWait: '0s' })
  })
})

describe('rateStatus', () => {
  const tiers = [{ name: 'hour', limit: 10, windowSeconds: 3_600 }]
  it('names the tier that the store meant', () => {
    expect(rateStatus({ tier: 0, left: 3, resetMs: 5, resetAtMs: 7 }, tiers)).toEqual({
      name: 'hour',
      limit: 10,
      windowSeconds: 3_600,
      left: 3,
      resetMs: 5,
      resetAtMs: 7,
    })
  })
  it('is undefined for an unknown tier', () => {
    expect(rateStatus({ tier: 1, left: 3, resetMs: 5, resetAtMs: 7 }, tiers)).toBeUndefined()
  })
})
