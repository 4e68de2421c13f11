import { describe, expect, it } from 'vitest'
import { interleave, of, rotated } from './rounds.js'

describe('interleave', () => {
  it('gives each variant its turn in each round, another one first each time', async () => {
    const order: string[] = []
    const variant = (name: string) => ({
      name,
      run: async () => {
        order.push(name)
        return order.length
      },
    })
    const results = await interleave([variant('a'), variant('b'), variant('c')], 3, () => order.push('|'))
    expect(order.join('')).toBe('|abc|bca|cab')
    expect(of(results, 'b')).toHaveLength(3)
    expect(() => of(results, 'd')).toThrow('d')
  })

  it('stops at the first that fails', async () => {
    const failing = { name: 'a', run: () => Promise.reject(new Error('no')) }
    await expect(interleave([failing], 2, () => undefined)).rejects.toThrow('no')
  })
})

describe('rotated', () => {
  it('begins with the next one, around and around', () => {
    expect(rotated([1, 2, 3], 4)).toEqual([2, 3, 1])
    expect(rotated([], 4)).toEqual([])
  })
})
