import { describe, expect, it } from 'vitest'
import type { Flowed } from '../programs/stream-flow.js'
import type { BurstOutcome } from '../programs/stream-waiting.js'
import { added, brokenOf, cpuUs, summaryOf } from './generation-report.js'

const flowed = (of: Partial<Flowed>): Flowed => ({
  ...{ tokens: 1_000, perSecond: 100, p50Ms: 1, p99Ms: 2, maxMs: 3, failed: 0, gaps: 0, rampMs: 1 },
  ...{ cpuSeconds: [0.01], ownCpuSeconds: 0, ...of },
})

describe('cpuUs', () => {
  it('is that of all processes of a way together', () => {
    expect(cpuUs(flowed({ tokens: 1_000, cpuSeconds: [0.02, 0.03] }))).toBeCloseTo(50)
  })
})

describe('added', () => {
  it('is the median of the differences within each round', () => {
    const loads = new Map([
      ['relay', [10, 100, 5].map((p50Ms) => flowed({ p50Ms }))],
      ['direct', [8, 97, 4].map((p50Ms) => flowed({ p50Ms }))],
    ])
    expect(added(loads, 'relay', 'direct', ({ p50Ms }) => p50Ms)).toBe(2)
  })
})

describe('brokenOf', () => {
  const loads = (failed: number) => ({
    ...{ loads: new Map([['relay', [flowed({ failed }), flowed({})]]]), load: { streams: 1, every: 1 }, lateP99Ms: 0 },
  })

  it('counts all streams that broke off', () => {
    expect(brokenOf([loads(2), loads(3)])).toEqual(['Streams that broke off: 5 of relay.'])
  })

  it('says nothing where none did', () => {
    expect(brokenOf([loads(0)])).toEqual([])
  })
})

describe('summaryOf', () => {
  const outcome = (of: Partial<BurstOutcome>): BurstOutcome => ({
    ...{ status: 200, isDone: true, isTimeout: false, firstTokenMs: 10, totalMs: 100, ...of },
  })
  const refused = outcome({ status: 429, isDone: false, firstTokenMs: null, totalMs: 1 })
  const late = outcome({ isDone: false, isTimeout: true, firstTokenMs: null })

  it('counts who came to a proper end', () => {
    expect(summaryOf([outcome({}), refused, refused, late]).successPercent).toBe(25)
  })

  it('counts who waited too long', () => {
    expect(summaryOf([outcome({}), refused, refused, late]).timeoutPercent).toBe(25)
  })

  it('times successful ones', () => {
    expect(summaryOf([outcome({ totalMs: 300 }), outcome({}), refused]).totalMs).toEqual({ p50: 100, p99: 300 })
  })

  it('has no times where none did', () => {
    expect(summaryOf([refused]).firstTokenMs.p50).toBeNaN()
  })
})
