/** A generation as it waits in the queue: all that whoever runs it needs to know. */
import { type OpenAiError, type ProblemCode, problems } from '@spillway/protocol/wire'
import { withoutRepeated } from 'spillway/workload'
import Type, { type Static } from 'typebox'

export const Generation = Type.Object({
  format: Type.Union([Type.Literal('openai'), Type.Literal('native')]),
  /** An OpenAI chat body as JSON text, as it is sent on. A string: an object would not keep its numbers. */
  chat: Type.String(),
  stream: Type.Boolean(),
  /** The stream ends with a chunk that tells the usage. */
  usage: Type.Boolean(),
  threadId: Type.String(),
  /** Partition of its lane. */
  lane: Type.String(),
  /** If it has to wait for its turn: from acceptance to the first token, so long at most. */
  waitMs: Type.Number(),
  /** How long its caller waits for the whole of it; null: it did not say, or reads it as a stream. */
  patienceMs: Type.Union([Type.Number(), Type.Null()]),
  /** Of the process whose client reads it. */
  watcher: Type.String(),
  /** Names the place in the pool that is given back when it has run; only that process knows it. */
  place: Type.Union([Type.String(), Type.Null()]),
})
export type Generation = Static<typeof Generation>

export type Format = Generation['format']

/**
 * A chat body as it is carried, and what we read of it. Of members with one name the last is sent, as it was read here:
 * an upstream that reads the first would be asked something else.
 */
export function carriedChat(
  body: Readonly<Record<string, unknown>>,
  text: string = JSON.stringify(body),
): Pick<Generation, 'chat' | 'stream' | 'usage'> {
  const usage = Object(body.stream_options).include_usage === true
  return { chat: withoutRepeated(text), stream: body.stream === true, usage }
}

/** What became of a generation: the result of its operation. */
export interface Generated {
  chunk_count: number
  total_length: number
  finish_reason: string | null
  duration_ms: number
}

/** Why there was none: the result of a failed operation, and what its caller is told. */
export interface Failure {
  status: number
  retry_after_ms: number | null
  retryable: boolean
  error: OpenAiError
}

/** A fault of ours, in the shape that OpenAI's clients read. */
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

/** What an end that is no proper one says in the log, for a caller who is told it by a status. */
export function toldFailure(text: string): Failure {
  const told = JSON.parse(text)
  const { message, code }: OpenAiError = told.error ?? told
  const status = code !== null && code in problems ? problems[code as ProblemCode].status : 502
  return { ...failure(code ?? 'upstream_error', status, message), ...(told.error && { error: told.error }) }
}

export const failures = {
  interrupted: failure(
    'stream_interrupted',
    503,
    'The process that generated this answer was lost. What came so far is all there is; ask again.',
  ),
  /** Not to be resumed, so that it has that code: there is nothing to come. */
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
