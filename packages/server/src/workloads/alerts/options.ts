import type { IntakeLog } from 'spillway/workload'

export type { AlertChange as Alert } from '../../workload.js'

export const deliveryStates = ['none', 'waiting', 'delivered', 'failed', 'dropped'] as const
export type DeliveryState = (typeof deliveryStates)[number]

/** Where alerts are sent. */
export interface Webhook {
  url: string
  /** Null: not signed. */
  secret: string | null
}

export interface AlertsOptions {
  /** Of the store's tables, quoted for SQL. */
  schema: string
  log: IntakeLog
  /** Null: alerts are recorded but not sent. */
  webhook: Webhook | null
  metrics: AlertsMetrics
  /** Epoch milliseconds, for a Retry-After that is a date. */
  now?: () => number
  /** How many may wait to be written, and how many to be delivered. Default 1,000. */
  waitingMax?: number
  timing?: Partial<AlertTiming>
}

export interface AlertTiming {
  /** How often to look for stuck operations. Default 15,000. */
  watchMs: number
  /** How often this process renews its reports, and looks for alerts without a reporter. Default 10,000. */
  renewMs: number
  /** How long a report holds without being renewed. Default 45,000. */
  holdMs: number
  /** Default 300,000. */
  sweepMs: number
  /** Between two delivery attempts: base and maximum of the back-off. Default 1,000 and 60,000. */
  retryBaseMs: number
  retryMaxMs: number
  /** Of one attempt. Default 5,000. */
  sendMs: number
}

export const alertTiming: AlertTiming = {
  watchMs: 15_000,
  renewMs: 10_000,
  holdMs: 45_000,
  sweepMs: 300_000,
  retryBaseMs: 1_000,
  retryMaxMs: 60_000,
  sendMs: 5_000,
}

interface Counter {
  inc(by?: number): void
}

/** Counted where it is decided. */
export interface AlertsMetrics {
  alerts: { labels(name: string, status: string): Counter }
  deliveries: { labels(outcome: 'delivered' | 'retried' | 'failed' | 'dropped'): Counter }
}
