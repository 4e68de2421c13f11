/**
 * Group commit. Requests wait in `#waiting`; a flush takes all of them (up to the bounds) and writes them in one
 * statement. The next starts as soon as the previous returns: there is no timer, so a lone request pays no wait and a
 * busy server makes larger batches by itself. Where a write is several statements (`overlap`), a second may be under way
 * meanwhile once enough wait: else this process would be idle while the store works, and the store while this one does.
 *
 *   waiting ──take──► in flight ──commit──► answered
 *      └── older than `timeoutMs` ──► fault
 *
 * When a batch is refused for what one item contains, it is split in halves until the poisoned one stands alone.
 */
export interface FlushOptions<Item, Answer> {
  write(items: readonly Item[]): Promise<readonly Answer[]>
  /** Is this fault one of the data, so that the others may pass without the culprit? */
  isPoison(fault: unknown): boolean
  /** Two items with the same key never share a batch; the later waits for the next. */
  exclusiveKey?(item: Item): string | null
  sizeOf(item: Item): number
  itemsMax: number
  bytesMax: number
  /** Items that may wait; more are refused by `isFull`. */
  waitingMax: number
  timeoutMs: number
  timeoutFault(): Error
  /** So many that wait start a second write beside the first. Default: never. */
  overlap?: number
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

export class Flush<Item, Answer> {
  readonly #options: FlushOptions<Item, Answer>
  readonly #now: () => number
  #waiting: Waiting<Item, Answer>[] = []
  #waitingBytes = 0
  /** Loops that are under way: while there is one, what is submitted needs no start. */
  #loops = 0
  /** When the oldest of each write that is under way was submitted. */
  readonly #inFlightSince = new Set<number>()
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
    let oldest = this.#waiting[0]?.since
    for (const since of this.#inFlightSince) oldest = oldest === undefined ? since : Math.min(oldest, since)
    return oldest === undefined ? 0 : this.#now() - oldest
  }

  submit(item: Item): Promise<Answer> {
    return new Promise((resolve, reject) => {
      const bytes = this.#options.sizeOf(item)
      this.#waiting.push({ item, bytes, since: this.#now(), resolve, reject })
      this.#waitingBytes += bytes
      if (this.#loops === 0 || (this.#loops === 1 && this.#isCrowded)) this.#start()
      else this.#expiry ??= setInterval(() => this.#expire(), expiryCheckMs)
    })
  }

  /** Resolves when nothing waits and nothing is in flight. */
  async drained(): Promise<void> {
    if (this.#loops === 0 && this.#waiting.length === 0) return
    await new Promise<void>((resolve) => this.#idle.push(resolve))
  }

  get #isCrowded(): boolean {
    return this.#waiting.length >= (this.#options.overlap ?? Number.POSITIVE_INFINITY)
  }

  #start(): void {
    this.#loops++
    // What arrives in the same turn of the event loop joins the first flush.
    setImmediate(() => void this.#run())
  }

  async #run(): Promise<void> {
    // The second of two goes on only while there is enough for both.
    while (this.#waiting.length > 0 && (this.#loops === 1 || this.#isCrowded)) {
      const batch = this.#take()
      const started = this.#now()
      const since = this.#markInFlight(batch[0]?.since ?? started)
      await this.#write(batch)
      this.#inFlightSince.delete(since)
      this.#options.onFlush?.(batch.length, this.#now() - started)
      // Requests whose bytes are here already join the next flush: a larger one costs each of them less.
      await this.#turn()
    }
    this.#loops--
    if (this.#loops > 0) return
    clearInterval(this.#expiry)
    this.#expiry = undefined
    for (const resolve of this.#idle.splice(0)) resolve()
  }

  /** Two writes may have an oldest of the same time: each is a member of its own. */
  #markInFlight(since: number): number {
    let mark = since
    while (this.#inFlightSince.has(mark)) mark += 1e-6
    this.#inFlightSince.add(mark)
    return mark
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
    let full = false
    for (const waiting of this.#waiting) {
      const key = exclusiveKey?.(waiting.item) ?? null
      full ||= batch.length >= itemsMax || (batch.length > 0 && bytes + waiting.bytes > bytesMax)
      if (full || (key !== null && keys.has(key))) {
        left.push(waiting)
        continue
      }
      if (key !== null) keys.add(key)
      bytes += waiting.bytes
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
    const late = this.#waiting.filter((w) => w.since <= limit)
    if (late.length === 0) return
    this.#waiting = this.#waiting.filter((w) => w.since > limit)
    for (const waiting of late) {
      this.#waitingBytes -= waiting.bytes
      waiting.reject(this.#options.timeoutFault())
    }
  }
}
