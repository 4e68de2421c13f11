/** When orders arrive: a Poisson process, made beforehand from a seed, so that all doors meet the same arrivals. */

/** Milliseconds from the start, ascending. */
export function poissonArrivals(options: { ratePerSecond: number; seconds: number; seed: number }): Float64Array {
  const random = seededRandom(options.seed)
  const end = options.seconds * 1_000
  const meanGapMs = 1_000 / options.ratePerSecond
  const times: number[] = []
  // 1 − random() is never 0, whose logarithm would be endless.
  for (let at = 0; ; ) {
    at -= Math.log(1 - random()) * meanGapMs
    if (at >= end) return Float64Array.from(times)
    times.push(at)
  }
}

/** A multiply-with-carry generator of 32-bit numbers (Marsaglia), as numbers from 0 up to but not including 1. */
function seededRandom(seed: number): () => number {
  let value = (seed >>> 0) ^ 0x9e3779b9
  let carry = 362_436_069
  return () => {
    const product = BigInt(value) * 0xffffda61n + BigInt(carry)
    value = Number(product & 0xffffffffn)
    carry = Number(product >> 32n)
    return value / 2 ** 32
  }
}
