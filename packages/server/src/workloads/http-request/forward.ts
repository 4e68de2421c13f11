import { type ForwardResult, limits } from '@spillway/protocol/wire'
import { jsonOf } from 'spillway/workload'
import { Agent } from 'undici'
import { waitAskedFor } from '../../time.js'
import { AddressRefused, checkedLookup, type Resolve } from './addresses.js'
import type { AllowList } from './allow-list.js'
import type { ForwardRequest } from './payload.js'
import { forwardResult, type ResponseHeaders, readBounded } from './target-response.js'

interface ForwardError {
  code: 'target_not_allowed' | 'redirect_refused' | 'unsuccessful_status' | 'network' | 'aborted'
  /** For the ticket; no driver message. */
  message: string
}

export type ForwardOutcome =
  | { kind: 'done'; result: ForwardResult }
  | { kind: 'retry'; error: ForwardError; result?: ForwardResult; retryAfterMs?: number }
  | { kind: 'failed'; error: ForwardError; result?: ForwardResult }

export interface ForwardOptions {
  allow: AllowList
  operationId: string
  traceparent: string
  /** Ends the call; there is no other deadline. */
  signal: AbortSignal
}

/** Per origin; further calls wait for a connection. */
const connectionsMax = 64
const connectTimeoutMs = 10_000
const keepAliveTimeoutMs = 10_000
/** A longer Retry-After is a mistake or malice: the next attempt comes after a day at the latest. */
const retryAfterMsMax = 86_400_000
const answerHeaderBytesMax = 32_768

/** One step of a call: redirects make another. */
interface Hop {
  url: URL
  method: ForwardRequest['method']
  headers: Record<string, string>
  body: string | undefined
}

function encodedBody({ headers, body }: ForwardRequest): string | undefined {
  if (body === undefined) return undefined
  const json = jsonOf(body)
  // A string with a content type from the caller is sent as raw text.
  return json.startsWith('"') && headers['content-type'] !== undefined ? (JSON.parse(json) as string) : json
}

function firstHop(request: ForwardRequest, options: ForwardOptions, userAgent: string): Hop {
  const body = encodedBody(request)
  return {
    url: new URL(request.url),
    method: request.method,
    headers: {
      'user-agent': userAgent,
      accept: '*/*',
      ...(body === undefined ? {} : { 'content-type': 'application/json' }),
      ...request.headers,
      // Answers are stored as text: a compressed one would first have to be unpacked within the limit.
      'accept-encoding': 'identity',
      'idempotency-key': options.operationId,
      traceparent: options.traceparent,
    },
    body,
  }
}

const redirects = new Set([301, 302, 303, 307, 308])

function isRetried(status: number): boolean {
  return status === 408 || status === 429 || status >= 500
}

function failed(code: ForwardError['code'], message: string, result?: ForwardResult): ForwardOutcome {
  return { kind: 'failed', error: { code, message }, ...(result !== undefined && { result }) }
}

function settled(result: ForwardResult, headers: ResponseHeaders): ForwardOutcome {
  const { status } = result
  if (status >= 200 && status < 300) return { kind: 'done', result }
  const error: ForwardError = { code: 'unsuccessful_status', message: `the target answered ${status}` }
  if (!isRetried(status)) return { kind: 'failed', error, result }
  const retryAfterMs = waitAskedFor(headers['retry-after'], Date.now(), retryAfterMsMax)
  return { kind: 'retry', error, result, ...(retryAfterMs !== undefined && { retryAfterMs }) }
}

/** The redirect's target, or why it is not followed. */
function redirected(hop: Hop, result: ForwardResult, location: unknown, allow: AllowList): Hop | ForwardOutcome {
  const refused = (message: string): ForwardOutcome => failed('redirect_refused', message, result)
  if (typeof location !== 'string' || !URL.canParse(location, hop.url.href)) {
    return refused('a redirect without a usable Location')
  }
  const url = new URL(location, hop.url)
  if (!allow.allows(url)) return failed('target_not_allowed', 'a redirect to an origin that is not listed', result)
  // 303 asks for a GET, and 301 and 302 may turn a POST into one: the requested work would not be done.
  const isRepeated = [307, 308].includes(result.status) || hop.method === 'GET' || hop.method === 'HEAD'
  if (!isRepeated) return refused(`a redirect (${result.status}) that does not repeat a ${hop.method}`)
  if (url.origin === hop.url.origin) return { ...hop, url }
  // The caller's credentials are for the first origin only, even if both origins are listed.
  const { authorization: _, cookie: __, ...headers } = hop.headers
  return { ...hop, url, headers }
}

function causeCode(fault: unknown): string {
  for (let at = fault; at instanceof Error; at = at.cause) {
    if ('code' in at && typeof at.code === 'string') return at.code
  }
  return 'unknown'
}

/** A connection attempt to several addresses fails with all their faults at once. */
function isAddressRefused(fault: unknown): boolean {
  if (fault instanceof AddressRefused) return true
  if (fault instanceof AggregateError) return fault.errors.some(isAddressRefused)
  return fault instanceof Error && fault.cause !== undefined && isAddressRefused(fault.cause)
}

function faulted(fault: unknown, signal: AbortSignal): ForwardOutcome {
  if (isAddressRefused(fault)) return failed('target_not_allowed', 'the name resolves to an address that is not public')
  if (signal.aborted) return { kind: 'retry', error: { code: 'aborted', message: 'the call did not end in time' } }
  return { kind: 'retry', error: { code: 'network', message: `the target could not be reached (${causeCode(fault)})` } }
}

/**
 * Makes the calls of `http.request`, over a bounded pool of kept connections. Never throws for faults of a target or the
 * network: each call ends as done, to be retried, or failed for good.
 */
export function createForwarder({ userAgent = 'spillway', resolve }: { userAgent?: string; resolve?: Resolve } = {}) {
  const agent = new Agent({
    connections: connectionsMax,
    pipelining: 1,
    keepAliveTimeout: keepAliveTimeoutMs,
    maxHeaderSize: answerHeaderBytesMax,
    // The caller's signal is the deadline; operations may run for up to an hour.
    headersTimeout: 0,
    bodyTimeout: 0,
    connect: { timeout: connectTimeoutMs, lookup: checkedLookup(resolve) },
  })

  const call = async (hop: Hop, signal: AbortSignal) => {
    const answer = await agent.request({
      origin: hop.url.origin,
      path: `${hop.url.pathname}${hop.url.search}`,
      method: hop.method,
      headers: hop.headers,
      body: hop.body ?? null,
      signal,
    })
    const read = await readBounded(answer.body, limits.forwardAnswerBytes)
    return { headers: answer.headers, result: forwardResult(answer.statusCode, answer.headers, read) }
  }

  return {
    async forward(request: ForwardRequest, options: ForwardOptions): Promise<ForwardOutcome> {
      const { allow, signal } = options
      let hop = firstHop(request, options, userAgent)
      if (!allow.allows(hop.url)) return failed('target_not_allowed', 'the origin is not listed')
      for (let redirectCount = 0; ; redirectCount++) {
        try {
          const { headers, result } = await call(hop, signal)
          if (!redirects.has(result.status)) return settled(result, headers)
          if (redirectCount === limits.forwardRedirects) return failed('redirect_refused', 'too many redirects', result)
          const next = redirected(hop, result, headers.location, allow)
          if ('kind' in next) return next
          hop = next
        } catch (fault) {
          return faulted(fault, signal)
        }
      }
    },
    close: (): Promise<void> => agent.close(),
  }
}

export type Forwarder = ReturnType<typeof createForwarder>
