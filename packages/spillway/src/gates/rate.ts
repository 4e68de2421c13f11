import type { Refusal } from '../intake/refusal.js'
import type { BoundGate, Gate, GateBinding, GateRequest, RateTier } from './gate.js'

export interface RateOptions<Body> {
  /** A function is called for each request, for example for a limit that is lower under pressure. */
  limit: number | (() => number)
  /** The sliding window, in whole minutes: `1h`, `15m`, `1d`. */
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
   * operation would count once for each. Default false.
   */
  acrossWindows?: boolean
  problem?: (limited: {
    limit: number
    per: string
    by: string
  }) => Partial<Pick<Refusal, 'type' | 'title' | 'detail' | 'extensions'>>
}

/** Keys known to be out of quota; further ones are checked in the store. */
const blockedMax = 10_000

/**
 * At most `limit` in any window of minute buckets, exact over all instances: counted under a row lock in the accepting
 * transaction, refunded when that fails. Several rate gates on one definition are tiers of one query. A refused key is
 * refused here, without the store, until a slot is free.
 */
export function rate<Body = unknown>(options: RateOptions<Body>): Gate<Body> {
  const windowMinutes = parseWindowMinutes(options.per)
  if (typeof options.limit === 'number' && (!Number.isInteger(options.limit) || options.limit < 1)) {
    throw new RangeError(`rate: limit must be a whole number of at least 1, not ${options.limit}`)
  }
  if (options.keepMinutes !== undefined && !(options.keepMinutes > windowMinutes)) {
    throw new RangeError(
      `rate: keepMinutes must be more than the window (${windowMinutes}), not ${options.keepMinutes}`,
    )
  }
  return {
    kind: 'rate',
    bind(binding: GateBinding): BoundGate<Body> {
      const name = options.name ?? binding.type
      const blocked = new Map<string, { until: number; resetAtMs: number }>()
      // Windows on one definition count separately; otherwise each request would count twice.
      const prefix = options.acrossWindows === true ? `${name}\0\0` : `${name}\0${windowMinutes}\0`
      const keyOf = (by: string): string => prefix + by
      const limitNow = (): number => (typeof options.limit === 'number' ? options.limit : options.limit())
      const refusal = (by: string, resetMs: number, resetAtMs: number, limit: number): Refusal => ({
        code: 'rate_limited',
        detail: `Maximum ${limit} per ${options.per} exceeded.`,
        ...options.problem?.({ limit, per: options.per, by }),
        retryAfterMs: resetMs,
        gate: 'rate',
        rate: { name, limit, windowSeconds: windowMinutes * 60, left: 0, resetMs, resetAtMs },
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
          const { keepMinutes } = options
          const tier: RateTier = {
            ...{ name, key: keyOf(by), limit: limitNow(), windowMinutes },
            ...(keepMinutes !== undefined && { keepMinutes }),
          }
          return { rates: [tier] }
        },
        refused(request, tier) {
          const resetMs = tier?.resetMs ?? windowMinutes * 60_000
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

export function parseWindowMinutes(per: string): number {
  const match = /^(\d{1,5})(m|h|d)$/.exec(per)
  const minutes = Number(match?.[1]) * ({ m: 1, h: 60, d: 1_440 }[match?.[2] ?? ''] ?? Number.NaN)
  if (!Number.isInteger(minutes) || minutes < 1 || minutes > 44_640) {
    throw new RangeError(`rate: per must be like 15m, 1h or 1d, from 1m to 31d, not ${JSON.stringify(per)}`)
  }
  return minutes
}
