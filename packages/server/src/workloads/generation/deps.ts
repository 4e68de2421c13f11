/** The parts of the server that the generation workload needs but does not import itself. */

import type { IntakeApi, LogName, LogWriter, Relay, StreamLog, StreamRegistry } from 'spillway/workload'
import type { SseHub } from '../../http/sse.js'
import type { GenerationMetrics } from '../../telemetry/generation-metrics.js'
import type { Upstream, UpstreamLimits } from './upstream.js'

export interface GenerationSettings {
  /** Maximum generations running in this process. */
  concurrency: number
  pool: { perIdentity: number; total: number }
  failover: {
    enabled: boolean
    /** From acceptance to the first token, for queued generations. */
    timeoutMs: number
    retriesMax: number
    baseDelayMs: number
    maxDelayMs: number
    depthMax: number
  }
  limits: UpstreamLimits
  /** How long a native generation continues without a reader. */
  detachGraceMs: number
  chatBodyBytes: number
  /** How long running generations may continue after the process is asked to stop. */
  drainMs: number
}

export interface GenerationDeps {
  intake: IntakeApi
  settings: GenerationSettings
  upstream: Upstream
  registry: StreamRegistry
  /** Null: this process has no such log. */
  logOf(name: LogName): { log: StreamLog; writer: LogWriter } | null
  /** The log for new streams. */
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
