import type { ObjectiveName } from '@spillway/protocol/wire'
import type { IntakeLog } from 'spillway/workload'

export interface ObjectivesOptions {
  /** Of the store's tables, quoted for SQL. */
  schema: string
  log: IntakeLog
  metrics: ObjectivesMetrics
  timing?: Partial<ObjectiveTiming>
}

export interface ObjectiveTiming {
  /** How often this process adds its counts to the shared totals. Default 15,000. */
  flushMs: number
  /** How often the gauges are updated. Default 30,000. */
  readMs: number
  /** Default 300,000. */
  sweepMs: number
}

export const objectiveTiming: ObjectiveTiming = { flushMs: 15_000, readMs: 30_000, sweepMs: 300_000 }

interface Gauge {
  set(labels: { objective: ObjectiveName }, value: number): void
}

export interface ObjectivesMetrics {
  errorBudgetLeft: Gauge
  burnRate: Gauge
}
