/** What an answer other than 2xx, or a missing answer, means for the request. */
import { errors } from 'undici'
import { waitAskedFor } from '../../time.js'
import { malformed, UpstreamFault } from './upstream.js'
import { type Conceal, upstreamError } from './upstream-chunks.js'

/** Nobody waits longer than this; the queue's own limits end the request earlier. */
const retryAfterMsMax = 86_400_000

export interface Refusal {
  status: number
  retryAfter: string | string[] | undefined
  /** Null: longer than the read limit. */
  body: string | null
  conceal: Conceal
}

function jsonOrNull(text: string): unknown {
  try {
    return JSON.parse(text)
  } catch {
    // An HTML error page from a proxy: its status is enough.
    return null
  }
}

const mayPass = (status: number): boolean => status === 408 || status === 409 || status === 429 || status >= 500

export function refusalFault({ status, retryAfter, body, conceal }: Refusal): UpstreamFault {
  const facts = {
    status,
    retryable: mayPass(status),
    retryAfterMs: waitAskedFor(retryAfter, Date.now(), retryAfterMsMax) ?? null,
  }
  if (body === null) return malformed(`the upstream answered ${status} with a body that is too long`, facts)
  if (status === 429 || status === 503 || status === 529) {
    return new UpstreamFault('upstream_overloaded', `the upstream has no capacity now (${status})`, facts)
  }
  // The caller did nothing wrong, and the upstream's message may quote the key.
  if (status === 401 || status === 403) {
    return new UpstreamFault('upstream_error', 'the upstream does not accept the credentials of this service', facts)
  }
  if (status < 400 || facts.retryable) {
    return new UpstreamFault('upstream_error', `the upstream answered ${status}`, facts)
  }
  const error = upstreamError(jsonOrNull(body), conceal)
  const message = error?.message ?? `the upstream refused the request (${status})`
  return new UpstreamFault('upstream_rejected', message, {
    ...facts,
    error: error ?? { message, type: 'invalid_request_error', param: null, code: 'upstream_rejected' },
  })
}

function causeCode(fault: unknown): string {
  for (let at = fault; at instanceof Error; at = at.cause) {
    if ('code' in at && typeof at.code === 'string') return at.code
  }
  return 'unknown'
}

/** The connection failed before or during the answer. */
export function networkFault(cause: unknown, hadAnswer: boolean): UpstreamFault {
  const code = causeCode(cause)
  if (cause instanceof errors.HTTPParserError) return malformed('the upstream does not speak HTTP', { cause })
  return hadAnswer
    ? new UpstreamFault('upstream_incomplete', `the upstream broke off its answer (${code})`, {
        cause,
        retryable: true,
      })
    : new UpstreamFault('upstream_unreachable', `the upstream cannot be reached (${code})`, { cause, retryable: true })
}
