import { describe, expect, it } from 'vitest'
import { SpillwayError, type SpillwayErrorCode } from '../error.js'
import { isAccepted, isUnknown, verdictOn } from './verdict.js'

const fault = (code: SpillwayErrorCode, status: number | null) => new SpillwayError(code, 'the message', { status })

/** The verdict on a call that may be repeated, and on one that may not; and whether the server accepted it. */
const table: [SpillwayErrorCode, number | null, string, string, boolean][] = [
  ['system_overloaded', 429, 'later', 'later', false],
  ['rate_limited', 429, 'later', 'later', false],
  ['overloaded', 503, 'later', 'later', false],
  ['unexpected', 503, 'later', 'later', false],
  ['draining', 503, 'elsewhere', 'elsewhere', false],
  ['not_ready', 503, 'elsewhere', 'elsewhere', false],
  ['throttled', null, 'later', 'later', false],
  ['unreachable', null, 'elsewhere', 'final', false],
  ['unexpected', 502, 'elsewhere', 'final', false],
  ['unexpected', 504, 'elsewhere', 'final', false],
  ['upstream_error', 502, 'final', 'final', true],
  ['internal_error', 500, 'later', 'final', true],
  ['request_timeout', 408, 'later', 'final', true],
  ['idempotency_in_progress', 409, 'later', 'final', true],
  ['conflict', 409, 'final', 'final', true],
  ['invalid_request', 400, 'final', 'final', true],
  ['unauthenticated', 401, 'final', 'final', true],
  ['forbidden', 403, 'final', 'final', true],
  ['not_found', 404, 'final', 'final', true],
  ['idempotency_mismatch', 422, 'final', 'final', true],
  ['unexpected', 200, 'final', 'final', true],
]

describe('the verdict', () => {
  it.each(table)('on %s %s: %s, or %s', (code, status, repeatable, other, accepted) => {
    const error = fault(code, status)
    expect(verdictOn(error, { isRepeatable: true, retryOn429: true })).toBe(repeatable)
    expect(verdictOn(error, { isRepeatable: false, retryOn429: true })).toBe(other)
    expect(isAccepted(error)).toBe(accepted)
  })

  it.each<[boolean, SpillwayErrorCode, number | null]>([
    [true, 'unreachable', null],
    [true, 'unexpected', 502],
    [true, 'internal_error', 500],
    [false, 'overloaded', 503],
    [false, 'rate_limited', 429],
    [false, 'throttled', null],
    [false, 'idempotency_in_progress', 409],
  ])('that it may have been done is %s of %s %s', (expected, code, status) => {
    expect(isUnknown(fault(code, status))).toBe(expected)
  })

  it('on 429 is final when it is not to be retried', () => {
    expect(verdictOn(fault('rate_limited', 429), { isRepeatable: true, retryOn429: false })).toBe('final')
  })
})
