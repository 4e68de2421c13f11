/**
 * The largest message that this process recently pushed or popped, per queue. It is the basis for a pop's size estimate.
 * Two generations, so that one large message does not count forever.
 */
const generationMs = 60_000
const queuesMax = 10_000
/** For a queue in which nothing was found, until something is. */
const emptyBytes = 4_096
/** Bytes that a pop adds to a message: ids, names, times. */
const envelopeBytes = 640

export class MessageSizes {
  readonly #now: () => number
  #recent = new Map<string, number>()
  #before = new Map<string, number>()
  #since: number

  constructor(now: () => number = () => performance.now()) {
    this.#now = now
    this.#since = now()
  }

  /** The most that `batch` messages may take; `otherwise` if nothing is known. */
  estimate(queue: string, batch: number, otherwise: number): number {
    const largest = this.largest(queue)
    return largest === null ? otherwise : Math.min(otherwise, batch * (largest + envelopeBytes))
  }

  largest(queue: string): number | null {
    const recent = this.#recent.get(queue)
    const before = this.#before.get(queue)
    if (recent === undefined) return before ?? null
    return before === undefined ? recent : Math.max(recent, before)
  }

  saw(queue: string, bytes: number): void {
    if (this.#recent.size >= queuesMax || this.#now() - this.#since > generationMs) {
      this.#before = this.#recent
      this.#recent = new Map()
      this.#since = this.#now()
    }
    if (bytes > (this.#recent.get(queue) ?? -1)) this.#recent.set(queue, bytes)
  }

  foundEmpty(queue: string): void {
    if (this.largest(queue) === null) this.saw(queue, emptyBytes)
  }
}
