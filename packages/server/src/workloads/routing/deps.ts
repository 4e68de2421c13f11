/** The parts of the server that the routing workload needs but does not import itself. */
import type { Alert, AlertName, ObjectiveName } from '@spillway/protocol/wire'
import type { IntakeApi, LatencyWindow, LevelHold, RouterPressure } from 'spillway/workload'
import type { RouterBroker } from '../../brokers/port.js'
import type { RoutingMetrics } from '../../telemetry/routing-metrics.js'

/** A change of one of the router's alerts, as it is reported. */
export interface AlertChange extends Omit<Alert, 'alert_name' | 'timestamp'> {
  name: AlertName
}

type Three = readonly [warn: number, critical: number, overload: number]

export interface RoutingSettings {
  isRouter: boolean
  isGateway: boolean
  maxDeliver: number
  concurrency: number
  simulateDelayMs: number
  retryAfterSeconds: number
  bounds: Readonly<Record<'backlog' | 'latencyMs' | 'inFlight', Three>>
  metricsUrls: readonly string[]
  checkIntervalMs: number
  checkTimeoutMs: number
  perMinute: { decide: number; messages: number; registry: number }
  rateReduction: number
  rateMin: number
  bodyLimitBytes: number
  pageBytesMax: number
  keyTtlMs: number
  isAuthenticated: boolean
}

export interface RoutingDeps {
  intake: IntakeApi
  /** Of the store's tables, quoted for SQL. */
  schema: string
  settings: RoutingSettings
  subject: string
  /** Null: the operation queue is used instead. */
  broker: RouterBroker | null
  /** The concurrency of all routers together, as far as this process knows. */
  routersConcurrency(): number
  /** Null: unknown. */
  backlog(): Promise<{ pending: number; ackPending: number } | null>
  pressure: Pick<RouterPressure, 'level' | 'observe'>
  latency: Pick<LatencyWindow, 'add' | 'percentiles'>
  makeHold(): LevelHold
  alerts: { report(alert: AlertChange): void }
  objectives: { count(objective: ObjectiveName, good: number, total: number): void }
  metrics: RoutingMetrics
  log: {
    info(object: object, text: string): void
    warn(object: object, text: string): void
    error(object: object, text: string): void
  }
}
