import { describe, expect, it } from 'vitest'
import { isUuid, newOperationId } from './ids.js'

// Ahead of the real clock, so that the order of tests does not affect the module's own clock state.
let base = Date.now() + 10_000_000

describe('newOperationId', () => {
  it('is a UUIDv7 that contains its millisecond', () => {
    base += 100_000
    const id = newOperationId(base)
    expect(id).toMatch(/^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/)
    expect(Number.parseInt(id.replaceAll('-', '').slice(0, 12), 16)).toBe(base)
  })

  it('grows, also beyond 4,096 in one millisecond and when the clock goes back', () => {
    base += 100_000
    const ids = Array.from({ length: 10_000 }, () => newOperationId(base))
    ids.push(newOperationId(base - 50_000), newOperationId(base + 1))
    for (let i = 1; i < ids.length; i++) expect((ids[i - 1] ?? '') < (ids[i] ?? '')).toBe(true)
    expect(new Set(ids).size).toBe(ids.length)
  })

  it('reads the clock by itself', () => {
    expect(isUuid(newOperationId())).toBe(true)
  })
})

describe('isUuid', () => {
  it.each(['0190b6c4-0000-7000-8000-000000000000', '0190B6C4-0000-7000-8000-00000000ABCD'])('%s is one', (text) => {
    expect(isUuid(text)).toBe(true)
  })
  it.each(['', 'x', '0190b6c400007000800000000000000', ' 0190b6c4-0000-7000-8000-000000000000', "'; DROP TABLE ops"])(
    '%j is none',
    (text) => expect(isUuid(text)).toBe(false),
  )
})
