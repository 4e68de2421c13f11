import type { ProblemDocument } from '@spillway/protocol/wire'
import { retryAfterMs, SpillwayError } from './error.js'

export interface ClientOptions {
  /** Where the server listens, e.g. `http://127.0.0.1:7745`; a path prefix is kept. */
  baseUrl: string
  /** An API key or a JWT, sent as Bearer. */
  key?: string
  /** Default: the global one. */
  fetch?: typeof fetch
}

export interface Call {
  method: 'GET' | 'POST'
  path: string
  body?: unknown
  headers?: Record<string, string>
  signal?: AbortSignal
}

export interface Told {
  body: unknown
  headers: Headers
}

/** One request. Resolves for every 2xx, 202 included; throws a SpillwayError for the rest. */
export type Send = (call: Call) => Promise<Told>

export function sender(options: ClientOptions): Send {
  const base = options.baseUrl.replace(/\/+$/, '')
  if (!/^https?:\/\//.test(base) || !URL.canParse(base)) {
    throw new TypeError(`baseUrl must be an http(s) URL, not ${JSON.stringify(options.baseUrl)}`)
  }
  return async ({ method, path, body, headers, signal }) => {
    const request: RequestInit = {
      method,
      headers: {
        accept: 'application/json',
        ...(body !== undefined && { 'content-type': 'application/json' }),
        ...(options.key !== undefined && { authorization: `Bearer ${options.key}` }),
        ...headers,
      },
      ...(body !== undefined && { body: JSON.stringify(body) }),
      ...(signal && { signal }),
    }
    let response: Response
    let text: string
    try {
      // Looked up at each call: a global fetch that is replaced later counts.
      response = await (options.fetch ?? fetch)(base + path, request)
      text = await response.text()
    } catch (cause) {
      signal?.throwIfAborted()
      throw new SpillwayError('unreachable', `${base} does not answer`, { cause })
    }
    const answer = parseJson(text)
    if (response.ok && answer !== undefined) return { body: answer, headers: response.headers }
    throw errorOf(response, answer, base)
  }
}

function errorOf(response: Response, answer: unknown, base: string): SpillwayError {
  const told = { status: response.status, retryAfterMs: retryAfterMs(response.headers.get('retry-after')) }
  if (!isProblem(answer)) {
    return new SpillwayError('unexpected', `${base} answered ${response.status}, but not as Spillway does`, told)
  }
  return new SpillwayError(answer.code, `${answer.title}: ${answer.detail}`, { ...told, problem: answer })
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
