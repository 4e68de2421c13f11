import { LogFault, type StreamLog } from './port.js'

const backoffMinMs = 50
const backoffMaxMs = 1_000

export interface BatchedCallsOptions {
  log: StreamLog
  /** How long an item is tried. */
  patienceMs: number
  warn(fields: object, message: string): void
}

/**
 * Calls to a log, one at a time, each for all items that wait. No timer collects items: the first call starts at once, and
 * items that arrive during a call go with the next.
 *
 *   idle ──item──► calling ──answer──► idle, or calling for those that came meanwhile
 *                     │  ▲
 *             LogFault│  │back-off over: the same items first
 *                     ▼  │
 *                    pausing ──an item has waited for patienceMs──► it fails
 *
 * An item that has waited for patienceMs fails, also when a call never answers.
 */
export abstract class BatchedCalls<Item, Answer> {
  protected readonly o: BatchedCallsOptions
  protected flight: readonly Item[] | null = null
  protected isClosed = false
  #failures = 0
  #isScheduled = false
  #pause: NodeJS.Timeout | undefined
  #expiry: NodeJS.Timeout | undefined

  constructor(options: BatchedCallsOptions) {
    this.o = options
  }

  protected abstract readonly texts: { failed: string; recovered: string }
  /** The items of the next call; none: nothing waits. */
  protected abstract nextBatch(): readonly Item[]
  protected abstract call(batch: readonly Item[]): Promise<readonly Answer[]>
  protected abstract answered(batch: readonly Item[], answers: readonly Answer[]): void
  /** The log did not answer: the next batch is this one. */
  protected abstract putBack(batch: readonly Item[]): void
  /** The log answers, but the call fails, and a retry would not help. One item must not cost the others theirs. */
  protected abstract split(batch: readonly Item[], fault: unknown): void
  /** Fails the items that have waited too long. Returns since when the oldest of the others has waited. */
  protected abstract expire(nowMs: number): number

  protected close(): void {
    this.isClosed = true
    this.flight = null
    clearTimeout(this.#pause)
    clearTimeout(this.#expiry)
  }

  /** In a microtask: items that come in the same turn go together. */
  protected schedule(): void {
    if (this.#isScheduled || this.flight !== null || this.#pause !== undefined) return
    this.#isScheduled = true
    queueMicrotask(this.#flush)
  }

  /** One timer for all, not moved with each call: when it fires, it checks which items have really waited that long. */
  protected watch(inMs: number): void {
    if (this.#expiry !== undefined || this.isClosed) return
    this.#expiry = setTimeout(() => {
      this.#expiry = undefined
      this.#expire()
    }, inMs)
    this.#expiry.unref()
  }

  readonly #flush = (): void => {
    this.#isScheduled = false
    if (this.isClosed || this.flight !== null || this.#pause !== undefined) return
    const batch = this.nextBatch()
    if (batch.length === 0) return
    this.flight = batch
    this.watch(this.o.patienceMs)
    this.call(batch).then(
      (answers) => this.#answered(batch, answers),
      (fault: unknown) => this.#faulted(batch, fault),
    )
  }

  #answered(batch: readonly Item[], answers: readonly Answer[]): void {
    // This call timed out earlier: its items have failed.
    if (this.flight !== batch) return
    if (answers.length !== batch.length) {
      this.#faulted(batch, new Error(`${answers.length} answers to ${batch.length} items`))
      return
    }
    this.flight = null
    if (this.#failures > 0) this.o.warn({ log: this.o.log.name, tries: this.#failures }, this.texts.recovered)
    this.#failures = 0
    this.answered(batch, answers)
    this.#flush()
  }

  #faulted(batch: readonly Item[], fault: unknown): void {
    if (this.flight !== batch) return
    this.flight = null
    if (!(fault instanceof LogFault)) {
      this.split(batch, fault)
      this.#flush()
      return
    }
    this.#failures++
    if (this.#failures === 1) this.o.warn({ log: this.o.log.name, err: fault }, this.texts.failed)
    this.putBack(batch)
    const pauseMs = Math.min(backoffMaxMs, backoffMinMs * 2 ** (this.#failures - 1))
    this.#pause = setTimeout(() => {
      this.#pause = undefined
      this.#expire()
      this.#flush()
    }, pauseMs)
  }

  #expire(): void {
    const nowMs = performance.now()
    const oldestMs = this.expire(nowMs)
    if (oldestMs < Number.POSITIVE_INFINITY) this.watch(Math.max(1, oldestMs + this.o.patienceMs - nowMs))
  }
}
