import { describe, expect, it } from 'vitest'
import { poolStateOf } from './pool-state.js'

describe('poolStateOf', () => {
  it.each([
    [0, 0],
    [69, 0],
    [70, 1],
    [89, 1],
    [90, 2],
    [99, 2],
    [100, 3],
    [101, 3],
  ])('%i of 100 places are state %i', (held, state) => {
    expect(poolStateOf(held, 100)).toBe(state)
  })

  it('is exhausted, not healthy, when the one place of a small pool is taken', () => {
    expect(poolStateOf(1, 1)).toBe(3)
  })
})
