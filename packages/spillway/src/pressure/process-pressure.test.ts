import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { ProcessPressure } from './process-pressure.js'

const limits = { loopDelayMs: 500, storeWaitMs: 2_000, inFlight: 100 }
const quiet = { loopDelayMs: 0, storeWaitMs: 0, inFlight: 0 }
const make = () => new ProcessPressure(limits, () => ({ storeWaitMs: 0, inFlight: 0 }))

describe('ProcessPressure', () => {
  it.each([
    ['nothing', quiet, 'inactive'],
    ['just below half of a bound', { ...quiet, inFlight: 49 }, 'inactive'],
    ['half of a bound', { ...quiet, inFlight: 50 }, 'warning'],
    ['just below a bound', { ...quiet, inFlight: 99 }, 'warning'],
    ['a bound', { ...quiet, inFlight: 100 }, 'active'],
    ['the loop alone', { ...quiet, loopDelayMs: 500 }, 'active'],
    ['the store alone', { ...quiet, storeWaitMs: 2_000 }, 'active'],
    ['all below', { loopDelayMs: 200, storeWaitMs: 900, inFlight: 45 }, 'inactive'],
  ] as const)('%s', (_, signals, level) => {
    const pressure = make()
    pressure.sample(signals, 0)
    expect(pressure.level).toBe(level)
  })

  it('stays active above half of the bound and recovers by itself below it', () => {
    const pressure = make()
    pressure.sample({ ...quiet, inFlight: 100 }, 0)
    pressure.sample({ ...quiet, inFlight: 60 }, 5_000)
    pressure.sample({ ...quiet, inFlight: 60 }, 10_000)
    expect(pressure.level).toBe('active')
    pressure.sample(quiet, 10_100)
    expect(pressure.level).toBe('active')
    pressure.sample(quiet, 11_100)
    expect(pressure.level).toBe('inactive')
  })

  describe('sampling', () => {
    beforeEach(() => void vi.useFakeTimers())
    afterEach(() => void vi.useRealTimers())

    it('reads its signals ten times a second until it is stopped', () => {
      const read = vi.fn(() => ({ storeWaitMs: 0, inFlight: 100 }))
      const pressure = new ProcessPressure(limits, read, () => Date.now())
      pressure.start()
      vi.advanceTimersByTime(1_000)
      expect(read).toHaveBeenCalledTimes(10)
      expect(pressure.level).toBe('active')
      pressure.stop()
      vi.advanceTimersByTime(1_000)
      expect(read).toHaveBeenCalledTimes(10)
    })

    it('takes the lateness of its own timer as the delay of the event loop', () => {
      let now = 0
      const pressure = new ProcessPressure(
        limits,
        () => ({ storeWaitMs: 0, inFlight: 0 }),
        () => now,
      )
      pressure.start()
      now = 100
      vi.advanceTimersByTime(100)
      expect(pressure.level).toBe('inactive')
      now = 800
      vi.advanceTimersByTime(100)
      expect(pressure.level).toBe('active')
      pressure.stop()
    })
  })
})
