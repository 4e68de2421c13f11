import { Registry } from 'prom-client'
import { describe, expect, it } from 'vitest'
import { RecentValues } from './recent-values.js'

const make = (type: 'counter' | 'gauge') => {
  const registry = new Registry()
  const values = new RecentValues({ registry, name: 'x', help: 'x', labelName: 'who', type, recentMax: 2 })
  return { values, lines: async () => (await registry.metrics()).split('\n').filter((line) => line.startsWith('x{')) }
}

describe('recent values', () => {
  it('keep a series for the most recent label values', async () => {
    const { values, lines } = make('counter')
    for (const who of ['a', 'b', 'a', 'c']) values.inc(who)
    expect(await lines()).toEqual(['x{who="a"} 2', 'x{who="c"} 1', 'x{who="other"} 1'])
  })

  it('lose nothing of a sum, however many label values there are', async () => {
    const { values, lines } = make('counter')
    for (let n = 0; n < 1_000; n++) values.inc(`who-${n % 7}`)
    const sum = (await lines()).reduce((all, line) => all + Number(line.split(' ')[1]), 0)
    expect(sum).toBe(1_000)
    expect(await lines()).toHaveLength(3)
  })

  it('show of a gauge the last value, and of the others the last that was dropped', async () => {
    const { values, lines } = make('gauge')
    values.set('a', 3)
    values.set('b', 9)
    values.set('c', 7)
    values.set('b', 8)
    expect(await lines()).toEqual(['x{who="c"} 7', 'x{who="b"} 8', 'x{who="other"} 3'])
  })
})
