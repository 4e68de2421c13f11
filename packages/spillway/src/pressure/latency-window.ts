/**
 * Percentiles of requests that ended in the last few seconds. Samples expire by themselves, so an idle router recovers: when
 * nothing ends, nothing is slow. Bounded: a second has at most `eachMax` samples, chosen evenly.
 */
export class LatencyWindow {
  readonly #windowMs: number
  readonly #now: () => number
  readonly #random: () => number
  #slices: { startedAt: number; seen: number; samples: number[] }[] = []

  constructor(windowMs = 5_000, now: () => number = () => performance.now(), random: () => number = Math.random) {
    this.#windowMs = windowMs
    this.#now = now
    this.#random = random
  }

  add(ms: number): void {
    const now = this.#now()
    let slice = this.#slices.at(-1)
    if (slice === undefined || now - slice.startedAt >= sliceMs) {
      slice = { startedAt: now, seen: 0, samples: [] }
      this.#slices.push(slice)
      this.#expire(now)
    }
    slice.seen++
    if (slice.samples.length < eachMax) slice.samples.push(ms)
    else {
      // Reservoir sampling: each sample is kept with the same probability.
      const place = Math.floor(this.#random() * slice.seen)
      if (place < eachMax) slice.samples[place] = ms
    }
  }

  /** Zeros when nothing ended recently. */
  percentiles(): { p50: number; p95: number; p99: number; count: number } {
    this.#expire(this.#now())
    const all = Float64Array.from(this.#slices.flatMap((slice) => slice.samples)).sort()
    const at = (share: number): number => all[Math.min(all.length - 1, Math.ceil(all.length * share) - 1)] ?? 0
    const count = this.#slices.reduce((sum, slice) => sum + slice.seen, 0)
    return { p50: at(0.5), p95: at(0.95), p99: at(0.99), count }
  }

  /** A slice is removed when all of it is older than the window. */
  #expire(now: number): void {
    this.#slices = this.#slices.filter((slice) => now - slice.startedAt < this.#windowMs)
  }
}

const sliceMs = 250
const eachMax = 500
