/** Reports operations that have run for more than three times their timeout, and reports when there are none left. */
import type { Intake } from 'spillway/workload'
import type { Alert } from './options.js'

const timesTimeout = 3

interface Stuck extends Record<string, unknown> {
  type: string
  id: string
  queue: string
  partition: string
  seconds: number
}

export class StuckWatch {
  readonly #intake: Intake
  readonly #schema: string
  readonly #report: (alert: Alert) => void
  readonly #firing = new Map<string, Alert>()

  constructor(intake: Intake, schema: string, report: (alert: Alert) => void) {
    this.#intake = intake
    this.#schema = schema
    this.#report = report
  }

  async look(): Promise<void> {
    const { rows } = await this.#intake.read<Stuck>(
      `SELECT type, id, queue, partition, seconds FROM ${this.#schema}.stuck_operations($1)`,
      [timesTimeout],
    )
    const stuck = new Set(rows.map(({ type }) => type))
    for (const [type, alert] of this.#firing) {
      if (stuck.has(type)) continue
      this.#firing.delete(type)
      this.#report({ ...alert, status: 'resolved', message: `No operation of the type ${type} is stuck any more.` })
    }
    for (const { type, id, queue, partition, seconds } of rows) {
      if (this.#firing.has(type)) continue
      const alert: Alert = {
        name: 'spillway_operation_stuck',
        severity: 'critical',
        status: 'firing',
        message: `An operation of the type ${type} has been running for more than ${timesTimeout} times its timeout.`,
        labels: { type },
        annotations: { operation_id: id, queue, partition, seconds: Math.round(seconds) },
      }
      this.#firing.set(type, alert)
      this.#report(alert)
    }
  }
}
