/**
 * Distinguishes a burst, which passes, from overload, which lasts: a wait that is too long counts only once it has been so
 * for a while.
 *
 *   calm ──too long for `graceMs` without a break──► strict ──not once too long for `calmMs`──► calm
 *
 * In calm all requests may wait; in strict those whose wait is too long are refused.
 */
export class Lateness {
  #overSince: number | null = null
  #lastOver = Number.NEGATIVE_INFINITY
  #isStrict = false

  /** Whether to refuse a request; `isOver`: its wait is too long. */
  refuses(isOver: boolean, now: number): boolean {
    if (isOver) {
      this.#overSince ??= now
      this.#lastOver = now
      this.#isStrict ||= now - this.#overSince >= graceMs
      return this.#isStrict
    }
    if (!this.#isStrict) this.#overSince = null
    else if (now - this.#lastOver > calmMs) {
      this.#isStrict = false
      this.#overSince = null
    }
    return false
  }
}

const graceMs = 100
const calmMs = 500
