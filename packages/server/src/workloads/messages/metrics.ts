import { Gauge, type Registry } from '@prometheus-io/client'
import { CounterFamily } from 'spillway/workload'

export function createMessageMetrics(registry: Registry) {
  const pushed = new CounterFamily({
    registry,
    name: 'spillway_messages_pushed_total',
    help: 'Messages that were pushed here, by what became of them',
    labelNames: ['status'],
  })
  const answered = new CounterFamily({
    registry,
    name: 'spillway_messages_answered_total',
    help: 'Answers of consumers to deliveries, by what became of the message',
    labelNames: ['outcome'],
  })
  for (const status of ['stored', 'pending', 'duplicate', 'failed']) pushed.labels(status)
  for (const outcome of ['done', 'retry', 'dead', 'skipped', 'unknown', 'lost']) answered.labels(outcome)
  return {
    pushed,
    answered,
    popped: new CounterFamily({
      registry,
      name: 'spillway_messages_popped_total',
      help: 'Messages that were handed to consumers',
      labelNames: [],
    }).labels(),
    waiting: new Gauge({
      registers: [registry],
      name: 'spillway_messages_waiting_consumers',
      help: 'Pops that wait here for messages',
    }),
  }
}
