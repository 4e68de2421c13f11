import { describe, expect, it } from 'vitest'
import { parseInt8, parseInt8Array, startupOptions } from './connect.js'

describe('parseInt8', () => {
  it('gives numbers up to the safe limit and throws beyond it', () => {
    expect(parseInt8('-9007199254740991')).toBe(-Number.MAX_SAFE_INTEGER)
    expect(() => parseInt8('9007199254740992')).toThrow(RangeError)
  })

  it('reads arrays with NULL', () => {
    expect(parseInt8Array('{}')).toEqual([])
    expect(parseInt8Array('{1,NULL,-3}')).toEqual([1, null, -3])
  })
})

describe('startupOptions', () => {
  it('escapes what the server would split at', () => {
    expect(startupOptions({ jit: 'off', search_path: 'a, b\\c' })).toBe('-c jit=off -c search_path=a,\\ b\\\\c')
  })
})
