/**
 * Alerts (docs/guides/routing.md#alerts-and-objectives): recorded, delivered, listed. The path of a report:
 *
 *   reported ──one at a time──► written ──nothing has changed, or others still see it──► (done)
 *      │                            └──the change is recorded──► delivered by the queue (delivery.ts)
 *      │──the store is unavailable──► reported, after a pause
 *      └──too many wait──► dropped
 *
 * Alerts that fire here are reported again regularly (`renew`). A report expires, so that alerts do not outlive the process
 * that saw them.
 */
import { randomUUID } from 'node:crypto'
import { setTimeout as delay } from 'node:timers/promises'
import { claimsQueued, codeOf, type Intake, type IntakeLog, type Periodic, withDeadline } from 'spillway/workload'
import { repeatWhenReady } from '../../time.js'
import type { AlertChange, Workload } from '../../workload.js'
import { AlertLog, keyOf, type Recorded, type Report } from './alert-log.js'
import { defineDelivery } from './delivery.js'
import { alertsSql } from './generated/sql.js'
import { createAlertMetrics } from './metrics.js'
import { alertRoutes } from './routes.js'
import { stuckWatch } from './stuck-watch.js'
import { WaitingReports } from './waiting-reports.js'
import type { Webhook } from './webhook.js'

export const alerts: Workload = {
  name: 'alerts',
  sql: alertsSql,
  define: ({ config, intake, schema, log, registry }) => {
    const { webhookUrl: url, webhookSecret: secret } = config.alerts
    const webhook = url === null ? null : { url, secret }
    const workload = new Alerts(intake, { schema, log, webhook, metrics: createAlertMetrics(registry) })
    return {
      offers: { alerts: workload },
      routes: (add) => add.plugin(alertRoutes(workload, config.server.pageBytesMax)),
      close: () => workload.close(),
    }
  },
}

export interface AlertsOptions {
  /** Of the store's tables, quoted for SQL. */
  schema: string
  log: IntakeLog
  /** Null: alerts are recorded but not sent. */
  webhook: Webhook | null
  metrics: ReturnType<typeof createAlertMetrics>
  /** How many may wait to be written, and how many to be delivered. Default 1,000. */
  waitingMax?: number
  timing?: Partial<AlertTiming>
}

const defaultTiming = {
  /** How often to look for stuck operations. */
  watchMs: 15_000,
  /** How often this process renews its reports, and looks for alerts without a reporter. */
  renewMs: 10_000,
  /** How long a report holds without being renewed. */
  holdMs: 45_000,
  sweepMs: 300_000,
  /** Between two delivery attempts: base and maximum of the back-off. */
  retryBaseMs: 1_000,
  retryMaxMs: 60_000,
  /** Of one attempt. */
  sendMs: 5_000,
}

export type AlertTiming = typeof defaultTiming

const waitingMaxDefault = 1_000
const pauseMsMin = 250
const pauseMsMax = 5_000
const closeMs = 2_000
/** Temporary faults; others would fail every attempt. */
const passing: ReadonlySet<string> = new Set(['unavailable', 'timeout', 'conflict', 'disk_full'])

export class Alerts {
  readonly intake: Intake
  readonly records: AlertLog
  readonly #options: AlertsOptions
  readonly #waiting: WaitingReports<Report>
  /** Alerts that fire in this process. */
  readonly #firing = new Map<string, Report>()
  readonly #periodic: Periodic[]
  readonly #stopSweep: () => Promise<void>
  readonly #closing = new AbortController()
  #writing: Promise<void> | null = null

  constructor(intake: Intake, options: AlertsOptions) {
    this.intake = intake
    this.#options = options
    const { schema, log, webhook, waitingMax = waitingMaxDefault } = options
    const timing = { ...defaultTiming, ...options.timing }
    this.#waiting = new WaitingReports(waitingMax)
    // Without a webhook the type is not defined here: deliveries of other processes are left to those that can send them.
    const delivery = webhook === null ? null : defineDelivery(intake, webhook, options, timing)
    const { holdMs } = timing
    this.records = new AlertLog({ intake, schema, delivery, waitingMax, holdMs, reporter: randomUUID() })
    const repeat = (everyMs: number, what: string, work: () => Promise<void>) =>
      repeatWhenReady(intake, log, everyMs, what, work)
    this.#periodic = [repeat(timing.renewMs, 'renewing alerts', () => this.#renew())]
    if (claimsQueued(intake.settings)) {
      const look = stuckWatch(intake, schema, (alert) => this.report(alert))
      this.#periodic.push(repeat(timing.watchMs, 'looking for stuck operations', look))
    }
    const batch = () => this.records.sweep()
    this.#stopSweep = intake.sweeps.add({ name: 'alerts', everyMs: timing.sweepMs, batch })
  }

