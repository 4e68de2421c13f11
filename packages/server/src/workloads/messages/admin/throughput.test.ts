import { describe, expect, it } from 'vitest'
import { Throughput } from './throughput.js'

function clocked() {
  let at = Date.UTC(2030, 0, 1)
  return {
    throughput: new Throughput(() => at),
    pass: (ms: number) => {
      at += ms
    },
  }
}

describe('throughput', () => {
  it('is unknown at the first sample, and exact between two', () => {
    const { throughput, pass } = clocked()
    expect(throughput.sample('q', { ingested: 100, processed: 50 })).toEqual([])
    pass(4_000)
    expect(throughput.sample('q', { ingested: 110, processed: 50 })).toEqual([
      {
        timestamp: '2030-01-01T00:00:04.000Z',
        seconds: 4,
        ingested: 10,
        processed: 0,
        ingestedPerSecond: 2.5,
        processedPerSecond: 0,
      },
    ])
  })

  it('comes newest first', () => {
    const { throughput, pass } = clocked()
    for (const ingested of [0, 1, 3]) {
      throughput.sample('q', { ingested, processed: 0 })
      pass(1_000)
    }
    const rates = throughput.sample('q', { ingested: 7, processed: 0 })
    expect(rates.map(({ ingested }) => ingested)).toEqual([4, 2, 1])
  })

  it('does not take two samples within a second as two', () => {
    const { throughput, pass } = clocked()
    throughput.sample('q', { ingested: 0, processed: 0 })
    pass(999)
    expect(throughput.sample('q', { ingested: 9, processed: 0 })).toEqual([])
    pass(1)
    expect(throughput.sample('q', { ingested: 9, processed: 0 })).toMatchObject([{ seconds: 1, ingested: 9 }])
  })

  it('starts again when totals went down, and reports nothing negative', () => {
    const { throughput, pass } = clocked()
    throughput.sample('q', { ingested: 10, processed: 10 })
    pass(1_000)
    expect(throughput.sample('q', { ingested: 12, processed: 3 })).toEqual([])
    pass(1_000)
    expect(throughput.sample('q', { ingested: 13, processed: 5 })).toMatchObject([{ ingested: 1, processed: 2 }])
  })

  it('keeps names apart, and sixty samples of each at most', () => {
    const { throughput, pass } = clocked()
    throughput.sample('a', { ingested: 1, processed: 0 })
    pass(1_000)
    expect(throughput.sample('b', { ingested: 5, processed: 0 })).toEqual([])
    for (let n = 0; n < 100; n++) {
      pass(1_000)
      throughput.sample('a', { ingested: n + 2, processed: 0 })
    }
    pass(1_000)
    expect(throughput.sample('a', { ingested: 200, processed: 0 })).toHaveLength(59)
  })
})
