/**
 * Many items that are each checked now and then, by one timer for all: a ring of buckets, one of which is due at each tick.
 * The timer runs only while there are items. A postponed item need not be moved: its owner notes the new time and returns it
 * when the item is due.
 */
export class DueRing<T> {
  readonly tickMs: number
  readonly #look: (item: T) => number
  readonly #buckets: T[][]
  #tick = 0
  #size = 0
  #timer: NodeJS.Timeout | undefined

  /** `look` returns in how many ticks to check the item again; 0: never. */
  constructor(options: { tickMs: number; longestMs: number; look(item: T): number }) {
    this.tickMs = options.tickMs
    this.#look = options.look
    this.#buckets = Array.from({ length: Math.ceil(options.longestMs / options.tickMs) + 2 }, () => [])
  }

  /** The tick of the last bucket. */
  get tick(): number {
    return this.#tick
  }

  /** At least one tick, at most the length of the ring. */
  ticksOf(ms: number): number {
    return Math.min(this.#buckets.length - 1, Math.max(1, Math.ceil(ms / this.tickMs)))
  }

  add(item: T, ticks: number): void {
    this.#buckets[(this.#tick + ticks) % this.#buckets.length]?.push(item)
    this.#size++
    if (this.#timer !== undefined) return
    this.#timer = setInterval(() => this.#turn(), this.tickMs)
    this.#timer.unref()
  }

  close(): void {
    clearInterval(this.#timer)
    this.#timer = undefined
    for (const bucket of this.#buckets) bucket.length = 0
    this.#size = 0
  }

  #turn(): void {
    this.#tick++
    const at = this.#tick % this.#buckets.length
    const bucket = this.#buckets[at] ?? []
    this.#buckets[at] = []
    this.#size -= bucket.length
    for (const item of bucket) {
      const ticks = this.#look(item)
      if (ticks > 0) this.add(item, ticks)
    }
    if (this.#size > 0) return
    clearInterval(this.#timer)
    this.#timer = undefined
  }
}
