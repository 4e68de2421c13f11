/**
 * Group commit. Requests wait in `#waiting`; one flush at a time takes all of them (up to the bounds) and writes them in
 * one statement. The next starts as soon as the previous returns: there is no timer, so a lone request pays no wait and
 * a busy server makes larger batches by itself.
 *
 *   waiting ──take──► in flight ──commit──► answered
 *      └── older than `timeoutMs` ──► fault
 *
 * When a batch fails because of one item's data, it is split in halves until the poisoned item is alone.
 */
export interface FlushOptions<Item, Answer> {
  write(items: readonly Item[]): Promise<readonly Answer[]>
  /** Whether the data caused this fault, so that the other items may succeed without the culprit. */
  isPoison(fault: unknown): boolean
  /** Two items with the same key never share a batch; the later one waits for the next. */
  exclusiveKey?(item: Item): string | null
  sizeOf(item: Item): number
  /** How many of `itemsMax` it takes up. Default 1. */
  countOf?(item: Item): number
  itemsMax: number
  bytesMax: number
  /** Items that may wait; beyond that `isFull` is true. */
  waitingMax: number
  timeoutMs: number
  timeoutFault(): Error
  onFlush?(items: number, durationMs: number): void
  now?: () => number
}

interface Waiting<Item, Answer> {
  item: Item
  bytes: number
  since: number
  resolve(answer: Answer): void
  reject(fault: unknown): void
}

const expiryCheckMs = 100

/** Small, so that one stalled flush (a slow disk) does not set the pace. */
const weight = 0.2

/**
 * Estimates how long a flush of a given size takes, from recent flushes. A group commit has a fixed part (a round trip, a
 * sync to disk) and a part per item: the mean per item would make a burst after quiet times look far slower than it is. So
 * this fits a line through size and duration, weighted to recent flushes.
 */
export class FlushPace {
  #count = 0
  #ms = 0
  #countVariance = 0
  #covariance = 0
  #seen = 0