  /** Reports a change. Returns at once; writing and sending follow later, in order. */
  report(alert: AlertChange): void {
    const report = { ...alert, key: keyOf(alert) }
    if (alert.status === 'firing') this.#firing.set(report.key, report)
    else this.#firing.delete(report.key)
    this.#enqueue(report)
  }

  /** Call before the intake is closed: writes the waiting reports if the store answers. */
  async close(): Promise<void> {
    this.#closing.abort()
    const ended = [...this.#periodic.map((task) => task.stop()), this.#stopSweep(), this.#writing]
    await withDeadline(Promise.all(ended), closeMs, () => undefined)
  }

  #enqueue(report: Report): void {
    const dropped = this.#waiting.add(report)
    for (const { name, status, labels } of dropped) {
      this.#options.log.error({ alert: name, status, labels }, 'too many alerts wait to be written; one is dropped')
      this.#options.metrics.deliveries.labels('dropped').inc()
    }
    this.#writing ??= this.#writeAll().finally(() => {
      this.#writing = null
    })
  }

  async #writeAll(): Promise<void> {
    for (let report = this.#waiting.take(); report !== undefined; report = this.#waiting.take()) {
      await this.#write(report)
    }
  }

  /** Retries until it is written, or can never be. */
  async #write(report: Report): Promise<void> {
    const { log, metrics } = this.#options
    const about = { alert: report.name, status: report.status, labels: report.labels }
    for (let pauseMs = pauseMsMin; ; pauseMs = Math.min(pauseMsMax, pauseMs * 2)) {
      let fault: unknown
      if (this.intake.presence.isReady) {
        try {
          const { changed, shed } = await this.records.record(report)
          if (changed) {
            metrics.alerts.labels(report.name, report.status).inc()
            log[report.status === 'firing' ? 'warn' : 'info']({ ...about, ...report.annotations }, report.message)
          }
          for (const dropped of shed) await this.#drop(dropped)
          return
        } catch (caught) {
          fault = caught
        }
      }
      if (this.#closing.signal.aborted || (fault !== undefined && !passing.has(codeOf(fault) ?? ''))) {
        log.error({ ...about, err: fault }, 'could not store an alert; it is lost')
        return
      }
      if (fault !== undefined) log.warn({ ...about, err: fault }, 'could not store an alert, retrying')
      // Ends early on close.
      await delay(pauseMs, undefined, { signal: this.#closing.signal, ref: false }).catch(() => undefined)
    }
  }

  async #drop({ name, status, operation }: Recorded['shed'][number]): Promise<void> {
    const { log, metrics } = this.#options
    metrics.deliveries.labels('dropped').inc()
    log.error({ alert: name, status, operation }, 'too many alerts wait to be delivered; one is dropped')
    if (operation === null) return
    try {
      await this.intake.store.cancel(operation, [], 'too many alerts wait to be delivered')
    } catch (fault) {
      // The delivery stops by itself when it runs: its record says that it is dropped.
      log.warn({ err: fault, operation }, 'could not cancel a delivery that is no longer wanted')
    }
  }

  async #renew(): Promise<void> {
    // Waiting reports renew themselves when they are written.
    if (this.#firing.size > 0 && this.#writing === null) {
      const held = await this.records.renew()
      // These alerts expired while this process could not renew them.
      for (const [key, report] of this.#firing) if (!held.has(key)) this.#enqueue(report)
    }
    for (const alert of await this.records.abandoned()) {
      const key = keyOf(alert)
      // It fires here again and is about to be reported.
      if (this.#firing.has(key)) continue
      const message = 'Nobody reports it any more: the processes that did have ended.'
      this.#enqueue({ ...alert, key, status: 'resolved', message })
    }
  }
}
