import { describe, expect, it } from 'vitest'
import { RouterPressure, type RouterSignals } from './router-pressure.js'

const bounds = { backlog: [10, 100, 1_000], latencyMs: [500, 2_000, 5_000], inFlight: [50, 200, 500] } as const
const calm: RouterSignals = { backlog: 0, latencyMs: 0, inFlight: 0 }

function routerOf(policy: 'any' | 'all' = 'any') {
  const pressure = new RouterPressure({ bounds, policy })
  let now = 0
  /** A second later. */
  const next = (signals: Partial<RouterSignals>) => {
    now += 1_000
    return pressure.observe({ ...calm, ...signals }, now)
  }
  return { next }
}

describe('the pressure of a router', () => {
  it.each([
    ['backlog', 99, 100, 1_000],
    ['latencyMs', 1_999, 2_000, 5_000],
    ['inFlight', 199, 200, 500],
  ] as const)('%s below, at critical, at overload', (name, below, critical, overload) => {
    expect(routerOf().next({ [name]: below })).toEqual({ level: 'inactive', changedFrom: null, triggers: [] })
    expect(routerOf().next({ [name]: critical })).toEqual({
      level: 'warning',
      changedFrom: 'inactive',
      triggers: [name],
    })
    expect(routerOf().next({ [name]: overload })).toEqual({
      level: 'active',
      changedFrom: 'inactive',
      triggers: [name],
    })
  })

  it('names every signal that is at the bound', () => {
    expect(routerOf().next({ backlog: 1_000, latencyMs: 5_000, inFlight: 499 }).triggers).toEqual([
      'backlog',
      'latencyMs',
    ])
  })

  it('is left only below half of the bound, after three seconds, and straight to where it belongs', () => {
    const { next } = routerOf()
    next({ backlog: 1_500 })
    for (let i = 0; i < 10; i++) expect(next({ backlog: 500 }).level).toBe('active')
    for (let i = 0; i < 3; i++) expect(next({ backlog: 20 }).level).toBe('active')
    expect(next({ backlog: 20 })).toMatchObject({ level: 'inactive', changedFrom: 'active' })
  })

  it('does not flap when a signal swings about its bound', () => {
    const { next } = routerOf()
    let changes = 0
    for (let i = 0; i < 60; i++) if (next({ backlog: i % 2 === 0 ? 1_100 : 600 }).changedFrom !== null) changes++
    expect(changes).toBe(1)
  })

  it('waits again when a signal rises in between', () => {
    const { next } = routerOf()
    next({ inFlight: 500 })
    next({})
    next({})
    next({ inFlight: 250 })
    for (let i = 0; i < 3; i++) expect(next({}).level).toBe('active')
    expect(next({}).level).toBe('inactive')
  })

  it('goes down to warning while another signal is critical', () => {
    const { next } = routerOf()
    next({ backlog: 1_000, latencyMs: 2_500 })
    for (let i = 0; i < 3; i++) next({ latencyMs: 2_400 })
    expect(next({ latencyMs: 2_400 })).toMatchObject({ level: 'warning', changedFrom: 'active' })
  })

  it('with the policy "all" asks for backlog and latency together', () => {
    expect(routerOf('all').next({ backlog: 5_000 }).level).toBe('warning')
    expect(routerOf('all').next({ latencyMs: 9_000 }).level).toBe('warning')
    expect(routerOf('all').next({ inFlight: 9_000 }).level).toBe('warning')
    expect(routerOf('all').next({ backlog: 1_000, latencyMs: 5_000 }).level).toBe('active')
  })

  it('does not latch while the broker is away', () => {
    const { next } = routerOf()
    next({ backlog: 1_000 })
    for (let i = 0; i < 3; i++) next({ backlog: null })
    expect(next({ backlog: null }).level).toBe('inactive')
  })
})