  add(count: number, ms: number): void {
    this.#seen++
    // The first flush of a process opens connections and plans statements: it is not representative.
    if (this.#seen === 1) return
    if (this.#seen === 2) {
      this.#count = count
      this.#ms = ms
      return
    }
    const fromCount = count - this.#count
    const fromMs = ms - this.#ms
    this.#count += weight * fromCount
    this.#ms += weight * fromMs
    this.#countVariance = (1 - weight) * (this.#countVariance + weight * fromCount * fromCount)
    this.#covariance = (1 - weight) * (this.#covariance + weight * fromCount * fromMs)
  }

  /** 0 while nothing is known. */
  expectedMs(count: number): number {
    if (count === 0) return 0
    // A larger flush never takes less time, nor more than in proportion.
    const slope = this.#countVariance === 0 ? 0 : this.#covariance / this.#countVariance
    const eachMs = Math.min(Math.max(slope, 0), this.#count === 0 ? 0 : this.#ms / this.#count)
    return Math.max(0, this.#ms + eachMs * (count - this.#count))
  }
}

export class Flush<Item, Answer> {
  readonly #options: FlushOptions<Item, Answer>
  readonly #now: () => number
  #waiting: Waiting<Item, Answer>[] = []
  #waitingBytes = 0
  /** The loop runs, so a new item need not start it. */
  #running = false
  /** When the oldest item of the current write was submitted. */
  #inFlightSince: number | null = null
  #inFlightCount = 0
  #waitingCount = 0
  #inFlightStartedAt = 0
  readonly #pace = new FlushPace()
  #expiry: NodeJS.Timeout | undefined
  #idle: (() => void)[] = []

  constructor(options: FlushOptions<Item, Answer>) {
    this.#options = options
    this.#now = options.now ?? (() => performance.now())
  }

  get isFull(): boolean {
    return this.#waiting.length >= this.#options.waitingMax || this.#waitingBytes >= 4 * this.#options.bytesMax
  }

  /** Age of the oldest write that is not committed yet. */
  get oldestMs(): number {
    const oldest = this.#inFlightSince ?? this.#waiting[0]?.since
    return oldest === undefined ? 0 : this.#now() - oldest
  }

  /** How long a new item will take, at the recent rate. */
  get expectedMs(): number {
    // With nothing ahead of it, an item is written at once, however slow recent flushes were; that shows the current pace.
    if (this.#waitingCount + this.#inFlightCount === 0) return 0
    const running =
      this.#inFlightCount === 0
        ? 0
        : Math.max(0, this.#pace.expectedMs(this.#inFlightCount) - (this.#now() - this.#inFlightStartedAt))
    const { itemsMax } = this.#options
    const next = this.#waitingCount + 1
    return running + this.#pace.expectedMs(Math.min(next, itemsMax)) * Math.ceil(next / itemsMax)
  }

  submit(item: Item): Promise<Answer> {
    return new Promise((resolve, reject) => {
      this.#waitingCount += this.#countOf(item)
      const bytes = this.#options.sizeOf(item)
      this.#waiting.push({ item, bytes, since: this.#now(), resolve, reject })
      this.#waitingBytes += bytes
      if (!this.#running) this.#start()
      else this.#expiry ??= setInterval(() => this.#expire(), expiryCheckMs)
    })
  }

  /** Resolves when nothing waits and nothing is in flight. */
  async drained(): Promise<void> {
    if (!this.#running && this.#waiting.length === 0) return
    await new Promise<void>((resolve) => this.#idle.push(resolve))
  }

  #start(): void {
    this.#running = true
    // Items that arrive in the same turn of the event loop join the first flush.
    setImmediate(() => void this.#run())
  }

  async #run(): Promise<void> {
    while (this.#waiting.length > 0) {
      const batch = this.#take()
      this.#inFlightSince = batch[0]?.since ?? this.#now()
      const started = this.#now()
      const count = batch.reduce((sum, { item }) => sum + this.#countOf(item), 0)
      this.#waitingCount -= count
      this.#inFlightCount = count
      this.#inFlightStartedAt = started
      await this.#write(batch)
      this.#inFlightSince = null
      this.#inFlightCount = 0
      const tookMs = this.#now() - started
      this.#pace.add(count, tookMs)
      this.#options.onFlush?.(batch.length, tookMs)
      // Requests that have arrived already join the next flush: a larger one costs each of them less.
      await this.#turn()
    }
    this.#running = false
    clearInterval(this.#expiry)
    this.#expiry = undefined
    for (const resolve of this.#idle.splice(0)) resolve()
  }

  #countOf(item: Item): number {
    return this.#options.countOf?.(item) ?? 1
  }

  #turn(): Promise<void> {
    return new Promise((resolve) => setImmediate(resolve))
  }

  #take(): Waiting<Item, Answer>[] {
    const { itemsMax, bytesMax, exclusiveKey } = this.#options
    const batch: Waiting<Item, Answer>[] = []
    const left: Waiting<Item, Answer>[] = []
    const keys = new Set<string>()
    let bytes = 0
    let count = 0
    let full = false
    for (const waiting of this.#waiting) {
      const key = exclusiveKey?.(waiting.item) ?? null
      const n = this.#countOf(waiting.item)
      full ||= batch.length > 0 && (count + n > itemsMax || bytes + waiting.bytes > bytesMax)
      if (full || (key !== null && keys.has(key))) {
        left.push(waiting)
        continue
      }
      if (key !== null) keys.add(key)
      bytes += waiting.bytes
      count += n
      batch.push(waiting)
    }
    this.#waiting = left
    this.#waitingBytes -= bytes
    return batch
  }

  async #write(batch: readonly Waiting<Item, Answer>[]): Promise<void> {
    try {
      const answers = await this.#options.write(batch.map((w) => w.item))
      for (const [index, waiting] of batch.entries()) {
        const answer = answers[index]
        if (answer === undefined) waiting.reject(new Error(`the flush gave no answer for item ${index}`))
        else waiting.resolve(answer)
      }
    } catch (fault) {
      if (batch.length > 1 && this.#options.isPoison(fault)) {
        const middle = batch.length >> 1
        await this.#write(batch.slice(0, middle))
        await this.#write(batch.slice(middle))
        return
      }
      for (const waiting of batch) waiting.reject(fault)
    }
  }

  #expire(): void {
    const limit = this.#now() - this.#options.timeoutMs
    const expired = this.#waiting.filter((w) => w.since <= limit)
    if (expired.length === 0) return
    this.#waiting = this.#waiting.filter((w) => w.since > limit)
    for (const waiting of expired) {
      this.#waitingBytes -= waiting.bytes
      this.#waitingCount -= this.#countOf(waiting.item)
      waiting.reject(this.#options.timeoutFault())
    }
  }
}
