/**
 * Runs a generation, wherever it was accepted.
 *
 *   opened ──log has an end──► nothing to do (an earlier attempt reached it, and was not settled)
 *      │────log has chunks──► ended with an error: a second sample is never spliced to the first
 *      └──► upstream asked ──chunks, each in the log before anyone sees it──► done
 *              │ transient fault before the first chunk ──► retried by any free process
 *              │ any other fault, too long ──► ended with an error
 *              │ cancelled, or nobody reads it ──► ended as cancelled
 *              └ lease lost ──► writes nothing more: the new owner ends it
 *
 * Crash points: before the first record is durable the generation is run again; after it, the next attempt ends the
 * stream.
 */
import type { EndKind, StreamEntry, StreamWriter } from 'spillway/workload'
import { FailOperation, LogFault, OperationAborted, RetryOperation, type RunContext } from 'spillway/workload'
import { releasePermit } from './admission.js'
import { forms } from './forms.js'
import type { GenerationDeps } from './index.js'
import { type Failure, type Format, failure, failures, type Generated, type Generation } from './request.js'
import type { Written } from './stream-logs.js'
import { type OpenAiError, UpstreamFault, type UpstreamLimits } from './upstream.js'

/** How often to try writing an end while a process that lost its lease still writes. */
const endTriesMax = 10

export class Handler {
  readonly #deps: GenerationDeps
  readonly #running = new Map<string, { generation: Generation; stop: AbortController }>()

  constructor(deps: GenerationDeps) {
    this.#deps = deps
  }

  /** Ids of the generations running here. */
  get running(): readonly string[] {
    return [...this.#running.keys()]
  }

  has(id: string): boolean {
    return this.#running.has(id)
  }

  formatOf(id: string): Generation['format'] | undefined {
    return this.#running.get(id)?.generation.format
  }

  /** Nobody reads it: ended as if cancelled. */
  abandon(id: string): void {
    this.#running.get(id)?.stop.abort(abandoned)
  }

  async run(generation: Generation, context: RunContext): Promise<Generated> {
    const stop = new AbortController()
    this.#running.set(context.id, { generation, stop })
    const pass = (): void => stop.abort(context.signal.reason)
    if (context.signal.aborted) pass()
    else context.signal.addEventListener('abort', pass, { once: true })
    try {
      return await this.#generate(generation, context, stop.signal)
    } finally {
      context.signal.removeEventListener('abort', pass)
      this.#running.delete(context.id)
      if (generation.place !== null) releasePermit(this.#deps, generation.place)
    }
  }

  async #generate(generation: Generation, context: RunContext, signal: AbortSignal): Promise<Generated> {
    const { intake, logs, permits } = this.#deps
    const { format, threadId, watcher, place } = generation
    const { id, identity } = context
    const direct = place !== null && permits.has(place)
    const entry = await logs.open({ id, identity, format, threadId, watcher, direct }, direct && context.attempt === 1)
    if (entry.ended !== null) return nothingNew
    const head = entry.created ? nothingYet : await logs.headOf(entry)
    const log = logs.writerOf(entry)
    // A lost or unreachable log cannot be continued: readers may have chunks from it. It may also be that it started with
    // Redis, which is no longer configured.
    if (typeof head === 'string' || log === undefined) {
      await logs.registry.ended(id, 'error')
      return fail(failures.logLost)
    }
    if (head.end !== null) return nothingNew
    if (head.last > 0) return this.#refuseSecondSample(entry, generation)
    const writer = log.open(entry.key, 0, { ring: watcher !== intake.instance })
    return new Attempted(this.#deps, { entry, generation, context, signal, writer }).run()
  }

  async #refuseSecondSample(entry: StreamEntry, { format }: Generation): Promise<Generated> {
    const { logs } = this.#deps
    const text = forms[format].failed(failures.interrupted)
    for (let tries = 0; tries < endTriesMax; tries++) {
      const { last, end } = (await logs.currentHead(entry)) ?? nothingYet
      if (end !== null) return nothingNew
      const written = await logs.endAt(entry, last, 'error', text)
      if (written === 'written') fail(failures.interrupted)
      if (written === 'failed') break
    }
    throw new RetryOperation('The end of the stream could not be written.')
  }
}

/** Its clients left; nobody requested the cancellation. */
const abandoned = new OperationAborted('cancelled')

const nothingYet = { last: 0, end: null }
const nothingNew: Generated = { chunk_count: 0, total_length: 0, finish_reason: null, duration_ms: 0 }

function fail(why: Failure): never {
  throw new FailOperation(why.error.message, { result: why })
}

interface AttemptOptions {
  entry: StreamEntry
  generation: Generation
  context: RunContext
  signal: AbortSignal
  writer: StreamWriter
}

/** One attempt at a stream without chunks. */
class Attempted {
  readonly #deps: GenerationDeps
  readonly #o: AttemptOptions
  readonly #form: (typeof forms)[Format]
  readonly #startedAt = performance.now()
  #hasToken = false
  #chunks = 0
  #characters = 0
  #finishReason: string | null = null

