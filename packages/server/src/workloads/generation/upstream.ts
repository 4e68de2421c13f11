/** What generates text for us: any server that speaks OpenAI's chat API, or the demo model. */

import type { OpenAiError } from '@spillway/protocol/wire'

export type { OpenAiError } from '@spillway/protocol/wire'

/** The times that a generation may take; each is counted for itself. */
export interface UpstreamLimits {
  /** From the call until the first chunk with something in it. Not applied to `stream: false`, which has no first token. */
  firstTokenMs: number
  /** Of silence, from the first token on; counted only while somebody waits for more. */
  idleMs: number
  totalMs: number
}

export interface UpstreamRequest {
  /** An OpenAI chat body as JSON text. Sent on as it is, unknown members too. */
  chat: string
  /** What it says: the form that is asked for, and whether a stream tells its usage. */
  stream: boolean
  usage: boolean
  /** Handed on as Idempotency-Key. */
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
  readonly provider: 'demo' | 'openai'
  /**
   * All chunks that came since the last pull, in order; ends after `[DONE]`. The first batch has something in it: chunks
   * that only name the role are kept back until then, so that a fault before the first token leaves nothing behind.
   *
   * Throws `UpstreamFault`. When `signal` fires, the connection is torn down at once and the signal's reason is thrown; so is
   * it torn down when the iterator is left early. `onHeaders` is called when the upstream has said 2xx.
   */
  generate(
    request: UpstreamRequest,
    limits: UpstreamLimits,
    signal: AbortSignal,
    onHeaders?: () => void,
  ): AsyncIterable<readonly UpstreamChunk[]>
  /** OpenAI's list object, as the upstream has it; kept for a minute. Throws `UpstreamFault`. */
  models(): Promise<unknown>
  /** Null: it exists as far as is known. Only the demo model knows its names. */
  unknownModel(model: string): OpenAiError | null
  /** Running generations are torn down. */
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
  /** The upstream's own words, already safe to hand on; without them the caller is told `message`. */
  error?: OpenAiError
  cause?: unknown
}

export class UpstreamFault extends Error {
  override readonly name = 'UpstreamFault'
  readonly code: UpstreamFaultCode
  /** What the upstream answered, where it did. */
  readonly status: number | null
  /** Whether the same request may succeed later. Only meaningful before the first chunk. */
  readonly retryable: boolean
  /** When, where the upstream has said so. */
  readonly retryAfterMs: number | null
  /** What a caller may be told: never the key, never an internal address. */
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
