/**
 * Brings a stream to one client: what is in the log, as its connection takes it, until the end or until it leaves.
 *
 *   waiting ──first record──► streaming ──end──► over
 *      │ position told │ promised time over ──► cancelled, told           │ client left ──► cancelled (OpenAI) or unwatched (native)
 *      └ the operation ended without an end in the log ──► told           │ log away, process stopping ──► told, resumable
 *
 * It holds a cursor, not chunks: the relay hands it the next record when it asks, and it asks when the socket has taken
 * the last one.
 */

import { type Follower, LogFault, type StreamEntry, type StreamRecord } from 'spillway/workload'
import type { SseConnection } from '../../http/sse.js'
import type { GenerationDeps } from './deps.js'
import { blocksOf, forms } from './forms.js'
import { endAt } from './handler.js'
import { type Failure, failures } from './request.js'

export interface DeliveryOptions {
  entry: StreamEntry
  after: number
  /** For the first record, by `performance.now()`; null: as long as it takes. */
  waitUntil: number | null
  waitSeconds: number
  /** Its first record is the whole answer: it is waited for only until it runs. */
  isWhole: boolean
  /** It was queued, so that its position is of interest. */
  isQueued: boolean
  /** Somebody else may read it too, in another process. */
  isShared: boolean
  /** Generated in this process: then its end is heard of here. */
  isLocal: boolean
  /** The first record came, or nobody waits for it any more. */
  onStarted(): void
  /** What was asked for may be asked for again with its Idempotency-Key. */
  forgetKey(): Promise<void>
}

/** The next record, or why there is none; null when it was closed. */
export type Next = StreamRecord | Failure | null

/** Its operation is settled right after the end of its stream was written. */
const settleWaitMs = 2_000

/** Why a generation failed, as the result of its operation says; null when it does not. */
export async function keptFailure({ intake }: Pick<GenerationDeps, 'intake'>, id: string): Promise<Failure | null> {
  const result = (await intake.core.waiters.wait(id, settleWaitMs))?.result
  const isFailure = typeof result === 'object' && result !== null && 'status' in result && 'error' in result
  return isFailure ? (result as Failure) : null
}

export type Outcome = 'ended' | 'left' | 'failed'

export class Delivery {
  readonly id: string
  entry: StreamEntry
  readonly isQueued: boolean
  readonly isLocal: boolean
  readonly waitUntil: number | null
  readonly #deps: GenerationDeps
  readonly #o: DeliveryOptions
  #follower: Follower
  #connection: SseConnection | null = null
  #started = false
  #failure: Failure | null = null
  #position: number | null = null
  #overdue: NodeJS.Timeout | undefined
  /** For a record; else for its client, who has not taken the last one. */
  isWaiting = false
  /** Looks since the operation was seen to have ended, during which nothing came of the log. */
  missingEnds = 0
  isShared: boolean
  /** Its end was told: nothing is left to cancel or to read. */
  hasEnded = false
  /** When to look at it again, by `performance.now()`. */
  lookAt = 0

  constructor(deps: GenerationDeps, options: DeliveryOptions) {
    this.#deps = deps
    this.#o = options
    this.entry = options.entry
    this.id = options.entry.key.id
    this.isQueued = options.isQueued
    this.isLocal = options.isLocal
    this.isShared = options.isShared
    this.waitUntil = options.waitUntil
    this.#follower = deps.relay.follow(options.entry.key, options.entry.log, options.after)
  }

  get hasStarted(): boolean {
    return this.#started
  }

  /** Its first record is the whole answer: once it runs, it has the time that an answer may take. */
  get isWhole(): boolean {
    return this.#o.isWhole
  }

  /** When the time is over that was promised, unless it was closed before. */
  onOverdue(act: () => void): void {
    if (this.waitUntil !== null) this.#overdue = setTimeout(act, this.waitUntil - performance.now())
  }

  async next(): Promise<Next> {
    let record: StreamRecord | null
    this.isWaiting = true
    try {
      record = await this.#follower.next()
    } catch (fault) {
      if (!(fault instanceof LogFault)) throw fault
      if (this.#failure === null && (await this.#hasMoved())) return this.next()
      // Who writes to a Redis that is away has given the stream up by now.
      return this.#failure ?? (this.entry.log === 'redis' ? failures.logLost : failures.logAway)
    } finally {
      this.isWaiting = false
    }
    this.missingEnds = 0
    if (record === null) return this.#failure
    this.start()
    return record
  }

  /** Begun anew in another log, as the first was gone before anything was in it. */
  async #hasMoved(): Promise<boolean> {
    if (this.#started || this.entry.log === 'postgres') return false
    const entry = await this.#deps.registry.find(this.id)
    if (entry === null || entry.log === this.entry.log) return false
    this.#follower.close()
    this.entry = entry
    this.#follower = this.#deps.relay.follow(entry.key, entry.log, 0)
    return true
  }

  start(): void {
    if (this.#started) return
    this.#started = true
    this.#o.onStarted()
  }

  /** It was sent to another process. */
  get isSentAway(): boolean {
    return this.#failure === failures.draining
  }

  /** Told instead of what would come: ends the wait for it. */
  fail(why: Failure): void {
    this.#failure ??= why
    this.close()
  }

  close(): void {
    clearTimeout(this.#overdue)
    this.#follower.close()
  }

  /** Whatever is in the log by now. */
  kick(): void {
    this.#follower.kick()
  }

  attach(connection: SseConnection): void {
    this.#connection = connection
    connection.onClosed(() => this.close())
  }

  /** Until the end. `first`: what is waited for already. */
  async stream(connection: SseConnection, first?: Promise<Next>): Promise<Outcome> {
    const { format } = this.entry
    for (let coming = first; ; coming = undefined) {
      const record = await (coming ?? this.next())
      if (connection.isClosed || record === null) return 'left'
      if ('status' in record) {
        connection.write(forms[format].end('error', forms[format].failed(record), null))
        connection.end()
        return 'failed'
      }
      this.#deps.metrics.chunksStreamed.inc(record.chunks.length)
      const written = connection.write(blocksOf(format, record))
      if ((written instanceof Promise ? await written : written) === 'closed') return 'left'
      if (record.end !== null) {
        this.hasEnded = true
        connection.end()
        return 'ended'
      }
    }
  }

  /** Once for each change. */
  tellPosition(position: number, etaSeconds: number): void {
    if (this.#started || position === this.#position) return
    this.#position = position
    this.#connection?.write(forms[this.entry.format].queued(position, etaSeconds))
  }

  /** Nobody waits for it any more: it is not generated, and whoever resumes it is told why. */
  async giveUp(why: Failure): Promise<void> {
    const outcome = await this.#deps.intake.cancel(this.id, why.error.message)
    await this.#o.forgetKey()
    // One that runs is ended by who runs it.
    if (outcome !== 'cancelled') return
    await endAt(this.#deps, this.entry, 0, 'unbegun', forms[this.entry.format].failed(why))
  }

  get waitSeconds(): number {
    return this.#o.waitSeconds
  }
}
