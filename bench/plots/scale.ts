/** From values to positions, and where the ticks stand. */

export interface Scale {
  readonly ticks: readonly number[]
  /** The position of a value between the ends: 0 to 1. */
  at(value: number): number
}

export function linearScale(values: readonly number[], ticksWanted = 6): Scale {
  const top = Math.max(0, ...values)
  const bottom = Math.min(0, ...values)
  const span = top - bottom
  if (span === 0) return { ticks: [bottom, bottom + 1], at: (value) => value - bottom }
  const step = niceStep(span / ticksWanted)
  const first = Math.floor(bottom / step)
  const last = Math.ceil(top / step)
  const ticks = Array.from({ length: last - first + 1 }, (_, n) => tidy((first + n) * step))
  const low = first * step
  return { ticks, at: (value) => (value - low) / ((last - first) * step) }
}

/**
 * From the last of 1, 2, 5 times a power of ten that is not above the lowest value, to the first that is not below the
 * highest. Ticks at all of them, or at powers of ten alone where there would be many. Values must be above zero.
 */
export function logScale(values: readonly number[]): Scale {
  const low = Math.min(...values)
  const high = Math.max(...values)
  if (!(low > 0)) throw new RangeError(`a logarithmic axis has no place for ${low}`)
  const all: number[] = []
  for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.ceil(Math.log10(high)) + 1; power++) {
    for (const factor of [1, 2, 5]) all.push(tidy(factor * 10 ** power))
  }
  const first = all.findLastIndex((tick) => tick <= low)
  const last = Math.max(
    first + 1,
    all.findIndex((tick) => tick >= high),
  )
  const from = Math.log10(all[first] ?? low)
  const to = Math.log10(all[last] ?? high)
  const within = all.slice(first, last + 1)
  const ticks = to - from <= 2.5 ? within : within.filter((tick) => Number.isInteger(tidy(Math.log10(tick))))
  return { ticks, at: (value) => (Math.log10(value) - from) / (to - from) }
}

/** The smallest of 1, 2, 5 times a power of ten that is not below. */
function niceStep(rough: number): number {
  const power = 10 ** Math.floor(Math.log10(rough))
  return (([1, 2, 5].find((factor) => factor * power >= rough * 0.999_999) ?? 10) as number) * power
}

/** 0.30000000000000004 is no label. */
const tidy = (value: number): number => Number(value.toPrecision(12))
