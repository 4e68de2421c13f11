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
import type { EndKind, StreamEntry, StreamLog, StreamWriter } from 'spillway/workload'
import { FailOperation, LogFault, OperationAborted, RetryOperation, type RunContext } from 'spillway/workload'
import type { Places } from './admission.js'
import { forms } from './forms.js'
import type { GenerationDeps } from './parts.js'
import { type Failure, failure, failures, type Generated, type Generation } from './request.js'
import type { StreamDirectory } from './stream-directory.js'
import { type OpenAiError, UpstreamFault, type UpstreamLimits } from './upstream.js'

/** How often to try writing an end while a process that lost its lease still writes. */
const endTriesMax = 10

export class Handler {
  readonly #deps: GenerationDeps
  readonly #directory: StreamDirectory
  readonly #places: Places
  readonly #running = new Map<string, Running>()

  constructor(deps: GenerationDeps, directory: StreamDirectory, places: Places) {
    this.#deps = deps
    this.#directory = directory
    this.#places = places
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
    const running: Running = { generation, stop }
    this.#running.set(context.id, running)
    const pass = (): void => stop.abort(context.signal.reason)
    if (context.signal.aborted) pass()
    else context.signal.addEventListener('abort', pass, { once: true })
    try {
      return await this.#generate(generation, context, stop.signal)
    } finally {
      context.signal.removeEventListener('abort', pass)
      this.#running.delete(context.id)
      if (generation.place !== null) this.#places.giveBack(generation.place)
    }
  }

  async #generate(generation: Generation, context: RunContext, signal: AbortSignal): Promise<Generated> {
    const { intake } = this.#deps
    const isDirect = generation.place !== null && this.#places.has(generation.place)
    const entry = await this.#directory.open({
      id: context.id,
      identity: context.identity,
      format: generation.format,
      threadId: generation.threadId,
      watcher: generation.watcher,
      direct: isDirect,
      isNew: isDirect && context.attempt === 1,
    })
    if (entry.ended !== null) return nothingNew
    const place = this.#deps.logOf(entry.log)
    // It started with Redis, which is no longer configured.
    if (place === null) return this.#failElsewhere(entry, failures.logLost)
    const last = await this.#lastKnown(entry, place.log)
    if (last === 'ended') return nothingNew
    // A lost log cannot be continued: readers may have chunks from it.
    if (last === 'lost') return this.#failElsewhere(entry, failures.logLost)
    const ring = generation.watcher !== intake.instance
    if (last > 0) return this.#refuseSecondSample(entry, generation)
    const attempt = new Attempted(this.#deps, { entry, generation, context, signal })
    attempt.writer = place.writer.open(entry.key, 0, { ring })
    return attempt.run()
  }

  async #lastKnown(entry: StreamEntry & { created: boolean }, log: StreamLog): Promise<number | 'ended' | 'lost'> {
    if (entry.created) return 0
    if (entry.log === 'postgres') return entry.last
    try {
      const last = await this.#lastOf(entry)
      return last === 0 && (await log.marks?.isLost(entry.key.id)) === true ? 'lost' : last
    } catch (fault) {
      // Redis is unreachable: nobody knows which chunks its readers have.
      if (fault instanceof LogFault) return 'lost'
      throw fault
    }
  }

  async #lastOf(entry: StreamEntry): Promise<number | 'ended'> {
    const head = await this.#deps.logOf(entry.log)?.log.head(entry.key)
    if (head === undefined) return 0
    return head.end === null ? head.last : 'ended'
  }

  async #refuseSecondSample(entry: StreamEntry, generation: Generation): Promise<Generated> {
    const text = forms[generation.format].failed(failures.interrupted)
    for (let tries = 0; tries < endTriesMax; tries++) {
      const last = await this.#lastOf(entry)
      if (last === 'ended') return nothingNew
      const written = await endAt(this.#deps, entry, last, 'error', text)
      if (written === 'written') fail(failures.interrupted)
      if (written === 'failed') break
    }
    throw new RetryOperation('The end of the stream could not be written.')
  }

  async #failElsewhere(entry: StreamEntry, why: Failure): Promise<Generated> {
    await this.#deps.registry.ended(entry.key.id, 'error')
    return fail(why)
  }
}

