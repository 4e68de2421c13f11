import type { ProblemCode, ProblemDocument } from '@spillway/protocol/wire'

/**
 * A server code, or one of the client's: `unreachable`: no answer, not in time, or cut short. `unexpected`: an answer that
 * is not from Spillway. `throttled`: not sent, because the server refuses most requests of this client.
 */
export type SpillwayErrorCode = ProblemCode | 'unreachable' | 'unexpected' | 'throttled'

export interface ErrorDetails {
  status?: number | null
  retryAfterMs?: number | null
  problem?: ProblemDocument | null
  attempts?: number
  /** Default: by the status and the code. */
  retryable?: boolean
  cause?: unknown
}

/** Every failure of a call. Switch on `code`; the texts are for people. */
export class SpillwayError extends Error {
  override readonly name = 'SpillwayError'
  readonly code: SpillwayErrorCode
  /** The HTTP status; null when nothing answered. */
  readonly status: number | null
  /** Whether the same request may succeed later: true for "not now" and for no answer, false for "not like this". */
  readonly retryable: boolean
  /** How long the server asks to wait before a retry; null when it does not say. */
  readonly retryAfterMs: number | null
  readonly problem: ProblemDocument | null
  /** How often the request was sent. 0: never. */
  readonly attempts: number
  /** An attempt whose answer was lost, or that broke off, may have done it. False: nothing was done. */
  isUnknown = false

  constructor(code: SpillwayErrorCode, message: string, details: ErrorDetails = {}) {
    super(message, { cause: details.cause })
    this.code = code
    this.status = details.status ?? null
    this.retryAfterMs = details.retryAfterMs ?? null
    this.problem = details.problem ?? null
    this.attempts = details.attempts ?? 1
    this.retryable = details.retryable ?? mayPass(code, this.status)
  }

  /** The same as `retryable`, under its first name. */
  get isTemporary(): boolean {
    return this.retryable
  }
}

const passing = new Set([408, 429, 500, 502, 503, 504])

function mayPass(code: SpillwayErrorCode, status: number | null): boolean {
  if (status === null) return code !== 'unexpected'
  return passing.has(status) || code === 'idempotency_in_progress'
}
