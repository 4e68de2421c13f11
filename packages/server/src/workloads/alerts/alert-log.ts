/** Records alerts and reads the records. sql/functions explains the statements. */
import type { AlertName, AlertStatus, Alert as WireAlert } from '@spillway/protocol/wire'
import {
  canonicalJson,
  type Definition,
  digestUuid,
  type Intake,
  newOperationId,
  retryConflicts,
  type SweptBatch,
  type Tx,
} from 'spillway/workload'
import type { AlertChange } from '../../workload.js'
import type { DeliveryOrder } from './delivery.js'

export const deliveryStates = ['none', 'waiting', 'delivered', 'failed', 'dropped'] as const

export interface AlertView extends WireAlert {
  /** Of the change. */
  id: string
  /** Null: the record was removed, by age or by number. */
  delivery: (typeof deliveryStates)[number] | null
}

export interface AlertFilter {
  status: AlertStatus | null
  name: AlertName | null
  /** The current state of each alert, instead of every change. */
  active: boolean
}

/** A change to record. `key` stands for name and labels. */
export type Report = AlertChange & { key: string }

type Shed = Pick<AlertChange, 'name' | 'status'> & { operation: string | null }

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

export const keyOf = ({ name, labels }: Pick<AlertChange, 'name' | 'labels'>): string =>
  digestUuid(`alert\0${canonicalJson([name, labels])}`)

export class AlertLog {
  readonly #o: AlertLogOptions

  constructor(options: AlertLogOptions) {
    this.#o = options
  }

  /** The change, its record and its delivery are one commit, so a second report of the same change does nothing. */
  async record(report: Report): Promise<Recorded> {
    const { intake, delivery } = this.#o
    const recorded = await retryConflicts(attemptsMax, () =>
      intake.transaction(async (tx): Promise<Recorded> => {
        const id = newOperationId()
        const at = await this.#change(tx, report, id)
        if (at === null || delivery === null) return { changed: at !== null, shed: [] }
        return { changed: true, shed: await this.#deliver(tx, delivery, report, id, at) }
      }),
    )
    // The wake-up was sent before the commit, so workers found nothing then.
    if (recorded.changed && delivery !== null) intake.wakeAll()
    return recorded
  }

  async #change(tx: Tx, report: Report, id: string): Promise<Date | null> {
    const { schema, reporter, holdMs, delivery } = this.#o
    const { key, name, labels, status, severity, message, annotations } = report
    const { rows } = await tx.query<{ at: Date | null }>(
      `SELECT ${schema}.alert_report($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) AS at`,
      [
        ...[key, id, name, JSON.stringify(labels), status, severity, message, JSON.stringify(annotations)],
        ...[reporter, holdMs, delivery === null ? 'none' : 'waiting'],
      ],
    )
    return rows[0]?.at ?? null
  }

  async #deliver(
    tx: Tx,
    delivery: Definition<DeliveryOrder>,
    { key, name: alert_name, severity, message, labels, annotations, status }: Report,
    id: string,
    at: Date,
  ): Promise<Shed[]> {
    const { intake, schema, waitingMax } = this.#o
    const notice = { alert_name, severity, message, labels, annotations, status, timestamp: at.toISOString() }
    const answer = await intake.enqueue(delivery, { id, key, notice }, { tx, identity })
    // The queue refuses work now; the change is not recorded either, and is retried.
    if (answer.kind !== 'queued') {
      throw Object.assign(new Error('the delivery could not be queued'), { code: 'unavailable' })
    }
    await tx.query(`UPDATE ${schema}.alerts a SET operation = $2 WHERE a.id = $1`, [id, answer.operationId])
    const { rows } = await tx.query<Shed>(`SELECT name, status, operation FROM ${schema}.alert_shed($1)`, [waitingMax])
    return rows
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
  async abandoned(): Promise<AlertChange[]> {
    const { intake, schema } = this.#o
    const { rows } = await intake.read<AlertChange & Record<string, unknown>>(
      `SELECT s.name, s.labels, s.severity, s.status, s.message, s.annotations FROM ${schema}.alert_states s
       WHERE s.status = 'firing' AND NOT EXISTS (SELECT FROM ${schema}.alert_reporters r WHERE r.key = s.key AND r.until > ${schema}.clock())`,
    )
    return rows
  }

  /** Newest first, after `before`; `limit` + 1 of them if there are more. */
  async list(filter: AlertFilter, limit: number, before: string | null): Promise<{ seq: string; view: AlertView }[]> {
    const { intake, schema } = this.#o
    const from = filter.active
      ? `(SELECT s.seq, s.alert AS id, s.name, s.severity, s.status, s.message, s.labels, s.annotations, s.at, c.delivery
          FROM ${schema}.alert_states s LEFT JOIN ${schema}.alerts c ON c.seq = s.seq)`
      : `${schema}.alerts`
    const { rows } = await intake.read<Omit<AlertView, 'timestamp'> & { seq: string; timestamp: Date }>(
      `SELECT a.seq::text AS seq, a.id, a.name AS alert_name, a.severity, a.status, a.message, a.labels, a.annotations, a.at AS timestamp,
         a.delivery FROM ${from} a
       WHERE ($1::text IS NULL OR a.status = $1) AND ($2::text IS NULL OR a.name = $2) AND ($3::bigint IS NULL OR a.seq < $3)
       ORDER BY a.seq DESC LIMIT $4`,
      [filter.status, filter.name, before, limit + 1],
    )
    return rows.map(({ seq, ...row }) => ({ seq, view: { ...row, timestamp: row.timestamp.toISOString() } }))
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
