import type { SpillwayError } from '../error.js'

/**
 * `final`: the same again would not help, or might do harm. `later`: after a pause. `elsewhere`: this endpoint is the
 * trouble; at once if there is another, else after a pause.
 */
export type Verdict = 'final' | 'later' | 'elsewhere'

export interface Repeat {
  /** It does no harm if it is done twice: it changes nothing, or carries a key. */
  isRepeatable: boolean
  retryOn429: boolean
}

export function verdictOn({ code, status }: SpillwayError, { isRepeatable, retryOn429 }: Repeat): Verdict {
  if (code === 'throttled') return 'later'
  if (status === 429) return retryOn429 ? 'later' : 'final'
  // Refused before anything was done, so that it does not matter what was asked for.
  if (status === 503) return code === 'draining' || code === 'not_ready' ? 'elsewhere' : 'later'
  if (!isRepeatable) return 'final'
  if (isEndpointFault({ code, status })) return 'elsewhere'
  return status === 408 || status === 500 || code === 'idempotency_in_progress' ? 'later' : 'final'
}

/** Whether it says something about the one that was asked, and not about the request or the service as a whole. */
export function isEndpointFault({ code, status }: Pick<SpillwayError, 'code' | 'status'>): boolean {
  if (code === 'unreachable' || code === 'draining' || code === 'not_ready') return true
  // Of a proxy that does not reach the server. Spillway's own 502 and 504 are about who it asked in turn.
  return code === 'unexpected' && (status === 502 || status === 504)
}

/** Whether the server took the request on, for the throttle. Being told what is wrong with it is that, too. */
export function isAccepted({ code, status }: Pick<SpillwayError, 'code' | 'status'>): boolean {
  return status !== null && status !== 429 && status !== 503 && !isEndpointFault({ code, status })
}

/** Whether nobody knows if it was done. What was refused, held back, or told what is wrong with it was not. */
export function isUnknown({ code, status }: Pick<SpillwayError, 'code' | 'status'>): boolean {
  return code === 'unreachable' || (status !== null && (status === 408 || status >= 500) && status !== 503)
}
