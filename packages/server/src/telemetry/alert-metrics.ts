import { Gauge, type Registry } from '@prometheus-io/client'
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

export function createObjectiveMetrics(registry: Registry) {
  const labelNames = ['objective'] as const
  return {
    errorBudgetLeft: new Gauge({
      registers: [registry],
      name: 'spillway_slo_error_budget_left',
      help: 'Part of the errors that an objective allows which is left: 1 all, 0 none, negative when overspent',
      labelNames,
    }),
    burnRate: new Gauge({
      registers: [registry],
      name: 'spillway_slo_burn_rate',
      help: 'Error rate of the last hour by the rate that the objective allows',
      labelNames,
    }),
  }
}
