/** A process for tests to kill: it reports an alert, runs no operations itself, and says when the report is written. */

import { postgres } from '../../spillway/src/index.js'
import { openIntake } from '../../spillway/src/intake/open-intake.js'
import { createMetrics } from '../src/prometheus/metrics.js'
import { Alerts } from '../src/workloads/alerts/index.js'
import { createAlertMetrics } from '../src/workloads/alerts/metrics.js'

const [url, webhook] = process.argv.slice(2)
if (!url || !webhook) throw new Error('usage: alerts-reporter-process <database url> <webhook url>')

const nothing = (): void => undefined
const intake = await openIntake({ store: postgres({ url }), role: 'direct' })
const alerts = new Alerts(intake, {
  schema: '"spillway"',
  webhook: { url: webhook, secret: null },
  // Prints a line for each change once it is committed.
  log: { debug: nothing, info: nothing, warn: (_, message) => console.log(message), error: nothing },
  metrics: createAlertMetrics(createMetrics({ runtime: false }).registry),
})
alerts.report({
  name: 'router_intake_latency_high',
  severity: 'critical',
  status: 'firing',
  message: 'reported by a process that is killed',
  labels: { subject: 'killed' },
  annotations: { latency_p95_ms: 2_500 },
})
setInterval(nothing, 60_000)
