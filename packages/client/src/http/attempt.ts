import type { ProblemDocument } from '@spillway/protocol/wire'
import type { Clock } from '../clock.js'
import { SpillwayError } from '../error.js'
import type { Settings } from '../options.js'
import { retryAfterMs } from '../policy/retry-after.js'
import type { Answer, Call } from './call.js'

export interface AttemptParts {
  settings: Settings
  clock: Clock
  base: string
  /** Which one this is: from 1 on. */
  attempts: number
  timeoutMs: number
}

/** Sends it once. */
export async function attempt(call: Call, parts: AttemptParts): Promise<Answer> {
  const { base, attempts, timeoutMs } = parts
  const { signal } = call
  // AbortSignal.any would do, where all browsers had it.
  const over = new AbortController()
  const leave = (): void => over.abort(signal?.reason)
  signal?.throwIfAborted()
  signal?.addEventListener('abort', leave, { once: true })
  const close = (): void => {
    signal?.removeEventListener('abort', leave)
    over.abort()
  }
  const timer = setTimeout(() => over.abort(), timeoutMs)
  let isHandedOver = false
  try {
    const response = await request(call, parts, over.signal)
    if (call.isStream === true && response.status === 200 && response.body !== null) {
      isHandedOver = true
      return { status: 200, headers: response.headers, body: undefined, stream: { body: response.body, close } }
    }
    return read(response, await response.text(), parts)
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

async function request(call: Call, { settings, base }: AttemptParts, signal: AbortSignal): Promise<Response> {
  const { method, path, query = {}, body, headers, isStream } = call
  const token = typeof settings.token === 'function' ? await settings.token() : settings.token
  const search = new URLSearchParams()
  for (const [name, value] of Object.entries(query)) if (value !== undefined) search.set(name, String(value))
  const asked = search.toString()
  // A name of its own: as a method of `settings` a browser's fetch would refuse to be called. Looked up at each call: a
  // global fetch that is replaced later counts.
  const fetching = settings.fetch ?? fetch
  return fetching(`${base}${path}${asked === '' ? '' : `?${asked}`}`, {
    method,
    headers: {
      accept: isStream === true ? 'text/event-stream' : 'application/json',
      ...(body !== undefined && { 'content-type': 'application/json' }),
      ...(token !== undefined && { authorization: `Bearer ${token}` }),
      ...settings.headers,
      ...headers,
    },
    ...(body !== undefined && { body: JSON.stringify(body) }),
    signal,
  })
}

function read({ status, headers }: Response, text: string, { base, attempts, clock }: AttemptParts): Answer {
  const isSuccess = (status >= 200 && status < 300) || status === 304
  if (isSuccess && text === '') return { status, headers, body: undefined, stream: null }
  const body = parseJson(text)
  if (isSuccess && body !== undefined) return { status, headers, body, stream: null }
  const told = {
    status,
    attempts,
    retryAfterMs: retryAfterMs(headers.get('retry-after'), clock.wallMs(), headers.get('date')),
  }
  if (isProblem(body)) {
    throw new SpillwayError(body.code, `${body.title}: ${body.detail}`, { ...told, problem: body })
  }
  throw new SpillwayError('unexpected', `${base} answered ${status}, but not as Spillway does`, told)
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
