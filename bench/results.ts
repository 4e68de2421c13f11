/** What is kept of a run, and the file behind docs/benchmarks.md. */
import type { Environment } from './environment.js'
import type { SectionResult } from './section.js'

export interface MeasuredSection {
  readonly name: string
  readonly title: string
  /** RFC 3339. */
  readonly measuredAt: string
  readonly seconds: number
  readonly quick: boolean
  /** Share of the machine that its host gave to others meanwhile; null: unknown. */
  readonly stolenPercent?: number | null
  readonly environment: Environment
  readonly result: SectionResult
}

export interface FailedSection {
  readonly name: string
  readonly title: string
  readonly error: string
}

export interface RunReport {
  readonly startedAt: string
  readonly quick: boolean
  /** Empty: all sections. */
  readonly only: readonly string[]
  readonly seconds: number
  readonly environment: Environment
  readonly sections: readonly MeasuredSection[]
  readonly failed: readonly FailedSection[]
}

/** docs/benchmarks/latest.json: the newest measurement of each section, whichever run it came from. */
export interface Published {
  readonly sections: readonly MeasuredSection[]
}

/** New ones replace old ones of the same name; the order is that of `names`, and what is no section any more goes. */
export function merge(old: Published, measured: readonly MeasuredSection[], names: readonly string[]): Published {
  const newest = new Map([...old.sections, ...measured].map((section) => [section.name, section]))
  return { sections: names.flatMap((name) => newest.get(name) ?? []) }
}
