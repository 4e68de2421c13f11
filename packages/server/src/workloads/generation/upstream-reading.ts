/**
 * One call to an upstream, from the request to the last byte.
 *
 *   asked ──2xx──► answering ──[DONE], or the end of the body──► ended
 *     │               │
 *     └───────────────┴──refusal, fault, limit, abort──► failed: the connection is closed
 *
 * Bytes are parsed as they arrive and taken in batches; when more chunks wait than a batch should hold, reading from
 * the socket pauses. It uses undici's bare dispatch: a body stream and its iterator cost more per token than the
 * parsing.
 */
import type { Dispatcher } from 'undici'
import { malformed, type UpstreamChunk, UpstreamFault, type UpstreamLimits, type UpstreamRequest } from './upstream.js'
import { ChunkReader, type Conceal, completionAsChunks, wholeCompletion } from './upstream-chunks.js'
import { networkFault, refusalFault } from './upstream-refusal.js'

type Headers = Record<string, string | string[] | undefined>

/** The kind of body, by the answer's head. */
type Form =
  | { kind: 'events'; reader: ChunkReader }
  | { kind: 'whole' }
  | { kind: 'refusal'; status: number; retryAfter: string | string[] | undefined }

const refusalBytesMax = 65_536
const wholeBytesMax = 16_777_216
/** Reading pauses while this many chunks wait. */
const restingChunks = 256
const restingCharacters = 262_144
/** How long to wait for the body's end after [DONE], so that the connection can be reused. */
const lingerMs = 1_000

function isType(headers: Headers, type: string): boolean {
  const value = headers['content-type']
  return typeof value === 'string' && value.toLowerCase().startsWith(type)
}

export class Reading implements Dispatcher.DispatchHandler {
  readonly #request: UpstreamRequest
  readonly #idleMs: number
  readonly #conceal: Conceal
  readonly #timers: NodeJS.Timeout[] = []
  #idle: NodeJS.Timeout | null = null
  #firstToken: NodeJS.Timeout | null = null
  #controller: Dispatcher.DispatchController | null = null
  #form: Form | null = null
  #bytes: Buffer[] = []
  #byteCount = 0
  #batch: UpstreamChunk[] = []
  #batchCharacters = 0
  #waiter: { resolve(batch: readonly UpstreamChunk[] | null): void; reject(fault: unknown): void } | null = null
  /** Nothing more comes; `#failure` has the reason if it is not a proper end. */
  #isOver = false
  #failure: { reason: unknown } | null = null
  /** undici has finished: the connection is free or closed. */
  #isReleased = false

  constructor(request: UpstreamRequest, { firstTokenMs, idleMs, totalMs }: UpstreamLimits, conceal: Conceal) {
    this.#request = request
    this.#idleMs = idleMs
    this.#conceal = conceal
    this.#limit(totalMs, 'the upstream took longer than it may', false)
    if (request.stream) this.#firstToken = this.#limit(firstTokenMs, 'the upstream sent no token in time', true)
  }

