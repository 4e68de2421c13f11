/**
 *   asked ──head: has an id──► waiting (queued events) ──► chunks ──complete──► ended
 *     │ lost before the head: asked again with its key, which attaches to the same stream
 *     └ lost after it: resumed behind the last chunk │ error event ──► thrown
 */

import type { ProblemCode, StreamChunk, StreamComplete, StreamError, StreamQueued } from '@spillway/protocol/wire'
import { segment } from '../checks.js'
import { SpillwayError } from '../error.js'
import { calling, warnAbout } from '../hooks.js'
import type { Answer, Call, CallOptions } from '../http/call.js'
import { type KeyOptions, keyHeader } from '../idempotency.js'
import type { Waiting } from '../options.js'
import type { Parts } from '../resources.js'
import { jsonOf, type SseEvent } from '../sse/parser.js'
import { Reconnect, resuming } from '../sse/resuming.js'

export interface GenerateRequest {
  query: string
  model: string
  provider?: string
  /** Names the conversation; default: a new one. */
  threadId?: string
}

export interface GenerateOptions extends CallOptions, KeyOptions {
  /** For opening each connection, with its attempts and pauses. It does not limit how long the stream lasts. */
  deadlineMs?: number
  /** Called each time the position in the queue changes. Called in addition to the client's hook. */
  onQueued?(waiting: Waiting): void
  /** A connection that is silent for this long counts as dead. Default 45,000. */
  silentMs?: number
}

export interface ResumeOptions extends Omit<GenerateOptions, 'idempotencyKey' | 'onQueued'> {
  /** The `id` of the last chunk already received. Default: from the beginning. */
  after?: string
}

export interface GeneratedChunk {
  content: string
  /** From 0 on, without a gap or a repeat. */
  index: number
  /** The id to resume after. */
  id: string
  /** Null except on the last chunk. */
  finishReason: string | null
}

/** Starts when it is iterated, once. If the reader leaves early, the server continues for a while; `cancel()` stops it there. */
export interface Generation extends AsyncIterable<GeneratedChunk> {
  /** Null until the server has answered. */
  readonly streamId: string | null
  /** Null until it is complete. */
  readonly complete: StreamComplete | null
  /** The whole text. */
  text(): Promise<string>
  /** Stops it on the server. Its reader ends with `generation_cancelled`. */
  cancel(): Promise<void>
}

const service = 'generation'
/** These errors concern one reader; the stream itself continues. */
const resumable = new Set(['draining', 'stream_log_unavailable'])

export function generate(parts: Parts, request: GenerateRequest, options: GenerateOptions): Generation {
  const { threadId, ...body } = request
  const headers = { ...keyHeader(options), ...(threadId !== undefined && { 'x-thread-id': threadId }) }
  const ask: Call = {
    ...{ method: 'POST', path: '/api/v1/stream', body, headers, service },
    ...{ expects: [], isRepeatable: true, isStream: true },
    ...{ signal: options.signal, deadlineMs: options.deadlineMs },
  }
  return new Generating(parts, { ask, options, streamId: null, after: null })
}

export function resume(parts: Parts, streamId: string, options: ResumeOptions): Generation {
  return new Generating(parts, { ask: null, options, streamId, after: options.after ?? null })
}

interface Course {
  /** Null: the stream exists already. */
  ask: Call | null
  options: GenerateOptions
  streamId: string | null
  after: string | null
}

class Generating implements Generation {
  readonly #parts: Parts
  readonly #course: Course
  #streamId: string | null
  #complete: StreamComplete | null = null
  #next: number | null
  #isBegun = false
  #isCancelled = false
  /** A chunk is missing, so "nothing left" cannot be right. */
  #isShort = false

  constructor(parts: Parts, course: Course) {
    this.#parts = parts
    this.#course = course
    this.#streamId = course.streamId
    // The first chunk of a resumed stream says where it continues.
    this.#next = course.after === null ? 0 : null
  }

  get streamId(): string | null {
    return this.#streamId
  }

  get complete(): StreamComplete | null {
    return this.#complete
  }

  async text(): Promise<string> {
    let text = ''
    for await (const { content } of this) text += content
    return text
  }

