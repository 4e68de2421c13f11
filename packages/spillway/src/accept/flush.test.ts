import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { Flush, type FlushOptions } from './flush.js'

interface Item {
  name: string
  key?: string
  bytes?: number
}

class Poison extends Error {}

/** Writes that finish when the test says so. */
function gate() {
  const batches: { names: string[]; commit(): void; fail(fault: unknown): void }[] = []
  const write = (items: readonly Item[]): Promise<string[]> =>
    new Promise((resolve, reject) => {
      const names = items.map((i) => i.name)
      batches.push({ names, commit: () => resolve(names.map((n) => `${n}!`)), fail: reject })
    })
  return { batches, write }
}

function flushWith(write: FlushOptions<Item, string>['write'], more: Partial<FlushOptions<Item, string>> = {}) {
  return new Flush<Item, string>({
    write,
    isPoison: (fault) => fault instanceof Poison,
    exclusiveKey: (item) => item.key ?? null,
    sizeOf: (item) => item.bytes ?? 1,
    itemsMax: 3,
    bytesMax: 100,
    waitingMax: 5,
    timeoutMs: 1_000,
    timeoutFault: () => new Error('too late'),
    ...more,
  })
}

/** Lets all settled promises run. */
/** A flush waits for one turn of the event loop after the last; a second one shows what it did. */
const turn = async () => {
  for (let i = 0; i < 3; i++) await new Promise<void>((resolve) => setImmediate(resolve))
}

