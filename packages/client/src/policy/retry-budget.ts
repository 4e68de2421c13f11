export interface RetryBudgetOptions {
  /** Retries that each request earns. Default 0.1: a tenth. */
  ratio?: number
  /** And that each second earns. Default 1. */
  perSecond?: number
  /** What it begins with, and the most that it saves up. Default 10. */
  reserve?: number
}

/**
 * Bounds what retries add to the load of a server that is in trouble. A retry without budget is not refused but waits
 * its turn: whoever comes next waits behind it.
 */
export class RetryBudget {
  readonly #ratio: number
  readonly #perSecond: number
  readonly #reserve: number
  readonly #now: () => number
  /** Below 0: so many retries wait already. */
  #tokens: number
  #at: number

  constructor({ ratio = 0.1, perSecond = 1, reserve = 10 }: RetryBudgetOptions, now: () => number) {
    this.#ratio = ratio
    this.#perSecond = perSecond
    this.#reserve = reserve
    this.#now = now
    this.#tokens = reserve
    this.#at = now()
  }

  /** A request that is no retry. */
  earn(): void {
    this.#add(this.#ratio)
  }

  /** Takes one, and tells how many milliseconds to wait until it is there. */
  take(): number {
    this.#add(-1)
    return this.#tokens >= 0 ? 0 : (-this.#tokens * 1_000) / this.#perSecond
  }

  giveBack(): void {
    this.#add(1)
  }

  #add(change: number): void {
    const now = this.#now()
    const earned = ((now - this.#at) * this.#perSecond) / 1_000
    this.#at = now
    this.#tokens = Math.min(this.#reserve, Math.min(this.#reserve, this.#tokens + earned) + change)
  }
}
