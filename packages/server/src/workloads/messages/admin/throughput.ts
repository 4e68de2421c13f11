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

interface Sample extends Totals {
  at: number
}

const samplesMax = 60
const namesMax = 1_000
/** Samples that are closer together say little. */
const apartMs = 1_000

export class Throughput {
  readonly #samples = new Map<string, Sample[]>()
  readonly #now: () => number

  /** `now` in milliseconds since the epoch. */
  constructor(now: () => number = Date.now) {
    this.#now = now
  }

  /** Takes a sample, and returns the rates between the last ones, newest first. */
  sample(name: string, totals: Totals): Rates[] {
    const samples = this.#samples.get(name) ?? []
    const at = this.#now()
    const last = samples[samples.length - 1]
    // Deleting queues and groups lowers the totals, and a clock may be set back: earlier samples cannot be compared.
    if (last !== undefined && (totals.ingested < last.ingested || totals.processed < last.processed || at < last.at)) {
      samples.length = 0
    }
    if (samples.length === 0 || at - (last?.at ?? 0) >= apartMs) samples.push({ at, ...totals })
    if (samples.length > samplesMax) samples.shift()
    this.#samples.delete(name)
    this.#samples.set(name, samples)
    const [oldest] = this.#samples.size > namesMax ? this.#samples.keys() : []
    if (oldest !== undefined) this.#samples.delete(oldest)
    return rates(samples)
  }
}

function rates(samples: readonly Sample[]): Rates[] {
  const all: Rates[] = []
  for (const [i, sample] of samples.entries()) {
    const before = samples[i - 1]
    if (before === undefined) continue
    const seconds = (sample.at - before.at) / 1_000
    const ingested = sample.ingested - before.ingested
    const processed = sample.processed - before.processed
    all.unshift({
      timestamp: new Date(sample.at).toISOString(),
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
