/** Records alerts and reads the records. sql/functions explains the statements. */
import type { AlertName, AlertSeverity, AlertStatus, Alert as WireAlert } from '@spillway/protocol/wire'
import {
  canonicalJson,
  type Definition,
  digestUuid,
  type Intake,
  newOperationId,
  retryConflicts,
  type SweptBatch,
} from 'spillway/workload'
import type { DeliveryOrder } from './delivery.js'
import type { Alert, DeliveryState } from './options.js'

export interface AlertView extends WireAlert {
  /** Of the change. */
  id: string
  /** Null: the record was removed, by age or by number. */
  delivery: DeliveryState | null
}

export interface AlertFilter {
  status: AlertStatus | null
  name: AlertName | null
  /** The current state of each alert, instead of every change. */
  active: boolean
}

interface Row extends Record<string, unknown> {
  seq: string
  id: string
  name: AlertName
  severity: AlertSeverity
  status: AlertStatus
  message: string
  labels: Record<string, string>
  annotations: Record<string, number | string>
  at: Date
  delivery: DeliveryState | null
}

interface Shed extends Record<string, unknown> {
  id: string
  name: string
  status: AlertStatus
  operation: string | null
}

export interface Recorded {
  /** False: the state was the same, or other processes still report it. */
  changed: boolean
  /** Alerts dropped from the delivery queue to make space. */
  shed: Shed[]
}

export interface AlertLogOptions {
  intake: Intake
  schema: string
  /** Null: nothing is delivered. */
  delivery: Definition<DeliveryOrder> | null
  /** This process, as a reporter. */
  reporter: string
  holdMs: number
  /** How many may wait for delivery. */
  waitingMax: number
}

const attemptsMax = 3
const identity = 'spillway:alerts'
const keptDays = 30
const keptRows = 10_000
/** Per transaction. */
const sweepRows = 1_000

/** The queue refuses work now; the change is not recorded either, and is retried. */
class DeliveryRefused extends Error {
  override readonly name = 'DeliveryRefused'
  readonly code = 'unavailable'
}

export const keyOf = ({ name, labels }: Pick<Alert, 'name' | 'labels'>): string =>
  digestUuid(`alert\0${canonicalJson([name, labels])}`)

export class AlertLog {
  readonly #o: AlertLogOptions

  constructor(options: AlertLogOptions) {
    this.#o = options
  }

  /** The change, its record and its delivery are one commit, so a second report of the same change does nothing. */
  async record(alert: Alert): Promise<Recorded> {
    const { intake, delivery } = this.#o
    const recorded = await retryConflicts(attemptsMax, () =>
      intake.transaction(async (tx): Promise<Recorded> => {
        const key = keyOf(alert)
        const id = newOperationId()
        const at = await this.#change(tx, alert, key, id)
        if (at === null || delivery === null) return { changed: at !== null, shed: [] }
        const { name, severity, message, labels, annotations, status } = alert
        const notice = { alert_name: name, severity, message, labels, annotations, status, timestamp: at.toISOString() }
        const answer = await intake.enqueue(delivery, { id, key, notice }, tx, { identity })
        if (answer.kind !== 'queued') throw new DeliveryRefused('the delivery could not be queued')
        await tx.query(`UPDATE ${this.#o.schema}.alerts a SET operation = $2 WHERE a.id = $1`, [id, answer.operationId])
        const { rows } = await tx.query<Shed>(
          `SELECT id, name, status, operation FROM ${this.#o.schema}.alert_shed($1)`,
          [this.#o.waitingMax],
        )
        return { changed: true, shed: rows }
      }),
    )
    // The wake-up was sent before the commit, so workers found nothing then.
    if (recorded.changed && delivery !== null) intake.wakeAll()
    return recorded
  }

  async #change(tx: { query: Intake['read'] }, alert: Alert, key: string, id: string): Promise<Date | null> {
    const { schema, reporter, holdMs, delivery } = this.#o
    const { name, labels, status, severity, message, annotations } = alert
    const { rows } = await tx.query<{ at: Date | null }>(
      `SELECT ${schema}.alert_report($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) AS at`,
      [
        ...[key, id, name, JSON.stringify(labels), status, severity, message, JSON.stringify(annotations)],
        ...[reporter, holdMs, delivery === null ? 'none' : 'waiting'],
      ],
    )
    return rows[0]?.at ?? null
  }

  /** Renews this process's reports. Returns the keys of its alerts that are still firing. */
  async renew(): Promise<Set<string>> {
    const { intake, schema, reporter, holdMs } = this.#o
    const { rows } = await intake.transaction((tx) =>
      tx.query<{ key: string }>(
        `UPDATE ${schema}.alert_reporters r SET until = ${schema}.clock() + $2 * interval '1 ms'
         FROM ${schema}.alert_states s WHERE r.reporter = $1 AND s.key = r.key AND s.status = 'firing' RETURNING r.key`,
        [reporter, holdMs],
      ),
    )
    return new Set(rows.map(({ key }) => key))
  }

  /** Firing alerts whose reporters have all died, as last reported. */
  async abandoned(): Promise<Alert[]> {
    const { intake, schema } = this.#o
    const { rows } = await intake.read<Row>(
      `SELECT s.name, s.labels, s.severity, s.status, s.message, s.annotations FROM ${schema}.alert_states s
       WHERE s.status = 'firing' AND NOT EXISTS (SELECT FROM ${schema}.alert_reporters r WHERE r.key = s.key AND r.until > ${schema}.clock())`,
    )
    return rows.map(({ name, labels, severity, message, annotations, status }) => ({
      ...{ name, labels, severity, message, annotations, status },
    }))
  }

  /** Newest first, after `before`; `limit` + 1 of them if there are more. */
  async list(filter: AlertFilter, limit: number, before: string | null): Promise<{ seq: string; view: AlertView }[]> {
    const { intake, schema } = this.#o
    const from = filter.active
      ? `(SELECT s.seq, s.alert AS id, s.name, s.severity, s.status, s.message, s.labels, s.annotations, s.at, c.delivery
          FROM ${schema}.alert_states s LEFT JOIN ${schema}.alerts c ON c.seq = s.seq)`
      : `${schema}.alerts`
    const { rows } = await intake.read<Row>(
      `SELECT a.seq::text AS seq, a.id, a.name, a.severity, a.status, a.message, a.labels, a.annotations, a.at, a.delivery FROM ${from} a
       WHERE ($1::text IS NULL OR a.status = $1) AND ($2::text IS NULL OR a.name = $2) AND ($3::bigint IS NULL OR a.seq < $3)
       ORDER BY a.seq DESC LIMIT $4`,
      [filter.status, filter.name, before, limit + 1],
    )
    return rows.map(({ seq, name, at, ...rest }) => ({
      seq,
      view: {
        id: rest.id,
        alert_name: name,
        severity: rest.severity,
        status: rest.status,
        message: rest.message,
        labels: rest.labels,
        annotations: rest.annotations,
        timestamp: at.toISOString(),
        delivery: rest.delivery,
      },
    }))
  }

  /** Removes a batch of old alerts. */
  async sweep(): Promise<SweptBatch> {
    const { intake, schema } = this.#o
    const { rows } = await intake.transaction((tx) =>
      tx.query<{ removed: number | null }>(`SELECT ${schema}.alert_sweep($1, $2, $3) AS removed`, [
        keptDays,
        keptRows,
        sweepRows,
      ]),
    )
    const alerts = rows[0]?.removed ?? 0
    return { removed: { alerts }, isFull: alerts >= sweepRows }
  }
}
