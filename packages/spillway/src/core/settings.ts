export interface IntakeLog {
  debug(fields: object, message: string): void
  info(fields: object, message: string): void
  warn(fields: object, message: string): void
  error(fields: object, message: string): void
}

export interface IntakeSettings {
  /**
   * What this process does. `both` (default): accepts operations and runs them. `accept`: accepts them, and runs none; the
   * effects of `apply` definitions belong to accepting. `work`: runs them, and accepts none. `direct`: accepts them and runs
   * what can run at once, and leaves the queue to others.
   */
  role: 'accept' | 'direct' | 'work' | 'both'
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
  role: 'both',
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

/** Whether it runs what is in the queue. */
export const claimsQueued = ({ role }: Pick<IntakeSettings, 'role'>): boolean => role === 'both' || role === 'work'
