import type { ProblemDocument } from '@spillway/protocol/wire'
import { mergedHeaders } from '../checks.js'
import { type Clock, later } from '../clock.js'
import { SpillwayError } from '../error.js'
import type { Settings } from '../options.js'
import { retryAfterMs } from '../policy/retry-after.js'
import type { Call, Received } from './call.js'

export interface AttemptParts {
  settings: Settings
  clock: Clock
  base: string
  token: string | undefined
  /** Which one this is: from 1 on. */
  attempts: number
  timeoutMs: number
}

/** Sends it once. */
export async function attempt(call: Call, parts: AttemptParts): Promise<Received> {
  const { base, attempts, timeoutMs } = parts
  const { signal } = call
  signal?.throwIfAborted()
  // Errors from the caller's own code pass through: they are not server faults.
  const { url, init } = requestOf(call, parts)
  // AbortSignal.any would do, but not all browsers have it.
  const over = new AbortController()
  const leave = (): void => over.abort(signal?.reason)
  signal?.addEventListener('abort', leave, { once: true })
  const close = (): void => {
    signal?.removeEventListener('abort', leave)
    over.abort()
  }
  const timer = later(timeoutMs, () => over.abort())
  let isHandedOver = false
  try {
    signal?.throwIfAborted()
    // A local variable: a browser's fetch refuses to be called as a method of `settings`. Looked up at each call, so that
    // replacing the global fetch later works.
    const fetching = parts.settings.fetch ?? fetch
    // Redirects are not followed: they turn a POST into a GET, and the result looks like an answer.
    const response = await fetching(url, { ...init, redirect: 'manual', signal: over.signal })
    if (call.isStream === true && isEvents(response) && response.body !== null) {
      isHandedOver = true
      return { status: 200, headers: response.headers, body: undefined, stream: { body: response.body, close } }
    }
    return read(response, await response.text(), call, parts)
  } catch (cause) {
    signal?.throwIfAborted()
    if (cause instanceof SpillwayError) throw cause
    const why = over.signal.aborted ? `has not answered within ${Math.round(timeoutMs)} ms` : 'does not answer'
    throw new SpillwayError('unreachable', `${base} ${why}`, { attempts, cause })
  } finally {
    clearTimeout(timer)
    if (!isHandedOver) signal?.removeEventListener('abort', leave)
  }
}

const never = { retryable: false }

const isEvents = ({ status, headers }: Response): boolean =>
  status === 200 && headers.get('content-type')?.startsWith('text/event-stream') === true

function requestOf(call: Call, { settings, base, token }: AttemptParts): { url: string; init: RequestInit } {
  const { method, path, query = {}, body, isStream } = call
  const search = new URLSearchParams()
  for (const [name, value] of Object.entries(query)) if (value !== undefined) search.set(name, String(value))
  const asked = search.toString()
  const headers = mergedHeaders(
    token === undefined ? {} : { authorization: `Bearer ${token}` },
    settings.headers,
    { accept: isStream === true ? 'text/event-stream' : 'application/json' },
    body === undefined ? {} : { 'content-type': 'application/json' },
    call.headers ?? {},
  )
  const init = { method, headers, ...(body !== undefined && { body: JSON.stringify(body) }) }
  return { url: `${base}${path}${asked === '' ? '' : `?${asked}`}`, init }
}

function read(response: Response, text: string, { expects }: Call, parts: AttemptParts): Received {
  const { status, headers } = response
  const isSuccess = (status >= 200 && status < 300) || status === 304
  const isJson = headers.get('content-type')?.includes('json') === true
  const isNone = text === '' && (status === 204 || status === 304)
  const body = isNone ? undefined : parseJson(text)
  const isAny = expects.includes('*') && (isNone || body !== undefined)
  if (isSuccess && (isAny || (isNone ? expects.includes('') : isAnswer(body, expects))))
    return { status, headers, body, stream: null }
  // The answer was cut short. Without a Content-Length it looks complete.
  if (isSuccess && isJson && !isNone && body === undefined) throw new Error('the answer ends in the middle')
  const waitMs = retryAfterMs(headers.get('retry-after'), parts.clock.wallMs(), headers.get('date'))
  if (isSuccess || !isProblem(body)) throw stranger(response, parts, waitMs)
  // The end of an operation is the answer for good, whatever its status.
  const isFinal = headers.get('x-should-retry') === 'false' || 'operationId' in body
  const details = { status, attempts: parts.attempts, retryAfterMs: waitMs, problem: body, ...(isFinal && never) }
  throw new SpillwayError(body.code, `${body.title}: ${body.detail}`, details)
}

function isAnswer(body: unknown, expects: readonly string[]): boolean {
  if (Array.isArray(body)) return expects.includes('[]')
  return typeof body === 'object' && body !== null && expects.some((member) => member in body)
}

function stranger(response: Response, { base, attempts }: AttemptParts, waitMs: number | null): SpillwayError {
  // 0: a browser does not reveal a redirect's status or target.
  const status = response.status === 0 ? null : response.status
  const isRedirect = status === null || (status >= 300 && status < 400 && status !== 304)
  const detail = isRedirect
    ? `${base} redirects to ${response.headers.get('location') ?? 'another URL'}, which is not followed`
    : `${base} answered ${status}, but not as Spillway does`
  return new SpillwayError('unexpected', detail, { status, attempts, retryAfterMs: waitMs })
}

function parseJson(text: string): unknown {
  try {
    return JSON.parse(text)
  } catch {
    return undefined
  }
}

function isProblem(answer: unknown): answer is ProblemDocument {
  return typeof answer === 'object' && answer !== null && 'code' in answer && 'title' in answer && 'detail' in answer
}
