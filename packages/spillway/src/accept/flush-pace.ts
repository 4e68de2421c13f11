/**
 * How long a flush of so many items will take, learned from those of late. A group commit has a fixed part (a round trip, a
 * sync to disk) and a part for each item: taking the mean per item would call a burst after quiet times far slower than it
 * is. So it is a line through size and duration, weighted to the recent ones.
 */
export class FlushPace {
  #count = 0
  #ms = 0
  #countVariance = 0
  #covariance = 0
  #seen = 0

  add(count: number, ms: number): void {
    this.#seen++
    // The first of a process makes connections and plans: it tells nothing of the others.
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
    // Neither does a larger one take less, nor more than in proportion.
    const slope = this.#countVariance === 0 ? 0 : this.#covariance / this.#countVariance
    const eachMs = Math.min(Math.max(slope, 0), this.#count === 0 ? 0 : this.#ms / this.#count)
    return Math.max(0, this.#ms + eachMs * (count - this.#count))
  }
}

/** So that one flush that stalled (a slow disk) is not taken for the pace. */
const weight = 0.2
