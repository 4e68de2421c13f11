import type { PetitionState, PetitionType } from '@spillway/protocol/wire'
import type { IntakeLog } from 'spillway/workload'

export interface PetitionsSettings {
  /** Null: any. */
  realms: readonly string[] | null
  queueThreshold: number
  queueHysteresis: number
  queueCacheTtlMs: number
  retryAfter: number
  ratePerHour: number
  rateWindowMinutes: number
  rateTtlHours: number
  /** Null: no limit. */
  rateRealmPerHour: number | null
  rateGlobalPerHour: number | null
  typePerHour: Readonly<Record<PetitionType, number | null>>
}

export interface PetitionsOptions {
  settings: PetitionsSettings
  /** Of the store's tables, quoted for SQL. */
  schema: string
  /** Whether callers are authenticated. */
  isAuthenticated: boolean
  log: IntakeLog
  metrics: PetitionsMetrics
}

interface Counter {
  inc(): void
}

/** Counted where it is decided. */
export interface PetitionsMetrics {
  queueDepth: { set(labels: { state: PetitionState }, value: number): void }
  queueThreshold: { set(value: number): void }
  queueRejections: Counter
  rateHits: { inc(submitter: string): void }
  rateRemaining: { set(submitter: string, left: number): void }
  rateAllowed: Counter
  rateBlocked: Counter
  submitted: { labels(type: PetitionType): Counter }
  fates: { labels(fate: PetitionState): Counter }
}
