/** Lengths of time as users write them: milliseconds, or a text such as `500ms`, `10s`, `15m`, `1h` or `7d`. */
import type { Rule } from './options.js'

export type Duration = number | string

const unitMs: Readonly<Record<string, number>> = { ms: 1, s: 1_000, m: 60_000, h: 3_600_000, d: 86_400_000 }

/** NaN for a text that is none. */
export function millisecondsOf(value: Duration): number {
  if (typeof value === 'number') return value
  const match = /^(\d{1,12})(ms|[smhd])$/.exec(value)
  return Number(match?.[1]) * (unitMs[match?.[2] ?? ''] ?? Number.NaN)
}

export function isDuration(leastMs: number, mostMs: number): Rule {
  return (value) => {
    const ms = typeof value === 'number' || typeof value === 'string' ? millisecondsOf(value) : Number.NaN
    return Number.isInteger(ms) && ms >= leastMs && ms <= mostMs
      ? null
      : `milliseconds from ${leastMs} to ${mostMs}, or a text like 500ms, 10s, 15m, 1h or 7d`
  }
}
