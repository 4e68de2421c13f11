import type { DeadLetterView, OperationView, ProblemDocument } from '@spillway/protocol/wire'

/** The server answered with a problem, or did not answer. */
export class ApiError extends Error {
  override readonly name = 'ApiError'
  /** The problem's code, `unreachable` if nothing answered, or `unexpected` if the answer is not Spillway's. */
  readonly code: string

  constructor(code: string, message: string, options?: ErrorOptions) {
    super(message, options)
    this.code = code
  }
}

export interface Page<T> {
  items: T[]
  next_cursor: string | null
  total?: number
}

export type Filter = Readonly<Record<string, string | undefined>>

export type Api = ReturnType<typeof createApi>

export interface ApiOptions {
  readonly url: string
  readonly key: string | null
  readonly fetch?: typeof fetch
}

/** Longer than the longest wait that the server grants (60 s). */
const answerTimeoutMs = 90_000

/** The only place with the routes that the `ops` and `dead-letters` commands use. */
export function createApi(options: ApiOptions) {
  const send = <T>(method: string, path: string, body?: unknown) => request<T>(options, method, path, body)
  const operation = (id: string) => `/api/v1/operations/${encodeURIComponent(id)}`
  return {
    listOperations: (filter: Filter) => send<Page<OperationView>>('GET', `/api/v1/operations${queryOf(filter)}`),
    showOperation: (id: string, wait?: string) => send<OperationView>('GET', `${operation(id)}${queryOf({ wait })}`),
    changeOperation: (id: string, action: 'retry' | 'cancel') => send<unknown>('POST', `${operation(id)}/${action}`),
    listDeadLetters: (filter: Filter) => send<Page<DeadLetterView>>('GET', `/api/v1/dead-letters${queryOf(filter)}`),
    showDeadLetter: (id: string) => send<DeadLetterView>('GET', `/api/v1/dead-letters/${encodeURIComponent(id)}`),
    /** By ids, or the next `limit` that match the filter, oldest first; `next_cursor` says where to continue. */
    redrive: (which: { ids: readonly string[] } | { filter: Filter; limit: number; cursor?: string }) =>
      send<{ moved: number; skipped: number; next_cursor?: string | null }>(
        'POST',
        '/api/v1/dead-letters/redrive',
        which,
      ),
    /** The next `limit` that match the filter. */
    purge: (filter: Filter, limit: number) =>
      send<{ purged: number }>('DELETE', `/api/v1/dead-letters${queryOf({ ...filter, limit: String(limit) })}`),
  }
}

function queryOf(filter: Filter): string {
  const query = new URLSearchParams()
  for (const [name, value] of Object.entries(filter)) if (value !== undefined) query.set(name, value)
  return query.size > 0 ? `?${query}` : ''
}

async function request<T>(options: ApiOptions, method: string, path: string, body: unknown): Promise<T> {
  const url = new URL(options.url.replace(/\/+$/u, '') + path)
  let response: Response
  let text: string
  try {
    response = await (options.fetch ?? fetch)(url, {
      method,
      headers: {
        accept: 'application/json',
        ...(body === undefined ? {} : { 'content-type': 'application/json' }),
        ...(options.key === null ? {} : { authorization: `Bearer ${options.key}` }),
      },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
      redirect: 'error',
      signal: AbortSignal.timeout(answerTimeoutMs),
    })
    text = await response.text()
  } catch (cause) {
    throw new ApiError(
      'unreachable',
      `no answer from ${url.origin}: is the server running? (--url gives another address)`,
      {
        cause,
      },
    )
  }
  const answer = parseJson(text)
  if (response.ok && answer !== undefined) return answer as T
  if (!isProblem(answer))
    throw new ApiError('unexpected', `${url.origin} answered ${response.status}, but not as a Spillway server does`)
  const { code, title, detail, errors = [], trace_id } = answer
  const hint = code === 'unauthenticated' ? ' (give a key with --key or SPILLWAY_API_KEY)' : ''
  const details = errors.map((one) => `\n  ${one.path}: ${one.message}`).join('')
  throw new ApiError(code, `${title}: ${detail}${hint}${details} [${code}, trace ${trace_id}]`)
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
