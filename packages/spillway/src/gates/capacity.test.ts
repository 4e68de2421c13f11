import { describe, expect, it, vi } from 'vitest'
import { bindingFor, emptyPulse, who } from '../../test/pipeline-gate-binding.js'
import { OptionError } from '../core/options.js'
import type { Pulse } from '../store/port.js'
import { capacity } from './capacity.js'

const gates = (held: number, overflowing: boolean, name = 'orders.place'): Pulse => ({
  ...emptyPulse,
  gates: [{ name, held, full_at: 100, overflowing }],
})

describe('capacity', () => {
  it('registers its limit and, by default, 95% of it as the level to resume at', () => {
    const registerCapacity = vi.fn()
    capacity({ limit: 100 }).bind(bindingFor({ registerCapacity }))
    expect(registerCapacity).toHaveBeenCalledWith('orders.place', 100, 95)
  })

  it('lets a gate of one place be full and resume', () => {
    const registerCapacity = vi.fn()
    capacity({ limit: 1 }).bind(bindingFor({ registerCapacity }))
    expect(registerCapacity).toHaveBeenCalledWith('orders.place', 1, 1)
  })

  it('counts gates of one name together', () => {
    const registerCapacity = vi.fn()
    const gate = capacity({ limit: 10, resumeBelow: 3, name: 'shared' })
    const bound = gate.bind(bindingFor({ registerCapacity }))
    expect(registerCapacity).toHaveBeenCalledWith('shared', 10, 3)
    expect(bound.exact?.(who, {})).toEqual({ gate: 'shared' })
  })

  it.each([0, -1, 1.5, Number.NaN])('refuses a limit of %s', (limit) => {
    expect(() => capacity({ limit })).toThrow(OptionError)
  })

  it.each([0, 11, 2.5])('refuses to resume below %s of 10', (resumeBelow) => {
    expect(() => capacity({ limit: 10, resumeBelow })).toThrow(OptionError)
  })

  it('passes early while nothing is known', () => {
    expect(capacity({ limit: 100 }).bind(bindingFor()).early?.(who)).toBeNull()
  })

  it('refuses early from the refusal of the store on, until a pulse says it is open', () => {
    const bound = capacity({ limit: 100, retryAfterSeconds: 60 }).bind(bindingFor())
    expect(bound.refused?.(who, null)).toMatchObject({ code: 'capacity_exceeded', retryAfterMs: 60_000 })
    expect(bound.early?.(who)).toMatchObject({ code: 'capacity_exceeded', gate: 'capacity' })
    bound.observe?.(gates(96, true))
    expect(bound.early?.(who)).not.toBeNull()
    bound.observe?.(gates(94, false))
    expect(bound.early?.(who)).toBeNull()
  })

  it('learns from a pulse that another instance filled it', () => {
    const bound = capacity({ limit: 100 }).bind(bindingFor())
    bound.observe?.(gates(100, true))
    expect(bound.early?.(who)).not.toBeNull()
  })

  it('keeps its state when a pulse does not mention it', () => {
    const bound = capacity({ limit: 100 }).bind(bindingFor())
    bound.observe?.(gates(100, true))
    bound.observe?.(gates(0, false, 'another'))
    expect(bound.early?.(who)).not.toBeNull()
  })

  it('shows the texts of its owner', () => {
    const bound = capacity({ limit: 1, problem: { type: 'urn:full', title: 'Full', detail: 'No.' } }).bind(bindingFor())
    expect(bound.refused?.(who, null)).toMatchObject({ type: 'urn:full', title: 'Full', detail: 'No.' })
  })

  describe('Retry-After, where it is not set', () => {
    const boundAt = (clock: { now: number }) =>
      capacity({ limit: 100, resumeBelow: 50 }).bind(bindingFor({ now: () => clock.now }))
    const waitOf = (bound: ReturnType<typeof boundAt>): number => bound.refused?.(who, null).retryAfterMs ?? Number.NaN

    it('is 5 s while no drain was seen', () => {
      const clock = { now: 0 }
      const bound = boundAt(clock)
      bound.observe?.(gates(100, true))
      expect(waitOf(bound)).toBe(5_000)
    })

    it('is the time that the places above the level take at the rate seen', () => {
      const clock = { now: 0 }
      const bound = boundAt(clock)
      bound.observe?.(gates(100, true))
      clock.now = 1_000
      bound.observe?.(gates(90, true))
      // 10 a second; 41 have to go before fewer than 50 are held.
      expect(waitOf(bound)).toBeCloseTo(4_100)
    })

    it('follows a rate that changes, slowly', () => {
      const clock = { now: 0 }
      const bound = boundAt(clock)
      bound.observe?.(gates(200, true))
      clock.now = 1_000
      bound.observe?.(gates(190, true))
      clock.now = 2_000
      bound.observe?.(gates(160, true))
      // 0.7 × 10 + 0.3 × 30 = 16 a second, 111 to go.
      expect(waitOf(bound)).toBeCloseTo(111_000 / 16)
    })

    it('is never above a minute and never below a second', () => {
      const clock = { now: 0 }
      const bound = boundAt(clock)
      bound.observe?.(gates(100, true))
      clock.now = 3_600_000
      bound.observe?.(gates(99, true))
      expect(waitOf(bound)).toBe(60_000)
      const fast = boundAt(clock)
      fast.observe?.(gates(100, true))
      clock.now += 1
      fast.observe?.(gates(50, true))
      expect(waitOf(fast)).toBe(1_000)
    })

    it('takes no rate from two looks at the same moment', () => {
      const clock = { now: 0 }
      const bound = boundAt(clock)
      bound.observe?.(gates(100, true))
      bound.observe?.(gates(10, true))
      expect(waitOf(bound)).toBe(5_000)
    })
  })
})