  /** The chunks since the last call; null at the end. Throws a fault only after all chunks before it were taken. */
  next(): Promise<readonly UpstreamChunk[] | null> {
    if (this.#batch.length > 0) return Promise.resolve(this.#takeBatch())
    if (this.#failure !== null) return Promise.reject(this.#failure.reason)
    if (this.#isOver) return Promise.resolve(null)
    this.#idle?.refresh()
    return new Promise((resolve, reject) => {
      this.#waiter = { resolve, reject }
      if (this.#controller?.paused) this.#controller.resume()
    })
  }

  /** Aborts from our side and drops waiting chunks. */
  abort(reason: unknown): void {
    this.#batch = []
    if (this.#isOver) this.#failure = { reason }
    else this.#fail(reason)
  }

  /** Nobody reads any more. */
  stop(): void {
    const isDone = this.#isOver && this.#failure === null
    this.#over()
    if (this.#isReleased) return
    if (!isDone) this.#disconnect()
    else setTimeout(() => this.#disconnect(), lingerMs).unref()
  }

  onRequestStart(controller: Dispatcher.DispatchController): void {
    this.#controller = controller
    // It was abandoned while it waited for a connection.
    if (this.#isOver) this.#disconnect()
  }

  onResponseStart(_controller: Dispatcher.DispatchController, status: number, headers: Headers): void {
    if (status < 200) return
    if (status >= 300) {
      this.#form = { kind: 'refusal', status, retryAfter: headers['retry-after'] }
      return
    }
    const encoding = headers['content-encoding']
    if (encoding !== undefined && encoding !== 'identity') {
      this.#fail(malformed('the upstream sent a compressed answer, which was not asked for'))
      return
    }
    const { stream: isStream, operationId } = this.#request
    if (!isStream && isType(headers, 'text/event-stream')) {
      this.#fail(malformed('the upstream streams, which was not asked for'))
      return
    }
    // Some servers do not stream, or send an error with 200: their JSON is read as a whole.
    this.#form =
      !isStream || isType(headers, 'application/json')
        ? { kind: 'whole' }
        : { kind: 'events', reader: new ChunkReader(operationId, this.#conceal) }
  }

  onResponseData(controller: Dispatcher.DispatchController, bytes: Buffer): void {
    if (this.#isOver || this.#form === null) return
    this.#idle?.refresh()
    if (this.#form.kind === 'events') this.#events(this.#form.reader, bytes)
    else this.#collect(this.#form, bytes)
    // Data after [DONE] is read and dropped, so that the connection becomes free.
    if (this.#isOver) return
    if (this.#batch.length >= restingChunks || this.#batchCharacters >= restingCharacters) controller.pause()
  }

  onResponseEnd(): void {
    this.#isReleased = true
    if (this.#isOver || this.#form === null) return
    const form = this.#form
    this.#attempt(() => {
      if (form.kind === 'events') form.reader.end(this.#batch)
      else this.#whole(form, Buffer.concat(this.#bytes).toString())
    })
    if (this.#failure === null) this.#over()
    this.#hand()
  }

  onResponseError(_controller: Dispatcher.DispatchController, fault: Error): void {
    this.#isReleased = true
    const form = this.#form
    // Cut off within an error's body: the status is known.
    if (form?.kind === 'refusal') this.#attempt(() => this.#whole(form, ''))
    else this.#fail(networkFault(fault, form !== null))
  }

  #events(reader: ChunkReader, bytes: Buffer): void {
    const from = this.#batch.length
    this.#attempt(() => reader.read(bytes, this.#batch))
    for (let at = from; at < this.#batch.length; at++) this.#batchCharacters += this.#batch[at]?.text.length ?? 0
    if (reader.hasToken && this.#firstToken !== null) this.#hasBegun()
    if (reader.isDone) this.#over()
    this.#hand()
  }

  #hasBegun(): void {
    if (this.#firstToken !== null) clearTimeout(this.#firstToken)
    this.#firstToken = null
    this.#idle ??= this.#limit(this.#idleMs, 'the upstream fell silent', true, () => this.#waiter !== null)
  }

  #collect(form: Form, bytes: Buffer): void {
    if (form.kind === 'whole') this.#hasBegun()
    this.#bytes.push(Buffer.from(bytes))
    this.#byteCount += bytes.length
    if (form.kind === 'refusal') {
      if (this.#byteCount > refusalBytesMax) this.#attempt(() => this.#whole(form, null))
    } else if (this.#byteCount > wholeBytesMax) this.#fail(malformed('the upstream sent an answer that is too long'))
  }

  #whole(form: Form, body: string | null): void {
    const conceal = this.#conceal
    if (form.kind === 'refusal') throw refusalFault({ ...form, body, conceal })
    if (body === null || body.trim() === '') {
      throw new UpstreamFault('upstream_incomplete', 'the upstream gave an empty answer', { retryable: true })
    }
    const request = this.#request
    const chunks = request.stream ? completionAsChunks(body, request, conceal) : wholeCompletion(body, conceal)
    this.#batch.push(...chunks)
  }

  #attempt(read: () => void): void {
    try {
      read()
    } catch (fault) {
      this.#fail(fault)
    }
  }

  #fail(reason: unknown): void {
    if (this.#isOver) return
    this.#failure = { reason }
    this.#over()
    this.#disconnect()
    this.#hand()
  }

  #over(): void {
    this.#isOver = true
    for (const timer of this.#timers) clearTimeout(timer)
  }

  #disconnect(): void {
    if (!this.#isReleased) this.#controller?.abort(new Error('the call is over'))
  }

  /** Passes chunks to the waiting reader. */
  #hand(): void {
    const waiter = this.#waiter
    if (waiter === null) return
    if (this.#batch.length === 0 && !this.#isOver) return
    this.#waiter = null
    if (this.#batch.length > 0) waiter.resolve(this.#takeBatch())
    else if (this.#failure !== null) waiter.reject(this.#failure.reason)
    else waiter.resolve(null)
  }

  #takeBatch(): readonly UpstreamChunk[] {
    const batch = this.#batch
    this.#batch = []
    this.#batchCharacters = 0
    return batch
  }

  #limit(ms: number, message: string, retryable: boolean, counts = () => true): NodeJS.Timeout {
    const timer = setTimeout(() => {
      if (counts()) this.#fail(new UpstreamFault('upstream_timeout', message, { retryable }))
    }, ms)
    this.#timers.push(timer)
    return timer
  }
}
