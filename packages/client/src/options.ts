import { mergedHeaders, number } from './checks.js'
import type { SpillwayError } from './error.js'
import { safeHooks, safeLogger } from './hooks.js'
import type { RetryBudgetOptions } from './policy/retry-budget.js'
import type { ThrottleOptions } from './policy/throttle.js'

/** `return`: a 202 is the answer. `poll`: the client waits, and the result is the answer. */
export type QueuedOperationBehavior = 'return' | 'poll'

export interface RetryOptions {
  /** How often a request is sent, at most. Default 10; 1: once. */
  attempts?: number
  /** The longest Retry-After to honor, and the longest back-off. Default 30,000. */
  maxRetryDelayMs?: number
  /** Default true. */
  retryOn429?: boolean
  /** Default true. False: its own back-off only. */
  honorRetryAfter?: boolean
  /** False: unlimited. */
  budget?: RetryBudgetOptions | false
}

export interface Retrying {
  method: string
  path: string
  /** How often it was sent so far. */
  attempts: number
  delayMs: number
  error: SpillwayError
}

/** A request was queued. */
export interface Waiting {
  /** The id of the operation or of the stream. */
  id: string
  /** 0: the next. */
  position: number
  etaSeconds: number
}

export interface Hooks {
  /** Called before each pause. */
  onRetry?(retrying: Retrying): void
  /** Called with each 202, and each time the position of a waiting stream changes. */
  onQueued?(waiting: Waiting): void
}

/** `console` is one. */
export interface Logger {
  debug(message: string, fields: Record<string, unknown>): void
  warn(message: string, fields: Record<string, unknown>): void
}

export interface ClientOptions {
  /** The server's address, e.g. `http://127.0.0.1:7745`; a path prefix is kept. */
  baseUrl?: string
  /** Several addresses, the preferred one first. */
  baseUrls?: readonly string[]
  /** An API key or a JWT, sent as Bearer; or a function that returns one, called before each request. */
  token?: string | (() => string | Promise<string>)
  /** The same as `token`. */
  key?: string
  /** The caller, for a server without authentication: `X-User-ID`. */
  identity?: string
  /** Sent with each request. They override `token` and `identity`, but not the headers of the call itself. */
  headers?: Record<string, string>
  /** Default: the global one. */
  fetch?: typeof fetch
  /** For a call with all its attempts and pauses. Default 30,000. */
  deadlineMs?: number
  /** For the answer to one attempt, in addition to the time the server was asked to wait. Default 10,000. */
  attemptTimeoutMs?: number
  retry?: RetryOptions
  /** False: everything is sent. */
  throttle?: ThrottleOptions | false
  /** Default `return`. */
  queuedOperationBehavior?: QueuedOperationBehavior
  hooks?: Hooks
  /** Silent by default. */
  logger?: Logger
  /** The same as `retry.retryOn429`. */
  retryOn429?: boolean
  /** The same as `retry.honorRetryAfter`. */
  honorRetryAfter?: boolean
  /** The same as `retry.maxRetryDelayMs`. */
  maxRetryDelay?: number
}

export interface Settings {
  bases: string[]
  token: string | (() => string | Promise<string>) | undefined
  /** Without the token. */
  headers: Record<string, string>
  fetch: typeof fetch | undefined
  deadlineMs: number
  attemptTimeoutMs: number
  attemptsMax: number
  maxRetryDelayMs: number
  retryOn429: boolean
  honorRetryAfter: boolean
  budget: RetryBudgetOptions | false
  throttle: ThrottleOptions | false
  whenQueued: QueuedOperationBehavior
  hooks: Required<Hooks>
  logger: Logger
}

const silent: Logger = { debug: () => undefined, warn: () => undefined }

export function settingsOf(options: ClientOptions): Settings {
  const { retry = {}, identity, baseUrl, baseUrls = [] } = options
  const bases = baseUrls.length > 0 || baseUrl === undefined ? baseUrls : [baseUrl]
  if (bases.length === 0) throw new TypeError('baseUrl, or baseUrls, is required')
  const logger = safeLogger(options.logger ?? silent)
  return {
    bases: bases.map(checkedBase),
    token: options.token ?? options.key,
    headers: mergedHeaders(identity === undefined ? {} : { 'x-user-id': identity }, options.headers ?? {}),
    fetch: options.fetch,
    deadlineMs: number('deadlineMs', options.deadlineMs ?? 30_000, 1),
    attemptTimeoutMs: number('attemptTimeoutMs', options.attemptTimeoutMs ?? 10_000, 1),
    attemptsMax: number('retry.attempts', retry.attempts ?? 10, 1),
    maxRetryDelayMs: number('maxRetryDelay', retry.maxRetryDelayMs ?? options.maxRetryDelay ?? 30_000),
    retryOn429: retry.retryOn429 ?? options.retryOn429 ?? true,
    honorRetryAfter: retry.honorRetryAfter ?? options.honorRetryAfter ?? true,
    budget: checkedNumbers('retry.budget', retry.budget ?? {}),
    throttle: checkedNumbers('throttle', options.throttle ?? {}),
    whenQueued: options.queuedOperationBehavior ?? 'return',
    hooks: safeHooks(options.hooks ?? {}, logger),
    logger,
  }
}

/** Errors do not quote the given URL: it may contain a password. */
function checkedBase(given: string): string {
  // Older browsers lack URL.canParse.
  try {
    const { protocol, username, password, href } = new URL(given)
    const isPlain = /^https?:$/.test(protocol) && username + password === '' && !/[?#]/.test(given)
    if (isPlain) return href.replace(/\/+$/, '')
  } catch {
    // Reported below, like any other invalid URL.
  }
  throw new TypeError('baseUrl must be an http(s) URL without credentials, query and fragment')
}

function checkedNumbers<T extends object | false>(name: string, given: T): T {
  for (const [member, value] of Object.entries(given)) number(`${name}.${member}`, value ?? 0)
  return given
}
