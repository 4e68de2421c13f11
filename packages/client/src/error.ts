import type { ProblemCode, ProblemDocument } from '@spillway/protocol/wire'

/** `unreachable`: nothing answered, or not in time. `unexpected`: something answered, but not as Spillway does. */
export type SpillwayErrorCode = ProblemCode | 'unreachable' | 'unexpected'

/** Every failure of a call. Switch on `code`; the texts are for people. */
export class SpillwayError extends Error {
  override readonly name = 'SpillwayError'
  readonly code: SpillwayErrorCode
  /** The HTTP status; null when nothing answered. */
  readonly status: number | null
  /** How long the server asks to wait before the same request is repeated; null when it does not say. */
  readonly retryAfterMs: number | null
  readonly problem: ProblemDocument | null

  constructor(
    code: SpillwayErrorCode,
    message: string,
    told: { status?: number; retryAfterMs?: number | null; problem?: ProblemDocument; cause?: unknown } = {},
  ) {
    super(message, { cause: told.cause })
    this.code = code
    this.status = told.status ?? null
    this.retryAfterMs = told.retryAfterMs ?? null
    this.problem = told.problem ?? null
  }

  /** Whether the same request may succeed later: "not now" and silence, but not "not like this". */
  get isTemporary(): boolean {
    return this.status === null || this.status === 429 || this.status === 503
  }
}

/** Milliseconds, from either form of Retry-After: seconds or an HTTP date. Null for none, or one that is neither. */
export function retryAfterMs(header: string | null, nowMs: number = Date.now()): number | null {
  if (header === null) return null
  if (/^\d+$/.test(header.trim())) return Number(header) * 1_000
  const at = Date.parse(header)
  return Number.isNaN(at) ? null : Math.max(0, at - nowMs)
}
