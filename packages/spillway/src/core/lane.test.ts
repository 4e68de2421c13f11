import { createHash } from 'node:crypto'
import { describe, expect, it } from 'vitest'
import { digestUuid, isUuid, laneOf } from './ids.js'

describe('laneOf', () => {
  it('takes a queue alone as its default partition', () => {
    expect(laneOf('orders')).toEqual(laneOf(['orders', 'Default']))
  })

  it('keeps queue and partition as they came', () => {
    expect(laneOf(['or:ders', 'a/b'])).toMatchObject({ queue: 'or:ders', partition: 'a/b' })
  })

  it('distinguishes parts that differ only by a separator', () => {
    const ids = [laneOf(['a:b', 'c']), laneOf(['a', 'b:c']), laneOf(['ab', 'c']), laneOf(['a', 'bc'])].map((l) => l.id)
    expect(new Set(ids).size).toBe(4)
  })

  it('gives the same lane after its memory was cleared', () => {
    const before = laneOf(['orders', 'ann'])
    for (let i = 0; i < 10_001; i++) laneOf(['fill', String(i)])
    expect(laneOf(['orders', 'ann'])).toEqual(before)
  })
})

describe('digestUuid', () => {
  it('is the first half of the SHA-256, in UUID form', () => {
    const hex = createHash('sha256').update('text').digest('hex')
    const uuid = digestUuid('text')
    expect(isUuid(uuid)).toBe(true)
    expect(uuid.replaceAll('-', '')).toBe(hex.slice(0, 32))
  })
})
