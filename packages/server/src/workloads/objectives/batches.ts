/**
 * Counts of this process that are not yet added to the shared totals:
 *
 *   counted ──cut──► batch n, sent until it is confirmed ──► gone
 *
 * A batch keeps its number and its sums when it is sent again; new counts go into the next one.
 */
import { type ObjectiveName, objectiveNames } from '@spillway/protocol/wire'
import type { Counted } from './figures.js'

export interface Batch {
  number: number
  counts: readonly { objective: ObjectiveName; good: number; total: number }[]
}

export class Batches {
  readonly #sums = new Map<ObjectiveName, Counted>()
  #batch: Batch | null = null
  #number = 0

  add(objective: ObjectiveName, good: number, total: number): void {
    // Also false for NaN.
    if (!(good >= 0 && good <= total && total < Number.POSITIVE_INFINITY)) {
      throw new RangeError(`of ${total}, ${good} cannot be good`)
    }
    const sum = this.#sums.get(objective)
    if (sum === undefined) this.#sums.set(objective, { good, total })
    else {
      sum.good += good
      sum.total += total
    }
  }

  /** The batch to send, the same until it is confirmed; null: nothing to send. */
  next(): Batch | null {
    if (this.#batch !== null) return this.#batch
    const counts = objectiveNames.flatMap((objective) => {
      const sum = this.#sums.get(objective)
      return sum === undefined || sum.total === 0 ? [] : [{ objective, ...sum }]
    })
    this.#sums.clear()
    if (counts.length === 0) return null
    this.#batch = { number: ++this.#number, counts }
    return this.#batch
  }

  confirmed(): void {
    this.#batch = null
  }
}
