/**
 * Names of the contract that no part of this version reads. Taking them in silence would let an operator believe that a
 * limit is in force, so each is refused with the reason. A workload that is mounted moves its names to the settings table.
 */
const namesByWorkload = {
  generation: [
    'REDIS_URL',
    'GENERATION_UPSTREAM_URL',
    'GENERATION_UPSTREAM_KEY',
    'GENERATION_CONCURRENCY',
    'CONNECTION_POOL_MAX_PER_USER',
    'CONNECTION_POOL_MAX_GLOBAL',
    'QUEUE_FAILOVER_ENABLED',
    'QUEUE_FAILOVER_TIMEOUT_SECONDS',
    'QUEUE_FAILOVER_MAX_RETRIES',
    'QUEUE_FAILOVER_BASE_DELAY_MS',
    'QUEUE_FAILOVER_MAX_DELAY_MS',
    'QUEUE_FAILOVER_MAX_DEPTH',
    'STREAM_FIRST_TOKEN_SECONDS',
    'STREAM_IDLE_SECONDS',
    'STREAM_TOTAL_SECONDS',
    'STREAM_RETENTION_SECONDS',
    'STREAM_DETACH_GRACE_SECONDS',
  ],
} as const

/** Variable name → the workload that will read it. */
export const unmountedNames: ReadonlyMap<string, string> = new Map(
  Object.entries(namesByWorkload).flatMap(([workload, names]) => names.map((name) => [name, workload] as const)),
)
