import { formatTraceparent, newSpanId, newTraceId, parseTraceparent } from '../metrics/trace.js'

/** The trace of one request, passed on as a value, without an AsyncLocalStorage. */
export interface Trace {
  /** 32 hex digits; also the X-Request-Id of the answer. */
  traceId: string
  /** To pass on: the caller's trace and sampling with our span. */
  traceparent: string
}

function parse(header: string | string[] | undefined) {
  return typeof header === 'string' ? parseTraceparent(header) : null
}

/** The trace id of a request: the caller's when its traceparent is valid, else a new one. */
export function traceIdOf(header: string | string[] | undefined): string {
  return parse(header)?.traceId ?? newTraceId()
}

/** Sampled when the trace starts here: a collector may still drop it, but could not recover it. */
export function traceFor(traceId: string, header: string | string[] | undefined): Trace {
  const parent = parse(header)
  const sampled = parent?.traceId === traceId ? parent.sampled : true
  return { traceId, traceparent: formatTraceparent({ traceId, spanId: newSpanId(), sampled }) }
}
