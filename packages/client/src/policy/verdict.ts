import type { SpillwayError } from '../error.js'

/**
 * `final`: a retry would not help, or might do harm. `later`: retry after a pause. `elsewhere`: this endpoint is the
 * problem; retry at once on another, else after a pause.
 */
export type Verdict = 'final' | 'later' | 'elsewhere'

export interface Repeat {
  /** Safe to do twice: it changes nothing, or carries a key. */
  isRepeatable: boolean
  retryOn429: boolean
}

export function verdictOn({ code, status, retryable }: SpillwayError, { isRepeatable, retryOn429 }: Repeat): Verdict {
  if (code === 'throttled') return 'later'
  // The server says so.
  if (status !== null && status >= 500 && !retryable) return 'final'
  if (status === 429) return retryOn429 ? 'later' : 'final'
  // Refused before anything was done, so any request may be retried.
  if (status === 503) return code === 'draining' || code === 'not_ready' ? 'elsewhere' : 'later'
  if (!isRepeatable) return 'final'
  if (isEndpointFault({ code, status })) return 'elsewhere'
  return status === 408 || status === 500 || code === 'idempotency_in_progress' ? 'later' : 'final'
}

/** Whether the fault is the endpoint's, not the request's or the whole service's. */
export function isEndpointFault({ code, status }: Pick<SpillwayError, 'code' | 'status'>): boolean {
  if (code === 'unreachable' || code === 'draining' || code === 'not_ready') return true
  // From a proxy that cannot reach the server. Spillway's own 502 and 504 concern its upstream.
  return code === 'unexpected' && (status === 502 || status === 504)
}

/** Whether the server accepted the request, for the throttle. An answer that says what is wrong with the request counts, too. */
export function isAccepted({ code, status }: Pick<SpillwayError, 'code' | 'status'>): boolean {
  return status !== null && status !== 429 && status !== 503 && !isEndpointFault({ code, status })
}

/** Whether the outcome is unknown. A request that was refused, throttled or found invalid was not carried out. */
export function isUnknown({ code, status }: Pick<SpillwayError, 'code' | 'status'>): boolean {
  return code === 'unreachable' || (status !== null && (status === 408 || status >= 500) && status !== 503)
}