/** Its clients left; nobody requested the cancellation. */
const abandoned = new OperationAborted('cancelled')

interface Running {
  generation: Generation
  stop: AbortController
}

const nothingNew: Generated = { chunk_count: 0, total_length: 0, finish_reason: null, duration_ms: 0 }

function fail(why: Failure): never {
  throw new FailOperation(why.error.message, { result: why })
}

/** Writes an end after `last`, for a stream that is not generated here. */
export async function endAt(
  deps: Pick<GenerationDeps, 'logOf' | 'registry'>,
  entry: StreamEntry,
  last: number,
  kind: EndKind,
  text: string,
): Promise<'written' | 'lost' | 'failed'> {
  const place = deps.logOf(entry.log)
  if (place === null) return 'failed'
  const written = await place.writer.open(entry.key, last, { ring: true }).end(kind, text)
  if (written === 'written' && entry.log !== 'postgres') await deps.registry.ended(entry.key.id, kind)
  return written
}

/** One attempt at a stream without chunks. */
class Attempted {
  writer: StreamWriter | undefined
  readonly #deps: GenerationDeps
  readonly #entry: StreamEntry
  readonly #generation: Generation
  readonly #context: RunContext
  readonly #signal: AbortSignal
  readonly #startedAt = performance.now()
  #hasToken = false
  #chunks = 0
  #characters = 0
  #finishReason: string | null = null

  constructor(
    deps: GenerationDeps,
    of: { entry: StreamEntry; generation: Generation; context: RunContext; signal: AbortSignal },
  ) {
    this.#deps = deps
    this.#entry = of.entry
    this.#generation = of.generation
    this.#context = of.context
    this.#signal = of.signal
  }

