import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { pulse, storeDouble } from '../../test/pipeline-store-double.js'
import type { Store, SweptRows } from '../store/port.js'
import { Presence, type PresenceOptions } from './presence.js'

const log = { info: vi.fn(), warn: vi.fn(), error: vi.fn() }

const sweptNothing: SweptRows = {
  ...{ partitions_made: 0, partitions_dropped: 0, history: 0, keys: 0, rate_rows: 0, lanes: 0, cancels: 0 },
  isFull: false,
}

function make(methods: Partial<Store>, more: Partial<PresenceOptions> = {}) {
  const store = storeDouble({
    migrate: async () => ({ from: 0, to: 1 }),
    enlist: async () => undefined,
    sweep: async () => ({ ...sweptNothing }),
    listen: async () => undefined,
    pulse: async () => pulse(),
    retire: async () => 0,
    wake: async () => undefined,
    recover: async () => null,
    ...methods,
  })
  const callbacks = { onPulse: vi.fn(), onLost: vi.fn(), onReady: vi.fn(async () => undefined), onWake: vi.fn() }
  const presence = new Presence({
    store,
    leaseMs: 15_000,
    retentionMs: 1,
    name: 'test',
    log,
    running: () => ({}),
    announced: () => ({}),
    afterPulse: async () => undefined,
    missed: [],
    ...callbacks,
    ...more,
  })
  return { presence, callbacks }
}

