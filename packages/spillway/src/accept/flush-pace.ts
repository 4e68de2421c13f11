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

/** Small, so that one stalled flush (a slow disk) does not set the pace. */
const weight = 0.2
