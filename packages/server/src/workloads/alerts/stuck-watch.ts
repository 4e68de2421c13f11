/** Reports operations that have run for more than three times their timeout, and reports when there are none left. */
import type { Intake } from 'spillway/workload'
import type { AlertChange } from '../../workload.js'

const timesTimeout = 3

interface Stuck extends Record<string, unknown> {
  type: string
  id: string
  queue: string
  partition: string
  seconds: number
}

/** Returns a look, to be repeated. */
export function stuckWatch(intake: Intake, schema: string, report: (alert: AlertChange) => void): () => Promise<void> {
  const firing = new Map<string, AlertChange>()
  return async () => {
    const { rows } = await intake.read<Stuck>(
      `SELECT type, id, queue, partition, seconds FROM ${schema}.stuck_operations($1)`,
      [timesTimeout],
    )
    const stuck = new Set(rows.map(({ type }) => type))
    for (const [type, alert] of firing) {
      if (stuck.has(type)) continue
      firing.delete(type)
      report({ ...alert, status: 'resolved', message: `No operation of the type ${type} is stuck any more.` })
    }
    for (const { type, id, queue, partition, seconds } of rows) {
      if (firing.has(type)) continue
      const alert: AlertChange = {
        name: 'spillway_operation_stuck',
        severity: 'critical',
        status: 'firing',
        message: `An operation of the type ${type} has been running for more than ${timesTimeout} times its timeout.`,
        labels: { type },
        annotations: { operation_id: id, queue, partition, seconds: Math.round(seconds) },
      }
      firing.set(type, alert)
      report(alert)
    }
  }
}