describe('Flush', () => {
  it('writes a lone item at once, with items of the same turn', async () => {
    const { batches, write } = gate()
    const flush = flushWith(write)
    const answers = Promise.all([flush.submit({ name: 'a' }), flush.submit({ name: 'b' })])
    await turn()
    expect(batches.map((b) => b.names)).toEqual([['a', 'b']])
    batches[0]?.commit()
    expect(await answers).toEqual(['a!', 'b!'])
  })

  it('estimates the wait of a new item from the queue before it and the recent rate', async () => {
    const { batches, write } = gate()
    let now = 0
    const flush = flushWith(write, { now: () => now })
    // The first is not counted: it opens connections.
    for (const [i, tookMs] of [1_000, 100].entries()) {
      const lone = flush.submit({ name: 'a' })
      await turn()
      expect(flush.expectedMs).toBe(0)
      now += tookMs
      batches[i]?.commit()
      await lone
      await turn()
    }
    // Three fit into a flush: one has run for 30 of its 100 ms, and two more come before a newcomer is written.
    const next = ['c', 'd', 'e', 'f', 'g', 'h'].map((name) => flush.submit({ name }))
    await turn()
    expect(batches[2]?.names).toEqual(['c', 'd', 'e'])
    now += 30
    expect(flush.expectedMs).toBe(70 + 200)
    batches[2]?.commit()
    await Promise.all(next.slice(0, 3))
    await turn()
    batches[3]?.fail(new Error('gone'))
    await Promise.allSettled(next)
  })

  it('expects no wait without a queue, however slow the last flush was: nothing latches', async () => {
    const { batches, write } = gate()
    let now = 0
    const flush = flushWith(write, { now: () => now })
    for (let i = 0; i < 3; i++) {
      const lone = flush.submit({ name: 'a' })
      await turn()
      now += 60_000
      batches[i]?.commit()
      await lone
      await turn()
      expect(flush.expectedMs).toBe(0)
    }
  })

  it('has one write in flight; items that arrive meanwhile are the next batch', async () => {
    const { batches, write } = gate()
    const onFlush = vi.fn()
    const flush = flushWith(write, { onFlush })
    const first = flush.submit({ name: 'a' })
    await turn()
    const rest = ['b', 'c', 'd', 'e'].map((name) => flush.submit({ name }))
    await turn()
    expect(batches).toHaveLength(1)
    batches[0]?.commit()
    expect(await first).toBe('a!')
    await turn()
    expect(batches.map((b) => b.names)).toEqual([['a'], ['b', 'c', 'd']])
    batches[1]?.commit()
    await turn()
    expect(batches[2]?.names).toEqual(['e'])
    batches[2]?.commit()
    expect(await Promise.all(rest)).toEqual(['b!', 'c!', 'd!', 'e!'])
    expect(onFlush.mock.calls.map(([items]) => items)).toEqual([1, 3, 1])
  })

  it('keeps a batch within its bytes, but never leaves a large item behind for ever', async () => {
    const { batches, write } = gate()
    const flush = flushWith(write)
    const answers = Promise.all([
      flush.submit({ name: 'huge', bytes: 1_000 }),
      flush.submit({ name: 'b', bytes: 60 }),
      flush.submit({ name: 'c', bytes: 60 }),
    ])
    for (let i = 0; i < 3; i++) {
      await turn()
      batches[i]?.commit()
    }
    await answers
    expect(batches.map((b) => b.names)).toEqual([['huge'], ['b'], ['c']])
  })

  it('puts two items of one key in two batches', async () => {
    const { batches, write } = gate()
    const flush = flushWith(write)
    const answers = Promise.all([
      flush.submit({ name: 'a', key: 'k' }),
      flush.submit({ name: 'b', key: 'k' }),
      flush.submit({ name: 'c', key: 'other' }),
    ])
    await turn()
    batches[0]?.commit()
    await turn()
    batches[1]?.commit()
    await answers
    expect(batches.map((b) => b.names)).toEqual([['a', 'c'], ['b']])
  })

  it('lets a poisoned item fail alone', async () => {
    const seen: string[][] = []
    const flush = flushWith(
      async (items) => {
        const names = items.map((i) => i.name)
        seen.push(names)
        if (names.includes('bad')) throw new Poison('bad')
        return names
      },
      { itemsMax: 10 },
    )
    const settled = await Promise.allSettled(['a', 'b', 'bad', 'c', 'd'].map((name) => flush.submit({ name })))
    expect(settled.map((s) => (s.status === 'fulfilled' ? s.value : 'failed'))).toEqual(['a', 'b', 'failed', 'c', 'd'])
    expect(seen[0]).toHaveLength(5)
  })

  it('fails all of a batch, without writing again, when the store is at fault', async () => {
    const write = vi.fn(async () => Promise.reject(new Error('away')))
    const flush = flushWith(write)
    const settled = await Promise.allSettled([flush.submit({ name: 'a' }), flush.submit({ name: 'b' })])
    expect(settled.map((s) => s.status)).toEqual(['rejected', 'rejected'])
    expect(write).toHaveBeenCalledTimes(1)
  })

  it('continues after a failed write', async () => {
    let away = true
    const flush = flushWith(async (items) => {
      if (away) throw new Error('away')
      return items.map((i) => i.name)
    })
    await expect(flush.submit({ name: 'a' })).rejects.toThrow('away')
    away = false
    expect(await flush.submit({ name: 'b' })).toBe('b')
  })

  it('fails an item that the store gave no answer for, and only that', async () => {
    const flush = flushWith(async () => ['only one'])
    const settled = await Promise.allSettled([flush.submit({ name: 'a' }), flush.submit({ name: 'b' })])
    expect(settled.map((s) => s.status)).toEqual(['fulfilled', 'rejected'])
  })

  it('is full when as many wait as may, or four times the bytes of a batch', async () => {
    const { batches, write } = gate()
    const flush = flushWith(write)
    const answers = [flush.submit({ name: 'a' })]
    await turn()
    for (let i = 0; i < 4; i++) answers.push(flush.submit({ name: 'w' }))
    expect(flush.isFull).toBe(false)
    answers.push(flush.submit({ name: 'w' }))
    expect(flush.isFull).toBe(true)
    for (let i = 0; i < 3; i++) {
      batches[i]?.commit()
      await turn()
    }
    await Promise.all(answers)
    expect(flush.isFull).toBe(false)

    const wide = flushWith(write)
    const large = [wide.submit({ name: 'a' })]
    await turn()
    large.push(wide.submit({ name: 'large', bytes: 399 }))
    expect(wide.isFull).toBe(false)
    large.push(wide.submit({ name: 'one more', bytes: 1 }))
    expect(wide.isFull).toBe(true)
    for (let i = 3; i < 6; i++) {
      batches[i]?.commit()
      await turn()
    }
    await Promise.all(large)
    expect(wide.isFull).toBe(false)
  })

  it('drains: waits for waiting items and for the flush in flight', async () => {
    const { batches, write } = gate()
    const flush = flushWith(write)
    await flush.drained()
    const first = flush.submit({ name: 'a' })
    let drained = false
    const draining = flush.drained().then(() => {
      drained = true
    })
    await turn()
    const second = flush.submit({ name: 'b' })
    batches[0]?.commit()
    await first
    await turn()
    expect(drained).toBe(false)
    batches[1]?.commit()
    await second
    await draining
    expect(drained).toBe(true)
  })

  describe('time', () => {
    beforeEach(() => void vi.useFakeTimers({ toFake: ['setInterval', 'clearInterval'] }))
    afterEach(() => void vi.useRealTimers())

    it('rejects items that waited too long, and reports the age of the oldest', async () => {
      const { batches, write } = gate()
      const clock = { now: 0 }
      const flush = flushWith(write, { now: () => clock.now })
      expect(flush.oldestMs).toBe(0)
      const stuck = flush.submit({ name: 'a' })
      await turn()
      clock.now = 500
      const late = flush.submit({ name: 'b' })
      clock.now = 800
      const young = flush.submit({ name: 'c' })
      expect(flush.oldestMs).toBe(800)
      const fault = expect(late).rejects.toThrow('too late')
      clock.now = 1_499
      vi.advanceTimersByTime(100)
      clock.now = 1_500
      vi.advanceTimersByTime(100)
      await fault
      batches[0]?.commit()
      await stuck
      await turn()
      expect(batches[1]?.names).toEqual(['c'])
      batches[1]?.commit()
      expect(await young).toBe('c!')
      await turn()
      expect(flush.oldestMs).toBe(0)
      expect(vi.getTimerCount()).toBe(0)
    })
  })
})
