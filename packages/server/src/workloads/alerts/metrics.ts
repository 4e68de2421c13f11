import type { Registry } from 'prom-client'
import { CounterFamily } from 'spillway/workload'

export function createAlertMetrics(registry: Registry) {
  const deliveries = new CounterFamily({
    registry,
    name: 'spillway_alert_deliveries_total',
    help: 'Attempts to deliver alerts from here, by what became of them',
    labelNames: ['outcome'],
  })
  for (const outcome of ['delivered', 'retried', 'failed', 'dropped']) deliveries.labels(outcome)
  return {
    alerts: new CounterFamily({
      registry,
      name: 'spillway_alerts_total',
      help: 'Changes of alerts that were recorded here',
      labelNames: ['alert_name', 'status'],
    }),
    deliveries,
  }
}
