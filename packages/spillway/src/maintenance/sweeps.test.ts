import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { Sweeps, type SweepsOptions, type SweptBatch } from './sweeps.js'

beforeEach(() => void vi.useFakeTimers())
afterEach(() => void vi.useRealTimers())

const full: SweptBatch = { removed: { rows: 10 }, isFull: true }
const last: SweptBatch = { removed: { rows: 3 }, isFull: false }
const after = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms))

const adding = (to: { n: number }) => ({
  inc: (by = 1): void => {
    to.n += by
  },
})

/** One store for all processes of a test. */
function storeOf() {
  let nextAt = 0
  return {
    takeSweepTurn: async (holdMs: number) => {
      if (Date.now() < nextAt) return nextAt - Date.now()
      nextAt = Date.now() + holdMs
      return 0
    },
    endSweepTurn: async (restMs: number) => {
      nextAt = Date.now() + restMs
    },
  }
}

function made(store: SweepsOptions['store'] = storeOf()) {
  const logged: string[] = []
  const rows = { n: 0 }
  const seconds = { n: 0 }
  const behind: number[] = []
  const sweeps = new Sweeps({
    store,
    isReady: () => true,
    now: () => Date.now(),
    log: { info: (_, text) => void logged.push(text), warn: (_, text) => void logged.push(`warn: ${text}`) },
    metrics: {
      sweptRows: { labels: () => adding(rows) },
      sweepSeconds: adding(seconds),
      sweepBehind: { labels: () => ({ set: (value: number) => void behind.push(value) }) },
    } as unknown as SweepsOptions['metrics'],
  })
  return { sweeps, logged, rows, seconds, behind }
}

describe('sweeps', () => {
  it('continue while batches are full, for a tenth of the time', async () => {
    const { sweeps, rows, seconds, logged } = made()
    const batches = Array.from({ length: 40 }, () => full)
    const batch = vi.fn(async () => {
      await after(20)
      return batches.shift() ?? last
    })
    sweeps.add({ name: 'all', everyMs: 60_000, batch })
    sweeps.start()
    await vi.advanceTimersByTimeAsync(12_000)
    expect(batch).toHaveBeenCalledTimes(41)
    expect(rows.n).toBe(403)
    expect(seconds.n).toBeCloseTo(0.82, 2)
    expect(logged).toEqual(['expired rows were removed'])
    await vi.advanceTimersByTimeAsync(67_000)
    expect(batch).toHaveBeenCalledTimes(42)
    await sweeps.stop()
  })

  it('of several processes and tasks take turns, and a tenth of the time together', async () => {
    const store = storeOf()
    const [one, two] = [made(store), made(store)]
    const calls: string[] = []
    let running = 0
    for (const [n, { sweeps }] of [one, two].entries()) {
      for (const name of ['a', 'b']) {
        const batch = async (): Promise<SweptBatch> => {
          calls.push(`${name}${n}`)
          expect(++running).toBe(1)
          await after(10)
          running--
          return full
        }
        sweeps.add({ name, everyMs: 1_000, batch })
      }
      sweeps.start()
    }
    await vi.advanceTimersByTimeAsync(30_000)
    expect(one.seconds.n + two.seconds.n).toBeLessThanOrEqual(3)
    for (const name of ['a0', 'b0', 'a1', 'b1'])
      expect(calls.filter((call) => call === name).length).toBeGreaterThan(10)
    // A batch may be under way.
    const stopped = Promise.all([one.sweeps.stop(), two.sweeps.stop()])
    await vi.advanceTimersByTimeAsync(2_000)
    await stopped
  })

  it('say once that they are behind, and once that they have caught up', async () => {
    const { sweeps, logged, behind } = made()
    let left = 200
    sweeps.add({
      name: 'all',
      everyMs: 1_000,
      batch: async () => {
        await after(50)
        return left-- > 0 ? full : last
      },
    })
    sweeps.start()
    await vi.advanceTimersByTimeAsync(130_000)
    expect(logged.filter((text) => text.includes('behind'))).toHaveLength(1)
    expect(logged.filter((text) => text.includes('caught up'))).toHaveLength(1)
    expect(behind).toEqual([0, 1, 0])
    const stopped = sweeps.stop()
    await vi.advanceTimersByTimeAsync(2_000)
    await stopped
  })

  it('continue after a fault, and leave the turn to others', async () => {
    const { sweeps, logged, rows } = made()
    const batch = vi.fn(async () => {
      if (batch.mock.calls.length === 1) throw new Error('away')
      return last
    })
    sweeps.add({ name: 'all', everyMs: 10_000, batch })
    sweeps.start()
    await vi.advanceTimersByTimeAsync(15_000)
    expect(logged[0]).toBe('warn: sweep failed, retrying later')
    expect(rows.n).toBe(3)
    await sweeps.stop()
  })

  it('stop between two batches', async () => {
    const { sweeps } = made()
    let running = false
    const batch = vi.fn(async () => {
      running = true
      await after(100)
      running = false
      return full
    })
    sweeps.add({ name: 'all', everyMs: 100, batch })
    sweeps.start()
    while (!running) await vi.advanceTimersByTimeAsync(10)
    const stopped = sweeps.stop()
    await vi.advanceTimersByTimeAsync(200)
    await stopped
    expect(running).toBe(false)
    const { length } = batch.mock.calls
    await vi.advanceTimersByTimeAsync(60_000)
    expect(batch.mock.calls).toHaveLength(length)
  })

  it('wait no longer than two seconds for a batch that does not end', async () => {
    const { sweeps } = made()
    sweeps.add({ name: 'all', everyMs: 100, batch: () => new Promise(() => undefined) })
    sweeps.start()
    await vi.advanceTimersByTimeAsync(1_000)
    const stopped = sweeps.stop()
    await vi.advanceTimersByTimeAsync(2_000)
    await stopped
  })
})
