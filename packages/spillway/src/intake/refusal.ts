import type { ProblemCode } from '@spillway/protocol/wire'
import type { GateRequest, RateTier } from '../gates/gate.js'
import type { Accepted, RateState } from '../store/port.js'
import type { BoundGates } from './submission.js'

/** "Not now", or "not like this": why, and when to retry. Returned, never thrown. */
export interface Refusal {
  code: ProblemCode
  /** For people; says what to do. */
  detail: string
  /** The base of the Retry-After header. On every 429 and 503. */
  retryAfterMs?: number
  /** Which gate refused, for metrics. */
  gate?: string
  rate?: RateStatus
  /** The faults of a body and their places (JSON pointers). */
  errors?: readonly { path: string; message: string }[]
  /** Additional members of the problem document, and its own type and title. */
  extensions?: Record<string, unknown>
  type?: string
  title?: string
}

/** A rate limit's state, for the RateLimit headers. */
export interface RateStatus {
  name: string
  limit: number
  windowSeconds: number
  left: number
  resetMs: number
  /** Epoch milliseconds, by the store's clock. */
  resetAtMs: number
}

export function rateStatus(
  rate: RateState,
  tiers: readonly { name: string; limit: number; windowSeconds: number }[],
): RateStatus | undefined {
  const tier = tiers[rate.tier]
  if (tier === undefined) return undefined
  return {
    name: tier.name,
    limit: tier.limit,
    windowSeconds: tier.windowSeconds,
    left: rate.left,
    resetMs: rate.resetMs,
    resetAtMs: rate.resetAtMs,
  }
}

/** The accepting transaction refused: the gate responsible says why. */
export function refusedBy(
  bound: BoundGates,
  request: GateRequest,
  body: unknown,
  tiers: readonly RateTier[],
  accepted: Extract<Accepted, { verdict: 'refuse' }>,
): Refusal {
  if (accepted.by === 'depth') return queueFull(null)
  if (accepted.by !== 'rate') {
    const gate = bound.gates.find((g) => g.kind === accepted.by)
    if (gate?.refused === undefined) throw new Error(`refused by ${accepted.by}, which ${bound.type} does not have`)
    return gate.refused(request, null)
  }
  const tier = tiers[accepted.rate.tier]
  // Tiers are in the order of their rate gates.
  const gates = bound.gates.filter((g) => g.kind === 'rate')
  const gate = gates.find((g) => g.exact?.(request, body).rates?.some((r) => r.key === tier?.key) === true)
  if (tier === undefined || gate?.refused === undefined)
    throw new Error(`refused by a rate that ${bound.type} does not have`)
  const { resetMs, resetAtMs } = accepted.rate
  return gate.refused(request, { ...tier, resetMs, resetAtMs })
}

export const storeAwayRetryMs = 2_000

/** Refusals by the intake itself, before any gate. */
export const refusals = {
  draining: { code: 'draining', detail: 'This instance is shutting down.', retryAfterMs: 5_000, gate: 'lifecycle' },
  storeAway: {
    code: 'store_unavailable',
    detail: 'The store cannot be reached yet. Nothing was accepted; try again later.',
    retryAfterMs: storeAwayRetryMs,
    gate: 'store',
  },
  limitsUnknown: {
    code: 'store_unavailable',
    detail: 'The store does not know the limits yet. Nothing was accepted; try again later.',
    retryAfterMs: storeAwayRetryMs,
    gate: 'store',
  },
  callerLeft: {
    code: 'overloaded',
    detail: 'The caller left before a slot was free. Nothing was accepted.',
    retryAfterMs: 1_000,
    gate: 'load',
  },
  writesWait: {
    code: 'overloaded',
    detail: 'Too many requests wait to be written. Try again later.',
    retryAfterMs: storeAwayRetryMs,
    gate: 'flush',
  },
} satisfies Record<string, Refusal>

/** The limit on held operations is reached. `waitMs`: until there is room, if known. */
export function queueFull(waitMs: number | null): Refusal {
  return {
    code: 'queue_full',
    detail: 'The operation queue is full. Try again later.',
    retryAfterMs: Math.min(60_000, Math.max(1_000, waitMs ?? 5_000)),
    gate: 'depth',
  }
}

/** Every slot is taken; one becomes free when the next run ends. */
export function allSlotsTaken(runMs: number): Refusal {
  const retryAfterMs = Math.min(60_000, Math.max(1_000, runMs))
  return { code: 'overloaded', detail: 'This instance is busy. Try again later.', retryAfterMs, gate: 'load' }
}