  async cancel(): Promise<void> {
    this.#isCancelled = true
    // A request still under way is cancelled once its id is known.
    if (this.#streamId === null) return
    const path = `/api/v1/streams/${segment(this.#streamId)}/cancel`
    try {
      await this.#parts.send({ method: 'POST', path, service, expects: ['status'], isRepeatable: true })
    } catch (fault) {
      // Already finished, which is what the caller wants.
      if (!(fault instanceof SpillwayError && fault.code === 'operation_finished')) throw fault
    }
  }

  [Symbol.asyncIterator](): AsyncGenerator<GeneratedChunk, void, undefined> {
    if (this.#isBegun) throw new TypeError('a generation is read once')
    this.#isBegun = true
    const { clock, settings } = this.#parts
    const { signal, silentMs } = this.#course.options
    return resuming(
      {
        ...{ clock, signal, silentMs, logger: settings.logger, fruitlessMax: settings.attemptsMax },
        lastEventId: this.#course.after,
        open: (lastEventId) => this.#open(lastEventId),
        isOver: () => false,
      },
      (event) => this.#take(event),
    )
  }

  async #open(lastEventId: string | null): Promise<Answer> {
    const { ask, options } = this.#course
    if (this.#isCancelled && this.#streamId === null) throw cancelled()
    const answer =
      this.#streamId === null && ask !== null
        ? await this.#parts.send(ask)
        : await this.#parts.send({
            method: 'GET',
            path: `/api/v1/streams/${segment(this.#streamId ?? '')}`,
            ...(lastEventId !== null && { headers: { 'last-event-id': lastEventId } }),
            ...{ service, expects: this.#isShort ? [] : [''], isRepeatable: true, isStream: true },
            ...{ signal: options.signal, deadlineMs: options.deadlineMs },
          })
    this.#streamId ??= answer.headers.get('x-stream-id')
    if (this.#isCancelled) await this.cancel()
    return answer
  }

  /** Null: it has ended. */
  #take({ event, data, id }: SseEvent): GeneratedChunk[] | Reconnect | null {
    switch (event) {
      case 'status':
        // For when the header cannot be read, for example in a page whose proxy does not expose it.
        this.#streamId ??= jsonOf<{ stream_id: string }>(data).stream_id
        return []
      case 'queued':
        this.#reportQueued(jsonOf<StreamQueued>(data))
        return []
      case 'chunk':
        return this.#chunk(jsonOf<StreamChunk>(data), id)
      case 'complete':
        return this.#end(jsonOf<StreamComplete>(data))
      case 'error': {
        const { message, code, retryable } = jsonOf<StreamError>(data)
        if (resumable.has(code)) return new Reconnect(message)
        throw new SpillwayError(code as ProblemCode, message, { status: 200, retryable })
      }
      default:
        return []
    }
  }

  #chunk({ content, chunk_index: index, finish_reason }: StreamChunk, id: string | null): GeneratedChunk[] | Reconnect {
    const expected = this.#next ?? index
    // The server never sends a chunk twice; a proxy that repeats a request might.
    if (index < expected) return []
    if (index > expected) return this.#missing(expected)
    this.#next = index + 1
    this.#isShort = false
    return [{ content, index, id: id ?? '', finishReason: finish_reason }]
  }

  #end(complete: StreamComplete): Reconnect | null {
    const count = this.#next ?? complete.chunk_count
    if (complete.chunk_count !== count) return this.#missing(count)
    this.#complete = complete
    return null
  }

  #missing(index: number): Reconnect {
    this.#isShort = true
    return new Reconnect(`chunk ${index} is missing`)
  }

  #reportQueued({ position, eta_seconds: etaSeconds }: StreamQueued): void {
    const waiting = { id: this.#streamId ?? '', position, etaSeconds }
    const { hooks, logger } = this.#parts.settings
    hooks.onQueued(waiting)
    calling(() => this.#course.options.onQueued?.(waiting), warnAbout(logger))
  }
}

function cancelled(): SpillwayError {
  return new SpillwayError('generation_cancelled', 'The generation was cancelled.', { attempts: 0, retryable: false })
}
