/** Reports waiting to be written: in order, and limited in number. */
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

  /** Returns the reports dropped to make space: the oldest alert that has ended, with its end; otherwise the oldest report. */
  add(report: Report): Report[] {
    this.#reports.push(report)
    if (this.#reports.length <= this.#most) return []
    const gone = this.#oldestPair() ?? this.#reports.slice(0, 1)
    this.#reports = this.#reports.filter((kept) => !gone.includes(kept))
    return gone
  }

  /** Now the caller's: a report that is being written must not be dropped together with its unwritten end. */
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
