import { describe, expect, it } from 'vitest'
import { appliedPreferences, parseIdempotencyKey, parsePreferences } from './mount.js'

describe('Prefer', () => {
  it.each([
    [undefined, { respondAsync: false }],
    ['respond-async', { respondAsync: true }],
    ['wait=10', { respondAsync: false, waitSeconds: 10 }],
    ['Respond-Async, wait = "5"; foo=bar', { respondAsync: true, waitSeconds: 5 }],
    ['wait=61', { respondAsync: false, waitSeconds: 60 }],
    ['wait=3, wait=9', { respondAsync: false, waitSeconds: 3 }],
    ['wait=0', { respondAsync: false, waitSeconds: 0 }],
    ['wait=-1, wait=x, return=minimal', { respondAsync: false }],
  ])('%j', (header, expected) => {
    expect(parsePreferences(header)).toEqual(expected)
  })

  it('reports applied items', () => {
    expect(appliedPreferences({ respondAsync: true, waitSeconds: 5 })).toBe('respond-async, wait=5')
    expect(appliedPreferences({ respondAsync: false })).toBeUndefined()
  })
})

describe('Idempotency-Key', () => {
  it('takes 1 to 255 characters', () => {
    expect(parseIdempotencyKey(undefined)).toEqual({ ok: true, key: undefined })
    expect(parseIdempotencyKey('k')).toEqual({ ok: true, key: 'k' })
    expect(parseIdempotencyKey('k'.repeat(255)).ok).toBe(true)
    expect(parseIdempotencyKey('').ok).toBe(false)
    expect(parseIdempotencyKey('k'.repeat(256)).ok).toBe(false)
  })
})
