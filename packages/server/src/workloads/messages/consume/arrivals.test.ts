import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { Arrivals, type ArrivalsOptions, markOf } from './arrivals.js'

const never = (): AbortSignal => new AbortController().signal

function arrivalsOf(due: ArrivalsOptions['due'] = async () => []) {
  const counts: number[] = []
  const faults: unknown[] = []
  const arrivals = new Arrivals({ due, onFault: (fault) => faults.push(fault), onWaiting: (n) => counts.push(n) })
  const woken: string[] = []
  const wait = (name: string, place: Parameters<Arrivals['wait']>[0], signal = never()) => {
    const waiting = arrivals.wait(place, signal)
    void waiting.woken.then(() => woken.push(name))
    return waiting
  }
  return { arrivals, wait, woken, counts, faults }
}

const settle = async (): Promise<void> => {
  await Promise.resolve()
  await Promise.resolve()
}

beforeEach(() => {
  vi.useFakeTimers()
})
afterEach(() => {
  vi.useRealTimers()
})

describe('arrivals', () => {
  it('wake one of each line that waits for the queue, and no others', async () => {
    const { arrivals, wait, woken } = arrivalsOf()
    wait('a1', { queue: 'a', group: 'g' })
    wait('a2', { queue: 'a', group: 'g' })
    wait('ah', { queue: 'a', group: 'h' })
    wait('ap', { queue: 'a', group: 'g', partition: 'p' })
    wait('b', { queue: 'b', group: 'g' })
    wait('any', { queue: null, group: 'g', namespace: 'n' })
    arrivals.came(new Set([markOf('a')]))
    await settle()
    expect(woken.sort()).toEqual(['a1', 'ah', 'any', 'ap'])
  })

  it('wake one of every line when the notice had no room for names', async () => {
    const { arrivals, wait, woken } = arrivalsOf()
    wait('a', { queue: 'a', group: 'g' })
    wait('b', { queue: 'b', group: 'g' })
    arrivals.came(new Set(['*']))
    await settle()
    expect(woken.sort()).toEqual(['a', 'b'])
  })

  it('wake pops without a queue when notifications may have been lost; the others are polled', async () => {
    const { arrivals, wait, woken } = arrivalsOf()
    wait('a', { queue: 'a', group: 'g' })
    wait('any 1', { queue: null, group: 'g', namespace: 'n' })
    wait('any 2', { queue: null, group: 'g', namespace: 'n' })
    arrivals.missed()
    await settle()
    expect(woken).toEqual(['any 1'])
  })

  it('wake two more of the group where one found something', async () => {
    const { arrivals, wait, woken } = arrivalsOf()
    for (const name of ['1', '2', '3']) wait(name, { queue: 'a', group: 'g' })
    wait('other group', { queue: 'a', group: 'h' })
    arrivals.found({ queue: 'a', group: 'g' })
    await settle()
    expect(woken).toEqual(['1', '2'])
  })

  it('look around once a second for all that wait, in one question', async () => {
    const asked: unknown[] = []
    const { wait, woken } = arrivalsOf(async (places) => {
      asked.push(places)
      return [{ queue: 'b', group: 'g' }]
    })
    wait('a', { queue: 'a', group: 'g' })
    wait('b1', { queue: 'b', group: 'g' })
    wait('b2', { queue: 'b', group: 'g' })
    await vi.advanceTimersByTimeAsync(1_000)
    expect(woken).toEqual(['b1'])
    expect(asked).toEqual([
      [
        { queue: 'a', group: 'g' },
        { queue: 'b', group: 'g' },
      ],
    ])
  })

  it('stop polling without waiters, and begin again', async () => {
    let looks = 0
    const { wait } = arrivalsOf(async () => {
      looks++
      return []
    })
    wait('a', { queue: 'a', group: 'g' }).leave()
    await vi.advanceTimersByTimeAsync(5_000)
    expect(looks).toBe(0)
    wait('a', { queue: 'a', group: 'g' })
    await vi.advanceTimersByTimeAsync(1_000)
    expect(looks).toBe(1)
  })

  it('continue after a fault, and report it', async () => {
    let fails = true
    const { wait, woken, faults } = arrivalsOf(async () => {
      if (fails) throw new Error('away')
      return [{ queue: 'a', group: 'g' }]
    })
    wait('a', { queue: 'a', group: 'g' })
    await vi.advanceTimersByTimeAsync(1_000)
    expect([woken, faults.length]).toEqual([[], 1])
    fails = false
    await vi.advanceTimersByTimeAsync(1_000)
    expect(woken).toEqual(['a'])
  })

  it('wake one when the expected message is due', async () => {
    const { arrivals, wait, woken } = arrivalsOf()
    const place = { queue: 'a', group: 'g' }
    wait('1', place)
    wait('2', place)
    arrivals.expect(place, 300)
    arrivals.expect(place, 300)
    await vi.advanceTimersByTimeAsync(299)
    expect(woken).toEqual([])
    await vi.advanceTimersByTimeAsync(1)
    expect(woken).toEqual(['1'])
  })

  it('end with the signal, and count waiting pops', async () => {
    const { wait, woken, counts } = arrivalsOf()
    const left = new AbortController()
    wait('1', { queue: 'a', group: 'g' }, left.signal)
    wait('2', { queue: 'a', group: 'g' })
    left.abort()
    await settle()
    expect(woken).toEqual(['1'])
    expect(counts).toEqual([1, 2, 1])
  })

  it('keep no listener on a signal that outlives the wait', () => {
    const { wait } = arrivalsOf()
    const signal = new AbortController().signal
    const removed = vi.spyOn(signal, 'removeEventListener')
    wait('1', { queue: 'a', group: 'g' }, signal).leave()
    expect(removed).toHaveBeenCalledTimes(1)
  })

  it('wake all when they are closed', async () => {
    const { arrivals, wait, woken } = arrivalsOf()
    wait('1', { queue: 'a', group: 'g' })
    wait('2', { queue: 'a', group: 'g' })
    arrivals.close()
    await settle()
    expect(woken).toEqual(['1', '2'])
  })
})
