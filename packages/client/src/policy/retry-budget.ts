export interface RetryBudgetOptions {
  /** Retries that each request earns. Default 0.1: a tenth. */
  ratio?: number
  /** And that each second earns. Default 1. */
  perSecond?: number
  /** The initial balance and the maximum. Default 10. */
  reserve?: number
}

/**
 * Limits the load that retries add to a server in trouble. A retry without budget is not refused: it waits in line, and
 * later retries wait behind it.
 */
export class RetryBudget {
  readonly #ratio: number
  readonly #perSecond: number
  readonly #reserve: number
  readonly #now: () => number
  /** Negative: this many retries are waiting. */
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

  /** A request that is not a retry. */
  earn(): void {
    this.#add(this.#ratio)
  }

  /** Takes one and returns how many milliseconds to wait for it. */
  take(): number {
    this.#add(-1)
    return this.#tokens >= 0 ? 0 : (-this.#tokens * 1_000) / this.#perSecond
  }

  refund(): void {
    this.#add(1)
  }

  #add(change: number): void {
    const now = this.#now()
    const earned = ((now - this.#at) * this.#perSecond) / 1_000
    this.#at = now
    this.#tokens = Math.min(this.#reserve, Math.min(this.#reserve, this.#tokens + earned) + change)
  }
}
