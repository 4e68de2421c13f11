import { describe, expect, it } from 'vitest'
import { growth, type Sample } from './messages-storage.js'

const samplesOf = (deadTuples: readonly number[]): Sample[] =>
  deadTuples.map((dead, seconds) => ({ seconds, megabytes: 1, otherMegabytes: 1, deadTuples: dead }))

describe('growth', () => {
  it('is none where dead tuples come and go', () => {
    const sawtooth = Array.from({ length: 101 }, (_, i) => (i % 10) * 100)
    expect(growth(samplesOf(sawtooth), (one) => one.deadTuples)).toBe(1)
  })

  it('is that from the second fifth to the last where they only come', () => {
    const rising = Array.from({ length: 101 }, (_, i) => i * 10)
    expect(growth(samplesOf(rising), (one) => one.deadTuples)).toBe(2.5)
  })

  it('leaves out the first fifth, in which everything grows', () => {
    const risen = Array.from({ length: 101 }, (_, i) => Math.min(i, 15))
    expect(growth(samplesOf(risen), (one) => one.deadTuples)).toBe(1)
  })
})
