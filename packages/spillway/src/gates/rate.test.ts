import { describe, expect, it } from 'vitest'
import { bindingFor, who } from '../../test/pipeline-gate-binding.js'
import type { RateTier } from './gate.js'
import { clockMinuteRate, parseWindow, rate } from './rate.js'

const tierOf = (tiers: RateTier[] | undefined): RateTier => {
  const [tier] = tiers ?? []
  if (tier === undefined) throw new Error('expected a tier')
  return tier
}

describe('parseWindow', () => {
  it.each([
    ['1s', 1],
    ['10s', 10],
    ['15m', 900],
    ['1h', 3_600],
    ['31d', 2_678_400],
  ])('%s is %i seconds', (per, seconds) => expect(parseWindow(per)).toBe(seconds))

  it.each(['', '0s', '32d', '1w', '1.5h', '-1h', 'h', '60', '1 h', '500ms', '9999999s'])('refuses %j', (per) => {
    expect(() => parseWindow(per)).toThrow(
      `rate: per must be a whole number with the unit s, m, h or d, from 1s to 31d, like 10s, 15m or 1h; not "${per}"`,
    )
  })
})

describe('rate', () => {
  it.each([0, -1, 0.5])('refuses a limit of %s', (limit) => {
    expect(() => rate({ limit, per: '1h' })).toThrow(
      `rate: limit must be a whole number of at least 1, or a function; given: ${limit}`,
    )
  })

  it('refuses options that it does not know, and to go without limit or window', () => {
    const misspelt: object = { limit: 1, pre: '1h' }
    expect(() => rate(misspelt as Parameters<typeof rate>[0])).toThrow('rate: unknown option "pre"; did you mean per?')
    const partial: object = { limit: 1 }
    expect(() => rate(partial as Parameters<typeof rate>[0])).toThrow('rate: per is missing')
  })

  it('counts per identity, by default under the name of the type', () => {
    const bound = rate({ limit: 10, per: '1h' }).bind(bindingFor())
    const tier = tierOf(bound.exact?.(who, {}).rates)
    expect(tier).toMatchObject({ name: 'orders.place', limit: 10, windowSeconds: 3_600 })
    const other = tierOf(bound.exact?.({ ...who, identity: 'bob' }, {}).rates)
    expect(other.key).not.toBe(tier.key)
  })

  it('counts by a member of the body, and not if it is null', () => {
    const bound = rate<{ realm: string | null }>({ limit: 1, per: '1m', by: (_, body) => body.realm }).bind(
      bindingFor(),
    )
    const keyOf = (realm: string | null) => bound.exact?.(who, { realm }).rates?.map((tier) => tier.key)
    expect(keyOf('north')).toEqual(keyOf('north'))
    expect(keyOf('north')).not.toEqual(keyOf('south'))
    expect(keyOf(null)).toBeUndefined()
    // The early check runs before the body is parsed.
    expect(bound.early).toBeUndefined()
  })

  it('makes gates of one name and window share a count, and those of two windows not', () => {
    const key = (options: { name?: string; per: string; acrossWindows?: boolean }, type: string) =>
      tierOf(
        rate({ limit: 1, ...options })
          .bind(bindingFor({ type }))
          .exact?.(who, {}).rates,
      ).key
    expect(key({ name: 'api', per: '1h' }, 'a')).toBe(key({ name: 'api', per: '1h' }, 'b'))
    expect(key({ per: '1h' }, 'a')).not.toBe(key({ per: '1h' }, 'b'))
    // Two tiers on one definition: an item must not be counted twice in one of them.
    expect(key({ per: '1h' }, 'a')).not.toBe(key({ per: '1d' }, 'a'))
    expect(key({ per: '60s' }, 'a')).toBe(key({ per: '1m' }, 'a'))
    expect(key({ per: '90s' }, 'a')).not.toBe(key({ per: '90m' }, 'a'))
    expect(key({ per: '1h', acrossWindows: true }, 'a')).toBe(key({ per: '1d', acrossWindows: true }, 'a'))
  })

  it('counts windows that count together in the same buckets, and the partial one too', () => {
    const tier = (per: string) => rate({ limit: 1, per, acrossWindows: true }).bind(bindingFor()).exact?.(who, {}).rates
    expect(tier('1h')).toMatchObject([{ windowSeconds: 3_600, clockMinutes: 61 }])
    expect(tier('1d')).toMatchObject([{ windowSeconds: 86_400, clockMinutes: 1_441 }])
    for (const per of ['59m', '10s', '3601s']) {
      expect(() => rate({ limit: 1, per, acrossWindows: true })).toThrow(
        `rate: acrossWindows needs a window in whole minutes of at least 1h, not "${per}"`,
      )
    }
  })

  it('needs counts to be kept for longer than the window', () => {
    expect(() => rate({ limit: 1, per: '1h', keepMinutes: 60 })).toThrow(
      'rate: keepMinutes must be more than the window (1h), not 60',
    )
    expect(() => rate({ limit: 1, per: '90s', keepMinutes: 2 })).not.toThrow()
  })

  it('counts clock minutes only where they are asked for', () => {
    const rates = clockMinuteRate({ limit: 1, per: '15m' }).bind(bindingFor()).exact?.(who, {}).rates
    expect(rates).toMatchObject([{ windowSeconds: 900, clockMinutes: 15 }])
    expect(rate({ limit: 1, per: '15m' }).bind(bindingFor()).exact?.(who, {}).rates?.[0]).not.toHaveProperty(
      'clockMinutes',
    )
    expect(() => clockMinuteRate({ limit: 1, per: '90s' })).toThrow('rate: per must be in whole minutes, not "90s"')
  })

  it('refuses a key without asking the store until a slot is free', () => {
    const clock = { now: 1_000 }
    const bound = rate({ limit: 2, per: '1h' }).bind(bindingFor({ now: () => clock.now }))
    const tier = tierOf(bound.exact?.(who, {}).rates)
    expect(bound.early?.(who)).toBeNull()
    const refusal = bound.refused?.(who, { ...tier, resetMs: 30_000, resetAtMs: 90_000 })
    expect(refusal).toMatchObject({
      code: 'rate_limited',
      retryAfterMs: 30_000,
      rate: { left: 0, resetMs: 30_000, resetAtMs: 90_000 },
    })
    clock.now = 11_000
    expect(bound.early?.(who)).toMatchObject({ retryAfterMs: 20_000, rate: { resetMs: 20_000, resetAtMs: 90_000 } })
    expect(bound.early?.({ ...who, identity: 'bob' })).toBeNull()
    clock.now = 31_000
    expect(bound.early?.(who)).toBeNull()
  })

  it('holds for the full window if the store gave no time', () => {
    const bound = rate({ limit: 2, per: '15m' }).bind(bindingFor())
    expect(bound.refused?.(who, null)).toMatchObject({ retryAfterMs: 900_000 })
    expect(bound.early?.(who)).toBeNull()
  })

  it('passes the limited key to `problem`, not the caller', () => {
    const bound = rate<{ realm: string }>({
      limit: 3,
      per: '1h',
      by: (_, body) => body.realm,
      problem: ({ limit, per, by }) => ({ detail: `${limit} ${per} ${by}` }),
    }).bind(bindingFor())
    const tier = tierOf(bound.exact?.(who, { realm: 'north' }).rates)
    expect(bound.refused?.(who, { ...tier, resetMs: 1, resetAtMs: 1 })?.detail).toBe('3 1h north')
  })

  it('remembers ten thousand keys and forgets the oldest first', () => {
    const bound = rate({ limit: 1, per: '1h' }).bind(bindingFor())
    const refuse = (identity: string) => {
      const tier = tierOf(bound.exact?.({ ...who, identity }, {}).rates)
      bound.refused?.({ ...who, identity }, { ...tier, resetMs: 1_000, resetAtMs: 1_000 })
    }
    for (let i = 0; i <= 10_000; i++) refuse(`id-${i}`)
    expect(bound.early?.({ ...who, identity: 'id-0' })).toBeNull()
    expect(bound.early?.({ ...who, identity: 'id-1' })).not.toBeNull()
    expect(bound.early?.({ ...who, identity: 'id-10000' })).not.toBeNull()
  })
})