describe('Presence', () => {
  beforeEach(() => void vi.useFakeTimers())
  afterEach(() => {
    vi.useRealTimers()
    vi.clearAllMocks()
  })

  it('is ready once it is enlisted, and beats about each second until it is stopped', async () => {
    const beats = vi.fn(async () => pulse())
    const { presence, callbacks } = make({ pulse: beats })
    expect(presence.isReady).toBe(false)
    await presence.start()
    expect(presence.isReady).toBe(true)
    expect(callbacks.onReady).toHaveBeenCalledTimes(1)
    await vi.advanceTimersByTimeAsync(10_000)
    expect(beats.mock.calls.length).toBeGreaterThanOrEqual(9)
    expect(beats.mock.calls.length).toBeLessThanOrEqual(13)
    await presence.stop()
    const before = beats.mock.calls.length
    await vi.advanceTimersByTimeAsync(5_000)
    expect(beats.mock.calls.length).toBe(before)
    expect(presence.isReady).toBe(false)
  })

  it('tries each second until the database is reachable, and logs it once', async () => {
    let tries = 0
    const { presence } = make({
      migrate: async () => {
        if (++tries < 4) throw Object.assign(new Error('away'), { code: 'unavailable' })
        return { from: 0, to: 1 }
      },
    })
    const started = presence.start()
    await vi.advanceTimersByTimeAsync(3_500)
    await started
    expect(tries).toBe(4)
    expect(log.warn).toHaveBeenCalledTimes(1)
    expect(log.info).toHaveBeenCalledWith({}, 'database connected')
    await presence.stop()
  })

  it.each(['server_version', 'newer', 'edited'])('does not wait for what waiting cannot mend (%s)', async (code) => {
    const { presence } = make({ migrate: () => Promise.reject(Object.assign(new Error('no'), { code })) })
    await expect(presence.start()).rejects.toMatchObject({ code })
  })

  it('enlists again when its lease was lost, and drops its permits', async () => {
    const answers = [pulse(), pulse({ alive: false }), pulse()]
    const enlisted: string[] = []
    const { presence, callbacks } = make({
      pulse: async () => answers.shift() ?? pulse(),
      enlist: async (worker) => void enlisted.push(worker),
    })
    await presence.start()
    const first = presence.worker
    await presence.beat()
    expect(callbacks.onLost).toHaveBeenCalledTimes(1)
    expect(presence.worker).not.toBe(first)
    expect(enlisted).toEqual([first, presence.worker])
    await presence.stop()
  })

  it('aborts running operations, once, when no heartbeat succeeded for most of the lease', async () => {
    let away = false
    const { presence, callbacks } = make({
      pulse: async () => {
        if (away) throw new Error('away')
        return pulse()
      },
    })
    await presence.start()
    away = true
    await vi.advanceTimersByTimeAsync(11_000)
    expect(callbacks.onLost).not.toHaveBeenCalled()
    await vi.advanceTimersByTimeAsync(5_000)
    expect(callbacks.onLost).toHaveBeenCalledTimes(1)
    away = false
    await vi.advanceTimersByTimeAsync(2_000)
    expect(callbacks.onLost).toHaveBeenCalledTimes(1)
    await presence.stop()
  })

  it('takes over from all processes that are gone, and looks for their work', async () => {
    const dead = [
      { worker: 'a', name: 'one', lanes: 2 },
      { worker: 'b', name: 'two', lanes: 0 },
    ]
    const { presence, callbacks } = make({
      pulse: async () => pulse({ lostWorkers: 2 }),
      recover: async () => dead.shift() ?? null,
    })
    await presence.start()
    expect(dead).toEqual([])
    expect(callbacks.onWake).toHaveBeenCalledWith('ready')
    await presence.stop()
  })

  describe('background tasks', () => {
    /** A background task that waits until the test releases it. */
    function slowTask() {
      const waiting: (() => void)[] = []
      const run = vi.fn(() => new Promise<void>((resolve) => void waiting.push(resolve)))
      return { run, finish: () => waiting.shift()?.() }
    }

    it.each(['recover', 'afterPulse'] as const)(
      'a slow %s does not delay the heartbeat, and is not begun twice',
      async (name) => {
        const slow = slowTask()
        const beats = vi.fn(async () => pulse({ lostWorkers: 1 }))
        const { presence, callbacks } = make(
          { pulse: beats, ...(name === 'recover' && { recover: () => slow.run().then(() => null) }) },
          name === 'afterPulse' ? { afterPulse: slow.run } : {},
        )
        const ready = vi.fn()
        void presence.start().then(ready)
        // Longer than the lease.
        await vi.advanceTimersByTimeAsync(20_000)
        expect(ready).toHaveBeenCalled()
        expect(beats.mock.calls.length).toBeGreaterThanOrEqual(18)
        expect(callbacks.onPulse.mock.calls.length).toBe(beats.mock.calls.length)
        expect(slow.run).toHaveBeenCalledTimes(1)
        expect(callbacks.onLost).not.toHaveBeenCalled()
        slow.finish()
        await vi.advanceTimersByTimeAsync(2_000)
        expect(slow.run).toHaveBeenCalledTimes(2)
        await presence.stop()
      },
    )

    it('do not keep it from stopping', async () => {
      const slow = slowTask()
      const { presence } = make({}, { afterPulse: slow.run })
      void presence.start()
      await vi.advanceTimersByTimeAsync(1)
      expect(slow.run).toHaveBeenCalledTimes(1)
      const stopped = vi.fn()
      void presence.stop().then(stopped)
      await vi.advanceTimersByTimeAsync(1)
      expect(stopped).toHaveBeenCalled()
      slow.finish()
    })

    it('that fail do not fail the heartbeat: they are logged and tried again', async () => {
      let tries = 0
      const { presence, callbacks } = make(
        {},
        {
          afterPulse: async () => {
            if (++tries === 1) throw new Error('away')
          },
        },
      )
      await presence.start()
      await vi.advanceTimersByTimeAsync(1)
      expect(tries).toBe(1)
      expect(log.warn).toHaveBeenCalledTimes(1)
      await vi.advanceTimersByTimeAsync(1_500)
      expect(tries).toBe(2)
      expect(log.warn).toHaveBeenCalledTimes(1)
      expect(callbacks.onLost).not.toHaveBeenCalled()
      await presence.stop()
    })
  })

  it('wakes others at once, and combines wake-ups within the next 20 ms', async () => {
    const wake = vi.fn(async () => undefined)
    const { presence } = make({ wake })
    await presence.start()
    presence.announce('ready')
    expect(wake.mock.calls).toEqual([['ready']])
    presence.announce('ready')
    presence.announce('ready')
    presence.announce('cancel')
    expect(wake).toHaveBeenCalledTimes(1)
    await vi.advanceTimersByTimeAsync(25)
    // Both are sent: without the second, others would find the work only at their next heartbeat.
    expect(new Set(wake.mock.calls.slice(1).flat())).toEqual(new Set(['ready', 'cancel']))
    expect(wake).toHaveBeenCalledTimes(3)
    await presence.stop()
  })

  it('continues when a notification is lost', async () => {
    const { presence } = make({ wake: () => Promise.reject(new Error('away')) })
    await presence.start()
    presence.announce('ready')
    await vi.advanceTimersByTimeAsync(70_000)
    expect(presence.isReady).toBe(true)
    await presence.stop()
  })

  it('ends though it cannot sign off', async () => {
    const { presence } = make({ retire: () => Promise.reject(new Error('away')) })
    await presence.start()
    await presence.stop()
    expect(presence.isReady).toBe(false)
    presence.announce('ready')
  })
})
