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

export interface Api {
  listOperations(filter: Filter): Promise<Page<OperationView>>
  showOperation(id: string, waitSeconds?: string): Promise<OperationView>
  retryOperation(id: string): Promise<unknown>
  cancelOperation(id: string): Promise<unknown>
  listDeadLetters(filter: Filter): Promise<Page<DeadLetterView>>
  showDeadLetter(id: string): Promise<DeadLetterView>
  /** By ids, or the next `limit` that match the filter, oldest first; `next_cursor` says where to continue. */
  redrive(
    which: { ids: readonly string[] } | { filter: Filter; limit: number; cursor?: string },
  ): Promise<{ moved: number; skipped: number; next_cursor?: string | null }>
  /** The next `limit` that match the filter. */
  purge(filter: Filter, limit: number): Promise<{ purged: number }>
}

export interface ApiOptions {
  readonly url: string
  readonly key: string | null
  readonly fetch?: typeof fetch
}

/** Longer than the longest wait that the server grants (60 s). */
const answerTimeoutMs = 90_000

/** The only place with the routes that the `ops` and `dead-letters` commands use. */
export function createApi(options: ApiOptions): Api {
  const send = <T>(method: string, path: string, body?: unknown) => request<T>(options, method, path, body)
  const operation = (id: string) => `/api/v1/operations/${encodeURIComponent(id)}`
  return {
    listOperations: (filter) => send('GET', `/api/v1/operations${queryOf(filter)}`),
    showOperation: (id, wait) => send('GET', `${operation(id)}${queryOf({ wait })}`),
    retryOperation: (id) => send('POST', `${operation(id)}/retry`),
    cancelOperation: (id) => send('POST', `${operation(id)}/cancel`),
    listDeadLetters: (filter) => send('GET', `/api/v1/dead-letters${queryOf(filter)}`),
    showDeadLetter: (id) => send('GET', `/api/v1/dead-letters/${encodeURIComponent(id)}`),
    redrive: (which) => send('POST', '/api/v1/dead-letters/redrive', which),
    purge: (filter, limit) => send('DELETE', `/api/v1/dead-letters${queryOf({ ...filter, limit: String(limit) })}`),
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
  const problem = isProblem(answer) ? answer : null
  if (problem === null)
    throw new ApiError('unexpected', `${url.origin} answered ${response.status}, but not as a Spillway server does`)
  const hint = problem.code === 'unauthenticated' ? ' (give a key with --key or SPILLWAY_API_KEY)' : ''
  const details = (problem.errors ?? []).map((one) => `\n  ${one.path}: ${one.message}`).join('')
  throw new ApiError(
    problem.code,
    `${problem.title}: ${problem.detail}${hint}${details} [${problem.code}, trace ${problem.trace_id}]`,
  )
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