  constructor(deps: GenerationDeps, options: AttemptOptions) {
    this.#deps = deps
    this.#o = options
    this.#form = forms[options.generation.format]
  }

  async run(): Promise<Generated> {
    if (this.#leftMs() <= 0) return this.#endWith(this.#queueTimeout())
    try {
      await this.#pull()
    } catch (fault) {
      return await this.#ended(fault)
    }
    const durationMs = performance.now() - this.#startedAt
    const { threadId } = this.#o.generation
    const totals = { threadId, chunks: this.#chunks, characters: this.#characters, durationMs }
    const written = await this.#end('done', this.#form.done(totals))
    if (written !== 'written') return this.#logGone(written)
    return {
      chunk_count: this.#chunks,
      total_length: this.#characters,
      finish_reason: this.#finishReason,
      duration_ms: Math.round(durationMs),
    }
  }

  async #pull(): Promise<void> {
    const { upstream, metrics } = this.#deps
    const { context, generation, signal, writer } = this.#o
    const { chat, stream, usage } = generation
    const request = { chat, stream, usage, operationId: context.id, traceparent: context.traceparent }
    for await (const chunks of upstream.generate(request, this.#limits(), signal)) {
      if (!this.#hasToken) {
        this.#hasToken = true
        metrics.firstToken.observe(this.#ageMs / 1_000)
      }
      for (const chunk of chunks) {
        const text = this.#form.chunk(chunk, this.#chunks)
        if (text === null) continue
        writer.push(text)
        this.#chunks++
        this.#characters += codePoints(chunk.content)
        this.#finishReason = chunk.finishReason ?? this.#finishReason
      }
      const full = writer.drained()
      if (full !== null) await full
      if (writer.gone !== null) throw new LogFault(`the stream is ${writer.gone}`)
    }
    signal.throwIfAborted()
  }

  /** Time since acceptance, by the database clock. */
  get #ageMs(): number {
    return this.#o.entry.ageMs + performance.now() - this.#startedAt
  }

  /** Limit from acceptance to the first token, over all attempts: the promised wait if queued, else the configured limits. */
  get #mayWaitMs(): number {
    const { firstTokenSeconds, totalSeconds } = this.#deps.settings
    if (!this.#o.entry.direct) return this.#o.generation.waitMs
    return Math.min(firstTokenSeconds * 1_000, totalSeconds * 1_000, this.#patienceMs)
  }

  get #patienceMs(): number {
    return this.#o.generation.patienceMs ?? Number.POSITIVE_INFINITY
  }

  #leftMs(): number {
    return this.#mayWaitMs - this.#ageMs
  }

  /** Limits of this attempt, without the time used by earlier ones. */
  #limits(): UpstreamLimits {
    const { firstTokenSeconds, idleSeconds, totalSeconds } = this.#deps.settings
    const ageMs = this.#ageMs
    const totalMs = totalSeconds * 1_000
    const endMs = Math.min(this.#o.entry.direct ? totalMs - ageMs : totalMs, this.#patienceMs - ageMs)
    return {
      firstTokenMs: Math.min(firstTokenSeconds * 1_000, this.#mayWaitMs - ageMs),
      idleMs: idleSeconds * 1_000,
      totalMs: Math.max(1, endMs),
    }
  }

  #queueTimeout(): Failure {
    return failures.queueTimeout(Math.round(this.#mayWaitMs / 1_000))
  }

  async #ended(fault: unknown): Promise<Generated> {
    // Set by a refused push or by a look at the log.
    const { gone } = this.#o.writer
    if (gone !== null) return this.#logGone(gone)
    if (this.#o.signal.aborted) return this.#aborted(this.#o.signal.reason)
    if (!(fault instanceof UpstreamFault)) {
      this.#deps.log.error({ err: fault, operation: this.#o.context.id }, 'a generation failed')
      return this.#endWith(failure('internal_error', 500, 'Something went wrong here; it was logged.'))
    }
    const asked = this.#againIn(fault)
    if (asked !== null) {
      this.#o.writer.close()
      this.#deps.metrics.failedOver('upstream_retry')
      throw new RetryOperation(fault.error.message, { ...(asked > 0 && { afterMs: asked }), cause: fault })
    }
    if (fault.code === 'upstream_timeout' && this.#ageMs >= this.#patienceMs) return this.#endWith(failures.impatient)
    const status = statusOf(fault)
    return this.#endWith({
      status,
      retry_after_ms: fault.retryAfterMs,
      retryable: fault.retryable,
      error: openAiErrorOf(fault),
    })
  }

  /** Null: no retry. 0: after the usual backoff. */
  #againIn(fault: UpstreamFault): number | null {
    if (!fault.retryable || this.#chunks > 0 || this.#o.context.attempt >= this.#o.context.maxAttempts) return null
    const { failoverEnabled, failoverBaseDelayMs } = this.#deps.settings
    if (!failoverEnabled) return null
    const asked = fault.retryAfterMs ?? 0
    return this.#leftMs() > Math.max(asked, failoverBaseDelayMs) ? asked : null
  }

  async #aborted(reason: unknown): Promise<Generated> {
    const code = reason instanceof OperationAborted ? reason.code : 'cancelled'
    switch (code) {
      case 'cancelled':
        await this.#cancelled(reason === abandoned)
        throw new OperationAborted('cancelled')
      case 'timeout':
        return this.#endWith(failures.tooLong)
      case 'stopping':
        // Ended now, while its readers may still be connected. A stream without chunks is run by another process.
        if (this.#chunks > 0) await this.#end('error', this.#form.failed(failures.interrupted))
        else this.#o.writer.close()
        throw new OperationAborted('stopping')
      case 'lease_lost':
        this.#o.writer.close()
        throw new OperationAborted('lease_lost')
    }
  }

  /** A client that left before the first chunk may come back with its key; so may one whose promised time is over. */
  #cancelled(isAbandoned: boolean): Promise<Written> {
    const { failed } = this.#form
    if (this.#chunks > 0) return this.#end('cancelled', failed(failures.cancelled))
    if (this.#leftMs() <= 0) return this.#end('unbegun', failed(this.#queueTimeout()))
    return this.#end(isAbandoned ? 'unbegun' : 'cancelled', failed(failures.cancelled))
  }

  /** Another process has the stream, or its log does not answer. */
  async #logGone(why: 'lost' | 'failed'): Promise<Generated> {
    this.#o.writer.close()
    const { key, log } = this.#o.entry
    const isGone = why === 'failed' || (await this.#deps.logs.isGone(this.#o.entry))
    // The process that owns it in the queue finds the existing chunks and ends it.
    if (!isGone) throw new OperationAborted('lease_lost')
    const again = new RetryOperation('The log of the stream did not answer.', { result: failures.logAway })
    if (log === 'postgres') throw again
    const { written, ring } = this.#o.writer
    if (written > 0 || ring) {
      await this.#deps.logs.registry.ended(key.id, written > 0 ? 'error' : 'unbegun')
      return fail(failures.logLost)
    }
    // Nobody can have read it: a remote reader would have needed a notification, and we notify the local ones.
    await this.#deps.logs.registry.moved(key.id, 'postgres')
    this.#deps.logs.relay.lost(key.id)
    throw again
  }

  async #endWith(why: Failure): Promise<Generated> {
    const kind = why.retryable && this.#chunks === 0 ? 'unbegun' : 'error'
    const written = await this.#end(kind, this.#form.failed(why))
    if (written !== 'written') return this.#logGone(written)
    return fail(why)
  }

  async #end(kind: EndKind, text: string): Promise<Written> {
    const written = await this.#o.writer.end(kind, text)
    if (written !== 'written') return written
    this.#deps.metrics.ended(kind === 'unbegun' ? 'error' : kind)
    if (this.#o.entry.log === 'postgres') return written
    try {
      await this.#deps.logs.registry.ended(this.#o.entry.key.id, kind)
    } catch (fault) {
      // The record has the end too; without this note the entry is only kept a little longer.
      this.#deps.log.warn({ err: fault, stream: this.#o.entry.key.id }, 'could not record the end of a stream')
    }
    return written
  }
}

function codePoints(text: string): number {
  let count = 0
  for (const _ of text) count++
  return count
}

/** The upstream's own error unchanged; for faults we detected, a code from the documented list. */
function openAiErrorOf({ code, error }: UpstreamFault): OpenAiError {
  if (error.code !== code || code === 'upstream_rejected' || code === 'upstream_timeout') return error
  return { ...error, code: code === 'upstream_overloaded' ? 'overloaded' : 'upstream_error' }
}

/** The status for the caller: the upstream's own if it refused the request, else ours. */
function statusOf(fault: UpstreamFault): number {
  switch (fault.code) {
    case 'upstream_rejected':
      return fault.status ?? 400
    case 'upstream_timeout':
      return 504
    case 'upstream_overloaded':
      return 503
    default:
      return 502
  }
}
