/**
 * Throughput, from two samples of totals that only grow. Nothing is counted along the way: between two samples it is exact,
 * before the second nothing is known.
 */
export interface Totals {
  /** All messages that ever arrived. */
  ingested: number
  /** Deliveries settled as done. */
  processed: number
}

export interface Rates extends Totals {
  timestamp: string
  /** Between the two samples. */
  seconds: number
  ingestedPerSecond: number
  processedPerSecond: number
}

interface Look extends Totals {
  at: number
}

const looksMax = 60
const namesMax = 1_000
/** Samples that are closer together say little. */
const apartMs = 1_000

export class Throughput {
  readonly #looks = new Map<string, Look[]>()
  readonly #now: () => number

  /** `now` in milliseconds since the epoch. */
  constructor(now: () => number = Date.now) {
    this.#now = now
  }

  /** Takes a sample, and returns the rates between the last ones, newest first. */
  look(name: string, totals: Totals): Rates[] {
    const looks = this.#looks.get(name) ?? []
    const at = this.#now()
    const last = looks[looks.length - 1]
    // Deleting queues and groups lowers the totals, and a clock may be set back: earlier samples cannot be compared.
    if (last !== undefined && (totals.ingested < last.ingested || totals.processed < last.processed || at < last.at)) {
      looks.length = 0
    }
    if (looks.length === 0 || at - (last?.at ?? 0) >= apartMs) looks.push({ at, ...totals })
    if (looks.length > looksMax) looks.shift()
    this.#looks.delete(name)
    this.#looks.set(name, looks)
    if (this.#looks.size > namesMax) {
      for (const oldest of this.#looks.keys()) {
        this.#looks.delete(oldest)
        break
      }
    }
    return rates(looks)
  }
}

function rates(looks: readonly Look[]): Rates[] {
  const all: Rates[] = []
  for (const [i, look] of looks.entries()) {
    const before = looks[i - 1]
    if (before === undefined) continue
    const seconds = (look.at - before.at) / 1_000
    const ingested = look.ingested - before.ingested
    const processed = look.processed - before.processed
    all.unshift({
      timestamp: new Date(look.at).toISOString(),
      seconds,
      ingested,
      processed,
      ingestedPerSecond: perSecond(ingested, seconds),
      processedPerSecond: perSecond(processed, seconds),
    })
  }
  return all
}

const perSecond = (count: number, seconds: number): number => Math.round((count / seconds) * 100) / 100