  async run(): Promise<Generated> {
    if (this.#leftMs() <= 0) return this.#endWith(this.#queueTimeout())
    try {
      await this.#pull()
    } catch (fault) {
      return await this.#ended(fault)
    }
    const durationMs = performance.now() - this.#startedAt
    const { threadId } = this.#generation
    const totals = { threadId, chunks: this.#chunks, characters: this.#characters, durationMs }
    const written = await this.#end('done', forms[this.#generation.format].done(totals))
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
    const { chat, stream, usage, format } = this.#generation
    const form = forms[format]
    const limits = this.#limits()
    const { id: operationId, traceparent } = this.#context
    const request = { chat, stream, usage, operationId, traceparent }
    const writer = this.#open()
    for await (const chunks of upstream.generate(request, limits, this.#signal)) {
      if (!this.#hasToken) {
        this.#hasToken = true
        metrics.firstToken.observe(this.#ageMs / 1_000)
      }
      for (const chunk of chunks) {
        const text = form.chunk(chunk, this.#chunks)
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
    this.#signal.throwIfAborted()
  }

  #open(): StreamWriter {
    if (this.writer === undefined) throw new Error('the stream is not open')
    return this.writer
  }

  /** Time since acceptance, by the database clock. */
  get #ageMs(): number {
    return this.#entry.ageMs + performance.now() - this.#startedAt
  }

  /** Limit from acceptance to the first token, over all attempts: the promised wait if queued, else the configured limits. */
  get #mayWaitMs(): number {
    const { firstTokenMs, totalMs } = this.#deps.settings.limits
    return this.#entry.direct ? Math.min(firstTokenMs, totalMs, this.#patienceMs) : this.#generation.waitMs
  }

  get #patienceMs(): number {
    return this.#generation.patienceMs ?? Number.POSITIVE_INFINITY
  }

  #leftMs(): number {
    return this.#mayWaitMs - this.#ageMs
  }

  /** Limits of this attempt, without the time used by earlier ones. */
  #limits(): UpstreamLimits {
    const { firstTokenMs, idleMs, totalMs } = this.#deps.settings.limits
    const ageMs = this.#ageMs
    const endMs = Math.min(this.#entry.direct ? totalMs - ageMs : totalMs, this.#patienceMs - ageMs)
    return { firstTokenMs: Math.min(firstTokenMs, this.#mayWaitMs - ageMs), idleMs, totalMs: Math.max(1, endMs) }
  }

  #queueTimeout(): Failure {
    return failures.queueTimeout(Math.round(this.#mayWaitMs / 1_000))
  }

  async #ended(fault: unknown): Promise<Generated> {
    // Set by a refused push or by a look at the log.
    const { gone } = this.#open()
    if (gone !== null) return this.#logGone(gone)
    if (this.#signal.aborted) return this.#aborted(this.#signal.reason)
    if (!(fault instanceof UpstreamFault)) {
      this.#deps.log.error({ err: fault, operation: this.#context.id }, 'a generation failed')
      return this.#endWith(failure('internal_error', 500, 'Something went wrong here; it was logged.'))
    }
    const asked = this.#againIn(fault)
    if (asked !== null) {
      this.#open().close()
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
    if (!fault.retryable || this.#chunks > 0 || this.#context.attempt >= this.#context.maxAttempts) return null
    const { failover } = this.#deps.settings
    if (!failover.enabled) return null
    const asked = fault.retryAfterMs ?? 0
    return this.#leftMs() > Math.max(asked, failover.baseDelayMs) ? asked : null
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
        if (this.#chunks > 0) await this.#end('error', forms[this.#generation.format].failed(failures.interrupted))
        else this.#open().close()
        throw new OperationAborted('stopping')
      case 'lease_lost':
        this.#open().close()
        throw new OperationAborted('lease_lost')
    }
  }

  /** A client that left before the first chunk may come back with its key; so may one whose promised time is over. */
  #cancelled(isAbandoned: boolean): Promise<'written' | 'lost' | 'failed'> {
    const { failed } = forms[this.#generation.format]
    if (this.#chunks > 0) return this.#end('cancelled', failed(failures.cancelled))
    if (this.#leftMs() <= 0) return this.#end('unbegun', failed(this.#queueTimeout()))
    return this.#end(isAbandoned ? 'unbegun' : 'cancelled', failed(failures.cancelled))
  }

  /** Another process has the stream, or its log does not answer. */
  async #logGone(why: 'lost' | 'failed'): Promise<Generated> {
    this.#open().close()
    const { key, log } = this.#entry
    const isGone = why === 'failed' || (await this.#isLogGone())
    // The process that owns it in the queue finds the existing chunks and ends it.
    if (!isGone) throw new OperationAborted('lease_lost')
    const again = new RetryOperation('The log of the stream did not answer.', { result: failures.logAway })
    if (log === 'postgres') throw again
    const { written, ring } = this.#open()
    if (written > 0 || ring) {
      await this.#deps.registry.ended(key.id, written > 0 ? 'error' : 'unbegun')
      return fail(failures.logLost)
    }
    // Nobody can have read it: a remote reader would have needed a notification, and we notify the local ones.
    await this.#deps.registry.moved(key.id, 'postgres')
    this.#deps.relay.lost(key.id)
    throw again
  }

  async #isLogGone(): Promise<boolean> {
    const place = this.#deps.logOf(this.#entry.log)
    try {
      return (await place?.log.marks?.isLost(this.#entry.key.id)) === true
    } catch (fault) {
      if (fault instanceof LogFault) return true
      throw fault
    }
  }

  async #endWith(why: Failure): Promise<Generated> {
    const kind = why.retryable && this.#chunks === 0 ? 'unbegun' : 'error'
    const written = await this.#end(kind, forms[this.#generation.format].failed(why))
    if (written !== 'written') return this.#logGone(written)
    return fail(why)
  }

  async #end(kind: EndKind, text: string): Promise<'written' | 'lost' | 'failed'> {
    const written = await this.#open().end(kind, text)
    if (written !== 'written') return written
    this.#deps.metrics.ended(kind === 'unbegun' ? 'error' : kind)
    if (this.#entry.log === 'postgres') return written
    try {
      await this.#deps.registry.ended(this.#entry.key.id, kind)
    } catch (fault) {
      // The record has the end too; without this note the entry is only kept a little longer.
      this.#deps.log.warn({ err: fault, stream: this.#entry.key.id }, 'the end of a stream could not be noted')
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
