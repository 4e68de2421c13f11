import { Gauge, type Registry } from 'prom-client'

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
