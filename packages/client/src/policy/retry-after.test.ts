import { expect, it } from 'vitest'
import { retryAfterMs } from './retry-after.js'

const now = Date.UTC(2026, 0, 1)

it.each([
  [null, null],
  ['7', 7_000],
  [' 0 ', 0],
  ['Thu, 01 Jan 2026 00:00:30 GMT', 30_000],
  ['Wed, 31 Dec 2025 23:59:00 GMT', 0],
  ['soon', null],
  ['-5', null],
  ['1.5', null],
  ['', null],
  ['Thursday, 01-Jan-26 00:00:30 GMT', 30_000],
  ['Thu Jan  1 00:00:30 2026', 30_000],
  ['wait 2050', null],
  ['2050', 2_050_000],
  ['Jan 2050', null],
  ['5s', null],
  ['1e3', null],
  ['Thu, 01 Jan 2026', null],
])('reads Retry-After %j as %j ms', (header, ms) => {
  expect(retryAfterMs(header, now)).toBe(ms)
})

it("compares a date with the server's clock where that is known", () => {
  const header = 'Thu, 01 Jan 2026 00:00:30 GMT'
  expect(retryAfterMs(header, now + 3_600_000, 'Thu, 01 Jan 2026 00:00:10 GMT')).toBe(20_000)
})
