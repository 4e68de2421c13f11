import { checkOptions, checkRequired, isBoolean, isFunction, isText, type Rule, wholeNumber } from '../core/options.js'
import type { Refusal } from '../intake/refusal.js'
import type { BoundGate, Gate, GateBinding, GateRequest, RateTier } from './gate.js'

export interface RateOptions<Body> {
  /** A function is called for each request, for example for a limit that is lower under pressure. */
  limit: number | (() => number)
  /** The sliding window, from `1s` to `31d`: `10s`, `15m`, `1h`. */
  per: string
  /** The key to limit by. Default: the identity. Null: this tier does not limit this request. */
  by?: (request: GateRequest, body: Body) => string | null
  /** How long a count is kept after its last use, in minutes. Default: the window and an hour. */
  keepMinutes?: number
  /** In the RateLimit headers; gates of one name and window count together. Default: the operation's type. */
  name?: string
  /**
   * Gates of one name count together whatever their windows are, so that a window may be changed, or differ between
   * instances, without a second quota; keepMinutes says for how long. A definition may have only one gate of that name: an
   * operation would count once for each. The window is in whole minutes then, and at least `1h`. Default false.
   */
  acrossWindows?: boolean
  problem?: (limited: {
    limit: number
    per: string
    by: string
  }) => Partial<Pick<Refusal, 'type' | 'title' | 'detail' | 'extensions'>>
}

type Window = Pick<RateTier, 'windowSeconds' | 'clockMinutes'>

const isLimit: Rule = (value) =>
  typeof value === 'function'
    ? null
    : wholeNumber(1, 2_147_483_647)(value) && 'a whole number of at least 1, or a function'

function checkRate<Body>(options: RateOptions<Body>): void {
  checkOptions('rate', options, {
    limit: isLimit,
    per: isText,
    by: isFunction,
    keepMinutes: wholeNumber(1),
    name: isText,
    acrossWindows: isBoolean,
    problem: isFunction,
  })
  checkRequired('rate', options, 'limit', 'per')
}

const windowSecondsMax = 31 * 86_400

/** Keys known to be out of quota; further ones are checked in the store. */
const blockedMax = 10_000

/**
 * At most `limit` in any window of `per`, wherever it begins, exact over all instances: counted under a row lock in the
 * accepting transaction, refunded when that fails. A slot is free again once the window has passed, at most a 60th of it
 * later. Several rate gates on one definition are tiers of one query. A refused key is refused here, without the store,
 * until a slot is free.
 */
export function rate<Body = unknown>(options: RateOptions<Body>): Gate<Body> {
  checkRate(options)
  const windowSeconds = parseWindow(options.per)
  if (options.acrossWindows !== true) return rateGate(options, { windowSeconds })
  if (windowSeconds < 3_600 || windowSeconds % 60 !== 0) {
    throw new RangeError(
      `rate: acrossWindows needs a window in whole minutes of at least 1h, not ${JSON.stringify(options.per)}`,
    )
  }
  // Windows that count together have the same buckets. The oldest one, of which a part has left the window, still counts.
  return rateGate(options, { windowSeconds, clockMinutes: windowSeconds / 60 + 1 })
}

/**
 * At most `limit` in clock minutes: a window of 60 minutes is the present minute and the 59 before it. Around a full minute
 * more than `limit` can pass in less than the window; petitions are specified so. Gates of one name count together
 * whatever their windows are.
 */
export function clockMinuteRate<Body = unknown>(options: Omit<RateOptions<Body>, 'acrossWindows'>): Gate<Body> {
  checkRate(options)
  const windowSeconds = parseWindow(options.per)
  if (windowSeconds % 60 !== 0) {
    throw new RangeError(`rate: per must be in whole minutes, not ${JSON.stringify(options.per)}`)
  }
  return rateGate({ ...options, acrossWindows: true }, { windowSeconds, clockMinutes: windowSeconds / 60 })
}

function rateGate<Body>(options: RateOptions<Body>, window: Window): Gate<Body> {
  const { windowSeconds } = window
  const { keepMinutes } = options
  if (keepMinutes !== undefined && !(keepMinutes * 60 > windowSeconds)) {
    throw new RangeError(`rate: keepMinutes must be more than the window (${options.per}), not ${keepMinutes}`)
  }
  return {
    kind: 'rate',
    bind(binding: GateBinding): BoundGate<Body> {
      const name = options.name ?? binding.type
      const blocked = new Map<string, { until: number; resetAtMs: number }>()
      // Windows on one definition count separately; otherwise each request would count twice.
      const prefix = options.acrossWindows === true ? `${name}\0\0` : `${name}\0${windowSeconds / 60}\0`
      const keyOf = (by: string): string => prefix + by
      const limitNow = (): number => (typeof options.limit === 'number' ? options.limit : options.limit())
      const refusal = (by: string, resetMs: number, resetAtMs: number, limit: number): Refusal => ({
        code: 'rate_limited',
        detail: `Maximum ${limit} per ${options.per} exceeded.`,
        ...options.problem?.({ limit, per: options.per, by }),
        retryAfterMs: resetMs,
        gate: 'rate',
        rate: { name, limit, windowSeconds, left: 0, resetMs, resetAtMs },
      })
      const early = (request: GateRequest): Refusal | null => {
        const key = keyOf(request.identity)
        const known = blocked.get(key)
        if (known === undefined) return null
        const leftMs = known.until - binding.now()
        if (leftMs > 0) return refusal(request.identity, leftMs, known.resetAtMs, limitNow())
        blocked.delete(key)
        return null
      }
      return {
        kind: 'rate',
        // A key from the body is not known before it is parsed. A variable limit may have been raised since it was reached.
        ...(options.by === undefined && typeof options.limit === 'number' && { early }),
        exact(request, body) {
          const by = options.by === undefined ? request.identity : options.by(request, body)
          if (by === null) return {}
          const tier: RateTier = {
            ...{ name, key: keyOf(by), limit: limitNow() },
            ...window,
            ...(keepMinutes !== undefined && { keepMinutes }),
          }
          return { rates: [tier] }
        },
        forget: () => blocked.clear(),
        refused(request, tier) {
          const resetMs = tier?.resetMs ?? windowSeconds * 1_000
          const resetAtMs = tier?.resetAtMs ?? Date.now() + resetMs
          const by = tier?.key.slice(prefix.length) ?? request.identity
          if (tier !== null) {
            if (blocked.size >= blockedMax) {
              const oldest = blocked.keys().next()
              if (oldest.done !== true) blocked.delete(oldest.value)
            }
            blocked.set(tier.key, { until: binding.now() + resetMs, resetAtMs })
          }
          return refusal(by, resetMs, resetAtMs, tier?.limit ?? limitNow())
        },
      }
    },
  }
}

/** In seconds. */
export function parseWindow(per: string): number {
  const match = /^(\d{1,7})([smhd])$/.exec(per)
  const seconds = Number(match?.[1]) * ({ s: 1, m: 60, h: 3_600, d: 86_400 }[match?.[2] ?? ''] ?? Number.NaN)
  if (!(seconds >= 1 && seconds <= windowSecondsMax)) {
    throw new RangeError(
      `rate: per must be a whole number with the unit s, m, h or d, from 1s to 31d, like 10s, 15m or 1h; not ${JSON.stringify(per)}`,
    )
  }
  return seconds
}
