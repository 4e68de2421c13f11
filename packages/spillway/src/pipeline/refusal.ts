import type { ProblemCode } from '@spillway/protocol/wire'
import type { RateState } from '../store/port.js'

/** "Not now", or "not like this": why, and when to come back. Returned, never thrown. */
export interface Refusal {
  code: ProblemCode
  /** For people; says what to do. */
  detail: string
  /** From here the Retry-After header is made. On every 429 and 503. */
  retryAfterMs?: number
  /** Which gate refused, for metrics. */
  gate?: string
  rate?: RateTold
  /** Members to add to the problem document, and its own type and title. */
  extensions?: Record<string, unknown>
  type?: string
  title?: string
}

/** A rate limit's state, for the RateLimit headers. */
export interface RateTold {
  name: string
  limit: number
  windowSeconds: number
  left: number
  resetMs: number
}

export function toldRate(
  rate: RateState,
  tiers: readonly { name: string; limit: number; windowMinutes: number }[],
): RateTold | undefined {
  const tier = tiers[rate.tier]
  if (tier === undefined) return undefined
  return {
    name: tier.name,
    limit: tier.limit,
    windowSeconds: tier.windowMinutes * 60,
    left: rate.left,
    resetMs: rate.resetMs,
  }
}
