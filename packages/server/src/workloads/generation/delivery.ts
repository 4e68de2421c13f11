/**
 * Delivers a stream to one client: sends the log as fast as the connection takes it, until the end or until the client
 * leaves.
 *
 *   waiting ──first record──► streaming ──end──► over
 *      │ position sent │ promised time over ──► cancelled, reported    │ client left ──► cancelled (OpenAI) or unwatched (native)
 *      └ the operation ended without an end in the log ──► reported    │ log away, process stopping ──► reported, resumable
 *
 * It holds a cursor, not chunks: it asks the relay for the next record when the socket has taken the last one.
 */

import { type Follower, LogFault, type StreamEntry, type StreamRecord } from 'spillway/workload'
import type { SseConnection } from '../../traffic/sse.js'
import { blocksOf, forms } from './forms.js'
import type { GenerationDeps } from './index.js'
import { type Failure, type Format, failures } from './request.js'

export interface DeliveryOptions {
  entry: StreamEntry
  after: number
  /** Generated in this process, so its end is noticed here. */
  isLocal: boolean
  /** A client in another process may read it too. */
  isShared: boolean
  /** It was queued, so its position is reported. */
  isQueued?: boolean
  /** The first record is the whole answer; the deadline applies only until it runs. */
  isWhole?: boolean
  /** Deadline of the first record: how long from now, as it was promised. Null: no deadline. */
  waitMs?: number | null
  /** The first record arrived, or nobody waits for it any more. */
  onStarted?(): void
  /** Frees the Idempotency-Key, so that the request can be repeated with it. */
  forgetKey?(): Promise<void>
}

/** The next record, or why there is none; null if closed. */
export type Next = StreamRecord | Failure | null

/** The operation is settled right after the end of its stream is written. */
const settleWaitMs = 2_000

/** The failure in the operation's result; null if it has none. */
export async function keptFailure({ intake }: Pick<GenerationDeps, 'intake'>, id: string): Promise<Failure | null> {
  const result = (await intake.waiters.wait(id, settleWaitMs))?.result
  const isFailure = typeof result === 'object' && result !== null && 'status' in result && 'error' in result
  return isFailure ? (result as Failure) : null
}

export function endWithFailure(connection: SseConnection, format: Format, why: Failure): void {
  connection.write(forms[format].end('error', forms[format].failed(why), null))
  connection.end()
}

export class Delivery {
  readonly id: string
  readonly options: DeliveryOptions
  entry: StreamEntry
  readonly #deps: GenerationDeps
  #follower: Follower
  #connection: SseConnection | null = null
  #failure: Failure | null = null
  #position: number | null = null
  #overdue: NodeJS.Timeout | undefined
  hasStarted = false
  /** Waits for a record; otherwise for its client, who has not taken the last one. */
  isWaiting = false
  /** Looks without new records since the operation ended. */
  missingEnds = 0
  /** A client in another process may read it too. */
  isShared: boolean
  /** The end was sent: there is nothing left to cancel or to read. */
  hasEnded = false
  /** When to look again, by `performance.now()`. */
  lookAt = 0

  constructor(deps: GenerationDeps, options: DeliveryOptions) {
    this.#deps = deps
    this.options = options
    this.entry = options.entry
    this.id = options.entry.key.id
    this.isShared = options.isShared
    this.#follower = deps.logs.relay.follow(options.entry.key, options.entry.log, options.after)
  }

  /** Calls `act` when the promised time is over, unless closed before. */
  onOverdue(act: () => void): void {
    const { waitMs = null } = this.options
    if (waitMs !== null) this.#overdue = setTimeout(act, waitMs)
  }

  async next(): Promise<Next> {
    let record: StreamRecord | null
    this.isWaiting = true
    try {
      record = await this.#follower.next()
    } catch (fault) {
      if (!(fault instanceof LogFault)) throw fault
      if (this.#failure === null && (await this.#hasMoved())) return this.next()
      // A writer whose Redis is unreachable has abandoned the stream by now.
      return this.#failure ?? (this.entry.log === 'redis' ? failures.logLost : failures.logAway)
    } finally {
      this.isWaiting = false
    }
    this.missingEnds = 0
    if (record === null) return this.#failure
    this.start()
    return record
  }

  /** Restarted in another log, because the first was lost while it was empty. */
  async #hasMoved(): Promise<boolean> {
    if (this.hasStarted || this.entry.log === 'postgres') return false
    const entry = await this.#deps.logs.registry.find(this.id)
    if (entry === null || entry.log === this.entry.log) return false
    this.#follower.close()
    this.entry = entry
    this.#follower = this.#deps.logs.relay.follow(entry.key, entry.log, 0)
    return true
  }

  start(): void {
    if (this.hasStarted) return
    this.hasStarted = true
    this.options.onStarted?.()
  }

  /** It was sent to another process. */
  get isSentAway(): boolean {
    return this.#failure === failures.draining
  }

  /** Ends the wait: reported instead of the next record. */
  fail(why: Failure): void {
    this.#failure ??= why
    this.close()
  }

  close(): void {
    clearTimeout(this.#overdue)
    this.#follower.close()
  }

  /** Reads what the log has now. */
  kick(): void {
    this.#follower.kick()
  }

  attach(connection: SseConnection): void {
    this.#connection = connection
    connection.onClosed(() => this.close())
  }

  /** Runs until the end. `first`: the read that has already started. */
  async stream(connection: SseConnection, first?: Promise<Next>): Promise<void> {
    const { format } = this.entry
    for (let coming = first; ; coming = undefined) {
      const record = await (coming ?? this.next())
      if (connection.isClosed || record === null) return
      if ('status' in record) return endWithFailure(connection, format, record)
      this.#deps.metrics.chunksStreamed.inc(record.chunks.length)
      const written = connection.write(blocksOf(format, record))
      if ((written instanceof Promise ? await written : written) === 'closed') return
      if (record.end !== null) {
        this.hasEnded = true
        return connection.end()
      }
    }
  }

  /** Once for each change. */
  reportPosition(position: number, etaSeconds: number): void {
    if (this.hasStarted || position === this.#position) return
    this.#position = position
    this.#connection?.write(forms[this.entry.format].queued(position, etaSeconds))
  }

  /** Nobody waits for it any more: it is not generated, and a client that resumes it gets the reason. */
  async giveUp(why: Failure): Promise<void> {
    const outcome = await this.#deps.intake.cancel(this.id, why.error.message)
    await this.options.forgetKey?.()
    // A running one is ended by the process that runs it.
    if (outcome !== 'cancelled') return
    await this.#deps.logs.endAt(this.entry, 0, 'unbegun', forms[this.entry.format].failed(why))
  }
}
