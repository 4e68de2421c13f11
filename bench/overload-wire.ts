/** The messages between the processes of the overload section, and the figures they share. */

/** How many orders the downstream works on at once, and for how long each: at most 1,000 a second. */
export const downstreamSlots = 20
export const downstreamServiceMs = 20
export const downstreamPerSecond = (downstreamSlots * 1_000) / downstreamServiceMs

/** A client waits so long, from the moment it wanted to ask; whatever is done for it later is wasted. */
export const deadlineMs = 5_000

/** Orders are numbered from here, so that each has seven digits and all requests the same length. */
export const firstNumber = 1_000_000
export const numbersMax = 9_000_000

/**
 * Connections that the clients may have open. More than the downstream can serve within a deadline (5,000): with fewer
 * it would be the load generator that sheds the load. Two files per connection must fit below the usual limit of 20,000.
 */
export const connectionsMax = 9_000
/** Open before a step begins, as those of a load balancer are; the others are made when they are needed. */
export const connectionsAtOnce = 1_000

export interface StepRequest {
  /** Where the door listens. */
  readonly host: string
  readonly port: number
  readonly ratePerSecond: number
  readonly seconds: number
  /** The number of the first order. */
  readonly first: number
  readonly seed: number
}

export interface Spread {
  readonly count: number
  readonly p50: number
  readonly p99: number
  readonly max: number
}

export interface StepReport {
  /** Orders that were due. */
  readonly due: number
  /** Orders that went out: the rest found no connection. */
  readonly sent: number
  /** How late the generator itself was, in milliseconds. */
  readonly lagMs: Spread
  /** Share of one core that the generator used. */
  readonly cores: number
  /** Answered 200 or 201, with the result, within the deadline. */
  readonly good: number
  /** Those of them that came before the last order was due: a backlog that is worked off afterwards is no goodput. */
  readonly goodDuring: number
  readonly goodMs: Spread
  /** Answers by status: those of `good` too. */
  readonly byStatus: Readonly<Record<string, number>>
  /** Answers other than 2xx. */
  readonly refusedMs: Spread
  /** Answers of 400 and more without a Retry-After of whole seconds. */
  readonly withoutRetryAfter: number
  readonly retryAfterSeconds: Spread
  readonly timedOut: number
  readonly connectionLost: number
  readonly noConnection: number
}

/** What the downstream did, compared with the answers that the clients got. */
export interface EffectsReport {
  /** Answered as done, but not done. */
  readonly lostDone: number
  /** Answered as queued, but not done (yet). */
  readonly queuedUndone: number
  readonly queued: number
  readonly doneTwice: number
  /** Done for clients who got no good answer, nor a ticket. */
  readonly wasted: number
}

export interface DownstreamState {
  readonly inFlight: number
  readonly done: number
  /** How late answers left, against the plan: this process's own lack of CPU. */
  readonly lateMs: Spread
}

export function spreadOf(values: Float64Array): Spread {
  const sorted = values.slice().sort()
  const at = (share: number): number => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))] ?? 0
  return { count: sorted.length, p50: at(0.5), p99: at(0.99), max: at(1) }
}

/** An environment variable that the section gives. */
export function given(name: string): string {
  const value = process.env[name]
  if (value === undefined || value === '')
    throw new Error(`${name} is not set: the overload section starts this program`)
  return value
}
