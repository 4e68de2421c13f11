import type { ProblemCode, ProblemDocument } from '@spillway/protocol/wire'

/**
 * A code of the server, or one of the client's own. `unreachable`: nothing answered, not in time, or not to the end.
 * `unexpected`: something answered, but not as Spillway does. `throttled`: not sent, as the server refuses most of what
 * this client sends.
 */
export type SpillwayErrorCode = ProblemCode | 'unreachable' | 'unexpected' | 'throttled'

export interface Told {
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
  /** Whether the same request may succeed later: "not now" and silence, but not "not like this". */
  readonly retryable: boolean
  /** How long the server asks to wait before the same request is repeated; null when it does not say. */
  readonly retryAfterMs: number | null
  readonly problem: ProblemDocument | null
  /** How often the request was sent. 0: never. */
  readonly attempts: number

  constructor(code: SpillwayErrorCode, message: string, told: Told = {}) {
    super(message, { cause: told.cause })
    this.code = code
    this.status = told.status ?? null
    this.retryAfterMs = told.retryAfterMs ?? null
    this.problem = told.problem ?? null
    this.attempts = told.attempts ?? 1
    this.retryable = told.retryable ?? mayPass(code, this.status)
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
