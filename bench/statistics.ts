/** What the figures are made of. Every function leaves its input as it is. */

const ascending = (values: readonly number[]): number[] => [...values].sort((a, b) => a - b)

/** The middle one; of an even count the mean of the two in the middle. Throws on none: a figure without a run is a defect. */
export function median(values: readonly number[]): number {
  const sorted = ascending(values)
  const middle = sorted.length >> 1
  const upper = sorted[middle]
  if (upper === undefined) throw new RangeError('median of no values')
  const lower = sorted[middle - 1]
  return sorted.length % 2 === 1 || lower === undefined ? upper : (lower + upper) / 2
}

/** Nearest rank: the smallest value that at least `share` of all values do not exceed. `share` from 0 to 1. */
export function percentile(values: readonly number[], share: number): number {
  if (!(share >= 0 && share <= 1)) throw new RangeError(`a share is from 0 to 1, not ${share}`)
  const sorted = ascending(values)
  // Rounded first: 0.07 × 100 is 7.000000000000001, whose ceiling would be one rank too far.
  const rank = Math.ceil(Number((share * sorted.length).toFixed(9)))
  const value = sorted[Math.max(0, rank - 1)]
  if (value === undefined) throw new RangeError('percentile of no values')
  return value
}

export function range(values: readonly number[]): { readonly min: number; readonly max: number } {
  if (values.length === 0) throw new RangeError('range of no values')
  let min = Number.POSITIVE_INFINITY
  let max = Number.NEGATIVE_INFINITY
  for (const value of values) {
    min = Math.min(min, value)
    max = Math.max(max, value)
  }
  return { min, max }
}

/**
 * The ratio of two variants that were measured in the same rounds: the median of the rounds' own ratios. What slows the
 * whole machine for one round touches both sides of that round's ratio, and not the ratio.
 */
export function pairedRatio(over: readonly number[], under: readonly number[]): number {
  if (over.length !== under.length || over.length === 0) {
    throw new RangeError(`rounds do not pair: ${over.length} and ${under.length}`)
  }
  return median(over.map((value, round) => value / (under[round] ?? Number.NaN)))
}
