/** A generation in the queue: everything needed to run it. */
import { type OpenAiError, type ProblemCode, problems } from '@spillway/protocol/wire'
import { withoutRepeated } from 'spillway/workload'
import Type, { type Static } from 'typebox'

export const Generation = Type.Object({
  format: Type.Union([Type.Literal('openai'), Type.Literal('native')]),
  /** An OpenAI chat body as JSON text, sent unchanged. A string, because an object would not keep its numbers exact. */
  chat: Type.String(),
  stream: Type.Boolean(),
  /** The stream ends with a chunk that contains the usage. */
  usage: Type.Boolean(),
  threadId: Type.String(),
  /** The lane's partition. */
  lane: Type.String(),
  /** If queued: maximum time from acceptance to the first token. */
  waitMs: Type.Number(),
  /** How long the caller waits for the whole answer; null: unknown, or it reads a stream. */
  patienceMs: Type.Union([Type.Number(), Type.Null()]),
  /** The process whose client reads it. */
  watcher: Type.String(),
  /** The name of its permit, to release when it has run; only its process knows it. */
  place: Type.Union([Type.String(), Type.Null()]),
})
export type Generation = Static<typeof Generation>

export type Format = Generation['format']

/**
 * The chat body to send, and the members we read. Of duplicate members the last is sent, the one we read: an upstream
 * that reads the first would get a different request.
 */
export function carriedChat(
  body: Readonly<Record<string, unknown>>,
  text: string = JSON.stringify(body),
): Pick<Generation, 'chat' | 'stream' | 'usage'> {
  const usage = Object(body.stream_options).include_usage === true
  return { chat: withoutRepeated(text), stream: body.stream === true, usage }
}

/** The result of a generation's operation. */
export interface Generated {
  chunk_count: number
  total_length: number
  finish_reason: string | null
  duration_ms: number
}

/** The result of a failed operation, and what its caller gets. */
export interface Failure {
  status: number
  retry_after_ms: number | null
  retryable: boolean
  error: OpenAiError
}

/** Our own error, in the shape that OpenAI's clients read. */
export function failure(
  code: string,
  status: number,
  message: string,
  options: { retryable?: boolean; retryAfterMs?: number | null } = {},
): Failure {
  return {
    status,
    retry_after_ms: options.retryAfterMs ?? null,
    retryable: options.retryable ?? status >= 500,
    error: { message, type: status >= 500 ? 'server_error' : 'invalid_request_error', param: null, code },
  }
}

/** Reads an error end from the log, for a caller that gets it as a status. */
export function failureOf(text: string): Failure {
  const value = JSON.parse(text)
  const { message, code }: OpenAiError = value.error ?? value
  const status = code !== null && code in problems ? problems[code as ProblemCode].status : 502
  return { ...failure(code ?? 'upstream_error', status, message), ...(value.error && { error: value.error }) }
}

export const failures = {
  interrupted: failure(
    'stream_interrupted',
    503,
    'The process that generated this answer was lost. What came so far is all there is; ask again.',
  ),
  /** Has this code because it cannot be resumed: nothing more will come. */
  logLost: failure(
    'stream_interrupted',
    503,
    'The log that kept this answer was lost. What came so far is all there is; ask again.',
  ),
  queueTimeout: (seconds: number): Failure =>
    failure('queue_timeout', 503, `No capacity became free within ${seconds} s. Try again later.`, {
      retryAfterMs: 5_000,
    }),
  cancelled: failure('generation_cancelled', 410, 'The generation was cancelled.', { retryable: false }),
  tooLong: failure('upstream_timeout', 504, 'The generation took longer than it may.'),
  impatient: failure('upstream_timeout', 504, 'The generation took longer than you wait for it. Ask again.'),
  logAway: failure(
    'stream_log_unavailable',
    503,
    'The log of this stream does not answer. Ask again, or resume it later.',
    { retryAfterMs: 2_000 },
  ),
  draining: failure('draining', 503, 'This instance is shutting down. Resume the stream elsewhere.', {
    retryAfterMs: 1_000,
  }),
} as const
