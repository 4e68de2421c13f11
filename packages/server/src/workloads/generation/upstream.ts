/** A text generator: any server with OpenAI's chat API, or the demo model. */

import type { OpenAiError } from '@spillway/protocol/wire'

export type { OpenAiError } from '@spillway/protocol/wire'

/** Time limits of a generation; each applies separately. */
export interface UpstreamLimits {
  /** From the call to the first chunk with content. Not applied to `stream: false`, which has no first token. */
  firstTokenMs: number
  /** Silence after the first token; counted only while somebody waits for more. */
  idleMs: number
  totalMs: number
}

export interface UpstreamRequest {
  /** An OpenAI chat body as JSON text. Sent unchanged, including unknown members. */
  chat: string
  /** Whether the body asks for a stream, and whether that stream includes its usage. */
  stream: boolean
  usage: boolean
  /** Sent as Idempotency-Key. */
  operationId: string
  traceparent: string
}

export interface UpstreamChunk {
  /**
   * JSON of one chat.completion.chunk on one line, `id` and `created` constant over the stream; with `stream: false` the
   * whole chat.completion.
   */
  text: string
  /** choices[0].delta.content (`stream: false`: message.content), '' when there is none. */
  content: string
  finishReason: string | null
}

export interface Upstream {
  /**
   * All chunks since the last pull, in order; ends after `[DONE]`. The first batch has content: chunks that only name
   * the role are held until then, so that a fault before the first token leaves nothing behind.
   *
   * Throws `UpstreamFault`. When `signal` fires, it closes the connection at once and throws the signal's reason;
   * leaving the iterator early closes the connection too.
   */
  generate(
    request: UpstreamRequest,
    limits: UpstreamLimits,
    signal: AbortSignal,
  ): AsyncIterable<readonly UpstreamChunk[]>
  /** OpenAI's list object from the upstream; cached for a minute. Throws `UpstreamFault`. */
  models(): Promise<unknown>
  /** Null: it exists as far as known. Only the demo model knows its names. */
  unknownModel(model: string): OpenAiError | null
  /** Aborts running generations. */
  close(): Promise<void>
}

export type UpstreamFaultCode =
  | 'upstream_unreachable'
  | 'upstream_error'
  | 'upstream_rejected'
  | 'upstream_overloaded'
  | 'upstream_timeout'
  | 'upstream_incomplete'
  | 'upstream_malformed'

export interface UpstreamFaultFacts {
  status?: number
  /** Default false. */
  retryable?: boolean
  retryAfterMs?: number | null
  /** The upstream's own error, already safe to pass on; without it the caller gets `message`. */
  error?: OpenAiError
  cause?: unknown
}

export class UpstreamFault extends Error {
  override readonly name = 'UpstreamFault'
  readonly code: UpstreamFaultCode
  /** The upstream's status, if it answered. */
  readonly status: number | null
  /** Whether the same request may succeed later. Only meaningful before the first chunk. */
  readonly retryable: boolean
  /** When to retry, if the upstream said so. */
  readonly retryAfterMs: number | null
  /** The error for a caller: never contains the key or an internal address. */
  readonly error: OpenAiError

  constructor(code: UpstreamFaultCode, message: string, facts: UpstreamFaultFacts = {}) {
    super(message, facts.cause === undefined ? undefined : { cause: facts.cause })
    this.code = code
    this.status = facts.status ?? null
    this.retryable = facts.retryable ?? false
    this.retryAfterMs = facts.retryAfterMs ?? null
    this.error = facts.error ?? { message, type: 'upstream_error', param: null, code }
  }
}

export function malformed(message: string, facts: UpstreamFaultFacts = {}): UpstreamFault {
  return new UpstreamFault('upstream_malformed', message, facts)
}
