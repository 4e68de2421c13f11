import { Gauge, type Registry } from 'prom-client'
import { CounterFamily } from 'spillway/workload'

export function createMessageMetrics(registry: Registry) {
  const counter = <const Labels extends readonly string[]>(name: string, help: string, labelNames: Labels) =>
    new CounterFamily({ registry, name: `spillway_messages_${name}_total`, help, labelNames })
  const pushed = counter('pushed', 'Messages that were pushed here, by what became of them', ['status'])
  const answeredHelp = 'Answers of consumers to deliveries, by what became of the message'
  const answered = counter('answered', answeredHelp, ['outcome'])
  for (const status of ['stored', 'pending', 'duplicate', 'failed']) pushed.labels(status)
  for (const outcome of ['done', 'retry', 'dead', 'skipped', 'unknown', 'lost']) answered.labels(outcome)
  return {
    pushed,
    answered,
    popped: counter('popped', 'Messages that were handed to consumers', []).labels(),
    waiting: new Gauge({
      registers: [registry],
      name: 'spillway_messages_waiting_consumers',
      help: 'Pops that wait here for messages',
    }),
  }
}
