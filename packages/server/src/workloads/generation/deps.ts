/** What the server hands to the generation workload: rooms that a workload does not reach itself, as what it needs of them. */

import type { IntakeApi, LogName, LogWriter, Relay, StreamLog, StreamRegistry } from 'spillway/workload'
import type { SseHub } from '../../http/sse.js'
import type { GenerationMetrics } from '../../telemetry/generation-metrics.js'
import type { Upstream, UpstreamLimits } from './upstream.js'

export interface GenerationSettings {
  /** Generations that run in this process at once. */
  concurrency: number
  pool: { perIdentity: number; total: number }
  failover: {
    enabled: boolean
    /** From acceptance to the first token, for what was queued. */
    timeoutMs: number
    retriesMax: number
    baseDelayMs: number
    maxDelayMs: number
    depthMax: number
  }
  limits: UpstreamLimits
  /** How long a native generation goes on that nobody reads. */
  detachGraceMs: number
  chatBodyBytes: number
  /** How long what is under way may go on once the process is to stop. */
  drainMs: number
}

export interface GenerationDeps {
  intake: IntakeApi
  settings: GenerationSettings
  upstream: Upstream
  registry: StreamRegistry
  /** Null: there is no such log here. */
  logOf(name: LogName): { log: StreamLog; writer: LogWriter } | null
  /** Where a stream that begins now is kept. */
  newLog(): LogName
  relay: Relay
  sse: SseHub
  metrics: GenerationMetrics
  log: {
    info(fields: object, message: string): void
    warn(fields: object, message: string): void
    error(fields: object, message: string): void
  }
}
