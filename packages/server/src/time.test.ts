import { describe, expect, it } from 'vitest'
import { waitAskedFor } from './time.js'

describe('the wait that a target asks for with Retry-After', () => {
  const now = Date.parse('2026-11-16T10:00:00Z')
  const maxMs = 3_600_000

  it.each([
    ['120', 120_000],
    [' 7 ', 7_000],
    ['Mon, 16 Nov 2026 10:00:30 GMT', 30_000],
    ['99999999', maxMs],
    ['Mon, 16 Nov 2026 09:59:00 GMT', undefined],
    ['0', undefined],
    ['-5', undefined],
    ['1.5', undefined],
    ['soon', undefined],
    ['2027', 2_027_000],
    ['2027-01-01', undefined],
    [undefined, undefined],
    [['1', '2'], undefined],
  ])('%j is %j ms', (header, ms) => {
    expect(waitAskedFor(header, now, maxMs)).toBe(ms)
  })
})
