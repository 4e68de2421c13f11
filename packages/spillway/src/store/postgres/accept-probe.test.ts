import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { AcceptProbe } from './accept-probe.js'
import { StoreFault } from './faults.js'

const full = (): Promise<never> => Promise.reject(new StoreFault('disk_full'))
const own = async (): Promise<string> => 'own'
const accept = async (): Promise<string> => 'accept'

describe('AcceptProbe', () => {
  let now = 0
  let probe: AcceptProbe

  beforeEach(() => {
    vi.useFakeTimers()
    now = 0
    probe = new AcceptProbe(() => now)
  })
  afterEach(() => void vi.useRealTimers())

  const beat = (over: () => Promise<string>): Promise<string> => {
    now += 1_000
    return probe.beat(over, own)
  }

  it('beats over a connection of accepting, unless an accept has just committed', async () => {
    expect(await beat(accept)).toBe('accept')
    expect(await beat(accept)).toBe('accept')
    now += 700
    probe.proven()
    now -= 500
    expect(await beat(accept)).toBe('own')
    expect(probe.fault).toBeNull()
  })

  it('says no after two failures in a row, and yes after one success', async () => {
    expect(await beat(full)).toBe('own')
    expect(probe.fault).toBeNull()
    expect(await beat(full)).toBe('own')
    expect(probe.fault).toMatchObject({ code: 'disk_full' })
    expect(await beat(full)).toBe('own')
    expect(probe.fault).toMatchObject({ code: 'disk_full' })
    expect(await beat(accept)).toBe('accept')
    expect(probe.fault).toBeNull()
    await beat(full)
    expect(probe.fault).toBeNull()
  })

  it('starts to count again after a commit between two failures', async () => {
    await beat(full)
    probe.proven()
    now += 1_000
    await beat(full)
    expect(probe.fault).toBeNull()
  })

  it('does not count what a commit has overtaken, nor a lost conflict', async () => {
    await beat(full)
    await beat(() => {
      now += 10
      probe.proven()
      return full()
    })
    await beat(full)
    expect(probe.fault).toBeNull()
    await beat(() => Promise.reject(new StoreFault('conflict')))
    expect(probe.fault).toBeNull()
  })

  it('keeps the heartbeat waiting for a moment only, and asks once at a time', async () => {
    let fail: (fault: Error) => void = () => undefined
    const silent = vi.fn(
      () =>
        new Promise<string>((_, reject) => {
          fail = reject
        }),
    )
    const first = beat(silent)
    await vi.advanceTimersByTimeAsync(250)
    expect(await first).toBe('own')
    expect(await beat(silent)).toBe('own')
    expect(silent).toHaveBeenCalledTimes(1)
    fail(new StoreFault('timeout'))
    await vi.advanceTimersByTimeAsync(0)
    const second = beat(silent)
    fail(new StoreFault('timeout'))
    expect(await second).toBe('own')
    expect(probe.fault).toMatchObject({ code: 'timeout' })
  })

  it('reports a heartbeat that fails on both', async () => {
    now += 1_000
    await expect(probe.beat(full, full)).rejects.toMatchObject({ code: 'disk_full' })
  })
})
