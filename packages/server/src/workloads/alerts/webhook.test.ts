import { describe, expect, it } from 'vitest'
import { outcomeOf, signatureOf } from './webhook.js'

describe('the signature', () => {
  it('is the HMAC-SHA256 of RFC 4231, case 2', () => {
    expect(signatureOf('what do ya want for nothing?', 'Jefe')).toBe(
      'sha256=5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843',
    )
  })
})

describe('an answer', () => {
  it.each([200, 202, 204])('of %i is a delivery', (status) => {
    expect(outcomeOf(status, undefined, 0).kind).toBe('delivered')
  })
  it.each([408, 429, 500, 503])('of %i is for another attempt', (status) => {
    expect(outcomeOf(status, undefined, 0).kind).toBe('retry')
  })
  it.each([301, 307, 400, 401, 404, 410])('of %i is for none', (status) => {
    expect(outcomeOf(status, undefined, 0).kind).toBe('refused')
  })
  it('has a Retry-After', () => {
    expect(outcomeOf(503, '9', 0)).toMatchObject({ kind: 'retry', afterMs: 9_000 })
    expect(outcomeOf(503, '999999', 0)).toMatchObject({ kind: 'retry', afterMs: 3_600_000 })
  })
})
