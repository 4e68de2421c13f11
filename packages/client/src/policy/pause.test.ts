import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { pauseMs } from './pause.js'

const usual = { tries: 1, retryAfterMs: 0, maxMs: 30_000, leftMs: 60_000, random: 0.5 }

describe('pauses', () => {
  it('are spread over a time that doubles, up to the most', () => {
    const longest = [1, 2, 3, 8, 50].map((tries) => pauseMs({ ...usual, tries, random: 1 }))
    expect(longest).toEqual([250, 500, 1_000, 30_000, 30_000])
    expect(pauseMs({ ...usual, random: 0 })).toBe(0)
  })

  it('are spread above what the server asked for, over as much again', () => {
    expect(pauseMs({ ...usual, retryAfterMs: 5_000, random: 0 })).toBe(5_000)
    expect(pauseMs({ ...usual, retryAfterMs: 5_000, random: 1 })).toBe(10_000)
  })

  it('are not taken when the server asks for more than the most, or than is left', () => {
    expect(pauseMs({ ...usual, retryAfterMs: 30_001 })).toBeNull()
    expect(pauseMs({ ...usual, retryAfterMs: 10_000, leftMs: 10_000 })).toBeNull()
  })

  it('never end before the time that the server asked for, nor after the deadline', () => {
    const input = fc.record({
      tries: fc.integer({ min: 1, max: 100 }),
      retryAfterMs: fc.integer({ min: 0, max: 60_000 }),
      maxMs: fc.integer({ min: 1, max: 60_000 }),
      leftMs: fc.integer({ min: 0, max: 120_000 }),
      random: fc.double({ min: 0, max: 0.999, noNaN: true }),
    })
    fc.assert(
      fc.property(input, (given) => {
        const ms = pauseMs(given)
        if (ms === null) return true
        return ms >= given.retryAfterMs && ms < given.leftMs
      }),
    )
  })
})
