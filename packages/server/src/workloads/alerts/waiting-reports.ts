/** Reports that are to be written: in order, and no more than so many. */
export interface WaitingReport {
  key: string
  status: 'firing' | 'resolved'
}

export class WaitingReports<Report extends WaitingReport> {
  readonly #most: number
  #reports: Report[] = []

  constructor(most: number) {
    this.#most = most
  }

  get size(): number {
    return this.#reports.length
  }

  /** Answers what had to go to make room: the oldest that is over already together with its end, else the oldest. */
  add(report: Report): Report[] {
    this.#reports.push(report)
    if (this.#reports.length <= this.#most) return []
    const gone = this.#oldestPair() ?? this.#reports.slice(0, 1)
    this.#reports = this.#reports.filter((kept) => !gone.includes(kept))
    return gone
  }

  /** From here on it is the caller's: what is being written must not be dropped with an end that is not. */
  take(): Report | undefined {
    return this.#reports.shift()
  }

  #oldestPair(): Report[] | undefined {
    for (const [index, opening] of this.#reports.entries()) {
      if (opening.status !== 'firing') continue
      const next = this.#reports.slice(index + 1).find(({ key }) => key === opening.key)
      if (next?.status === 'resolved') return [opening, next]
    }
    return undefined
  }
}
