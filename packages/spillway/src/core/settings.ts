export interface IntakeLog {
  debug(fields: object, message: string): void
  info(fields: object, message: string): void
  warn(fields: object, message: string): void
  error(fields: object, message: string): void
}

export interface IntakeSettings {
  /** Claim and run queued operations in this process. Default true. */
  work: boolean
  concurrency: number
  leaseMs: number
  directWaitMs: number
  retryBaseMs: number
  retryMaxMs: number
  retentionMs: number
  idempotencyTtlMs: number
  /** Maximum number of operations held, of all types; beyond it `queue_full`. */
  pendingMax: number
  acceptWaitBudgetMs: number
  /** Above this load, operations are queued instead of executed. */
  busyQueueAbove: number
  storeTimeoutMs: number
  drainMs: number
  pressureLoopDelayMs: number
  pressureInflightMax: number
}

export const intakeDefaults: IntakeSettings = {
  work: true,
  concurrency: 64,
  leaseMs: 15_000,
  directWaitMs: 5_000,
  retryBaseMs: 1_000,
  retryMaxMs: 60_000,
  retentionMs: 3_600_000,
  idempotencyTtlMs: 86_400_000,
  pendingMax: 1_000_000,
  acceptWaitBudgetMs: 250,
  busyQueueAbove: 0.7,
  storeTimeoutMs: 2_000,
  drainMs: 20_000,
  pressureLoopDelayMs: 500,
  pressureInflightMax: 10_000,
}
