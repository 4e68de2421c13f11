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
import { codeOf, type Intake, type Periodic, periodic, withDeadline } from 'spillway/workload'
import type { Workload } from '../../workload.js'
import { type AlertFilter, AlertLog, type AlertView, keyOf } from './alert-log.js'
import { defineDelivery } from './delivery.js'
import { alertsSql } from './generated/sql.js'
import { createAlertMetrics } from './metrics.js'
import { type Alert, type AlertsOptions, alertTiming } from './options.js'
import { alertRoutes } from './routes.js'
import { StuckWatch } from './stuck-watch.js'
import { WaitingReports } from './waiting-reports.js'

export type { Alert, AlertsOptions } from './options.js'

export const alerts: Workload = {
  name: 'alerts',
  sql: alertsSql,
  define: ({ config, intake, schema, log, registry }) => {
    const { webhookUrl: url, webhookSecret: secret } = config.alerts
    const webhook = url === null ? null : { url, secret }
    const workload = defineAlerts(intake, { schema, log, webhook, metrics: createAlertMetrics(registry) })
    return {
      offers: { alerts: workload },
      routes: (add) => add.plugin(alertRoutes(workload, config.server.pageBytesMax)),
      close: () => workload.close(),
    }
  },
}

export interface Alerts {
  readonly intake: Intake
  /** Reports a change. Returns at once; writing and sending follow later, in order. */
  report(alert: Alert): void
  /** Newest first; one more than `limit` if there are more. */
  list(filter: AlertFilter, limit: number, before: string | null): Promise<{ seq: string; view: AlertView }[]>
  /** Call before the intake is closed: writes the waiting reports if the store answers. */
  close(): Promise<void>
}

const waitingMaxDefault = 1_000
const pauseMsMin = 250
const pauseMsMax = 5_000
const closeMs = 2_000
/** Temporary faults; others would fail every attempt. */
const passing: ReadonlySet<string> = new Set(['unavailable', 'timeout', 'conflict', 'disk_full'])

type Report = Alert & { key: string }

export function defineAlerts(intake: Intake, options: AlertsOptions): Alerts {
  return new Reporting(intake, options)
}

class Reporting implements Alerts {
  readonly intake: Intake
  readonly #options: AlertsOptions
  readonly #log: AlertLog
  readonly #waiting: WaitingReports<Report>
  /** Alerts that fire in this process. */
  readonly #firing = new Map<string, Report>()
  readonly #periodic: Periodic[]
  readonly #stopSweep: () => Promise<void>
  #writing: Promise<void> | null = null
  #endPause: () => void = () => undefined
  #closing = false

  constructor(intake: Intake, options: AlertsOptions) {
    this.intake = intake
    this.#options = options
    const { schema, webhook, waitingMax = waitingMaxDefault } = options
    this.#waiting = new WaitingReports(waitingMax)
    const timing = { ...alertTiming, ...options.timing }
    // Without a webhook the type is not defined here: deliveries of other processes are left to those that can send them.
    const delivery = webhook === null ? null : defineDelivery(intake, webhook, { ...options, timing })
    this.#log = new AlertLog({
      ...{ intake, schema, delivery, waitingMax, holdMs: timing.holdMs },
      reporter: randomUUID(),
    })
    this.#periodic = [this.#repeat(timing.renewMs, 'renewing alerts', () => this.#renew())]
    this.#stopSweep = intake.sweeps.add({
      name: 'alerts',
      everyMs: timing.sweepMs,
      batch: () => this.#log.sweep(),
    })
    if (intake.settings.work) {
      const watch = new StuckWatch(intake, schema, (alert) => this.report(alert))
      this.#periodic.push(this.#repeat(timing.watchMs, 'looking for stuck operations', () => watch.look()))
    }
  }

  report(alert: Alert): void {
    const report = { ...alert, key: keyOf(alert) }
    if (alert.status === 'firing') this.#firing.set(report.key, report)
    else this.#firing.delete(report.key)
    this.#enqueue(report)
  }

  list(filter: AlertFilter, limit: number, before: string | null): Promise<{ seq: string; view: AlertView }[]> {
    return this.#log.list(filter, limit, before)
  }

  async close(): Promise<void> {
    this.#closing = true
    this.#endPause()
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
          const { changed, shed } = await this.#log.record(report)
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
      if (this.#closing || (fault !== undefined && !passing.has(codeOf(fault) ?? ''))) {
        log.error({ ...about, err: fault }, 'an alert could not be written, and is lost')
        return
      }
      if (fault !== undefined) log.warn({ ...about, err: fault }, 'an alert could not be written; it is tried again')
      await this.#pause(pauseMs)
    }
  }

  async #drop(shed: { name: string; status: string; operation: string | null }): Promise<void> {
    const { log, metrics } = this.#options
    const { name, status, operation } = shed
    metrics.deliveries.labels('dropped').inc()
    log.error({ alert: name, status, operation }, 'too many alerts wait to be delivered; one is dropped')
    if (operation === null) return
    try {
      await this.intake.store.cancel(operation, [], 'too many alerts wait to be delivered')
    } catch (fault) {
      // The delivery stops by itself when it runs: its record says that it is dropped.
      log.warn({ err: fault, operation }, 'a delivery that is not wanted any more could not be cancelled')
    }
  }

  async #renew(): Promise<void> {
    // Waiting reports renew themselves when they are written.
    if (this.#firing.size > 0 && this.#writing === null) {
      const held = await this.#log.renew()
      // These alerts expired while this process could not renew them.
      for (const [key, report] of this.#firing) if (!held.has(key)) this.#enqueue(report)
    }
    for (const alert of await this.#log.abandoned()) {
      const key = keyOf(alert)
      // It fires here again and is about to be reported.
      if (this.#firing.has(key)) continue
      const message = 'Nobody reports it any more: the processes that did have ended.'
      this.#enqueue({ ...alert, key, status: 'resolved', message })
    }
  }

  #repeat(everyMs: number, what: string, work: () => Promise<void>): Periodic {
    const whenReady = async (): Promise<void> => {
      if (this.intake.isReady) await work()
    }
    return periodic(everyMs, whenReady, {
      onFault: (fault) => this.#options.log.warn({ err: fault, retryMs: everyMs }, `${what} failed, retrying`),
    })
  }

  #pause(ms: number): Promise<void> {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms)
      timer.unref()
      this.#endPause = () => {
        clearTimeout(timer)
        resolve()
      }
    })
  }
}
