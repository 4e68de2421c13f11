/** Makes figures and verdicts, so that no section can get a median or a comparison wrong in its own way. */
import type { Figure, Verdict } from './section.js'
import { median } from './statistics.js'

export interface Measured {
  readonly what: string
  readonly variant: string
  readonly unit: string
  readonly runs: readonly number[]
  readonly note?: string
}

/** The figure of several runs: their median. */
export function figure(measured: Measured): Figure {
  const { what, variant, unit, runs, note } = measured
  return { what, variant, unit, value: median(runs), runs, ...(note !== undefined && { note }) }
}

export function verdict(claim: Omit<Verdict, 'met'>): Verdict {
  const { rule, value, target } = claim
  return { ...claim, met: rule === 'at-least' ? value >= target : value <= target }
}
