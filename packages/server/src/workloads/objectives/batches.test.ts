import { describe, expect, it } from 'vitest'
import { Batches } from './batches.js'

describe('counts that wait to be sent', () => {
  it('are sums, by objective', () => {
    const batches = new Batches()
    batches.add('latency', 1, 1)
    batches.add('latency', 0, 1)
    batches.add('depth', 0.25, 1.5)
    expect(batches.next()).toEqual({
      number: 1,
      counts: [
        { objective: 'latency', good: 1, total: 2 },
        { objective: 'depth', good: 0.25, total: 1.5 },
      ],
    })
  })

  it('stay as they are, with their number, until they are confirmed', () => {
    const batches = new Batches()
    batches.add('latency', 1, 1)
    const first = batches.next()
    batches.add('latency', 1, 1)
    expect(batches.next()).toBe(first)
    batches.confirmed()
    expect(batches.next()).toEqual({ number: 2, counts: [{ objective: 'latency', good: 1, total: 1 }] })
  })

  it('are no batch when nothing was counted', () => {
    const batches = new Batches()
    batches.add('depth', 0, 0)
    expect(batches.next()).toBeNull()
  })

  it.each([
    [2, 1],
    [-1, 1],
    [Number.NaN, 1],
    [1, Number.NaN],
    [1, Number.POSITIVE_INFINITY],
  ])('cannot have %d good of %d', (good, total) => {
    expect(() => new Batches().add('depth', good, total)).toThrow(RangeError)
  })
})
