/** A process for tests to kill: it reports an alert, runs no operations itself, and says when the report is written. */

import { createIntake, postgres } from '../../spillway/src/index.js'
import { createAlertMetrics } from '../src/telemetry/alert-metrics.js'
import { createMetrics } from '../src/telemetry/metrics.js'
import { defineAlerts } from '../src/workloads/alerts/index.js'

const [url, webhook] = process.argv.slice(2)
if (!url || !webhook) throw new Error('usage: alerts-reporter-process <database url> <webhook url>')

const nothing = (): void => undefined
const intake = await createIntake({ store: postgres({ url }), work: false })
const alerts = defineAlerts(intake, {
  schema: '"spillway"',
  webhook: { url: webhook, secret: null },
  // A change is told by a line once it is committed.
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
