import { Gauge, type Registry } from 'prom-client'
import { CounterFamily, HistogramFamily } from 'spillway/workload'
import type { RouterStatus } from './router-watch.js'

const latencySeconds = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30]
const gatewayStatuses: readonly RouterStatus[] = ['inactive', 'warning', 'active', 'unknown']

/** The router's metrics, with the names that its operators know. All series exist before the first message. */
export function createRoutingMetrics(registry: Registry, labels: { subject: string; consumer: string }) {
  const { subject, consumer } = labels
  const counter = <const N extends readonly string[]>(name: string, help: string, labelNames: N) =>
    new CounterFamily({ registry, name, help, labelNames })
  const gauge = <const N extends string>(name: string, help: string, labelNames: readonly N[]) =>
    new Gauge({ registers: [registry], name, help, labelNames })
  const ofBroker = (name: string, help: string) => gauge(name, help, ['subject', 'consumer']).labels(labels)
  const countOfBroker = (name: string, help: string) =>
    counter(name, help, ['subject', 'consumer']).labels(subject, consumer)
  const ofSubject = (name: string, help: string) => gauge(name, help, ['subject']).labels({ subject })
  const triggerHelp = 'Times that a signal brought about a higher level of backpressure'
  const triggered = counter('router_intake_backpressure_triggered_total', triggerHelp, ['subject', 'trigger'])
  for (const trigger of ['backlog', 'latency', 'inflight']) triggered.labels(subject, trigger)
  const rejectionHelp = 'Requests refused because the router is overloaded'
  const rejections = counter('router_intake_backpressure_rejections_total', rejectionHelp, ['subject', 'reason'])
  rejections.labels(subject, 'router_overloaded')
  const latency = new HistogramFamily({
    registry,
    name: 'router_intake_processing_latency_seconds',
    help: 'From the arrival of a message to its ack',
    labelNames: ['subject', 'status'],
    buckets: latencySeconds,
  })
  // Prometheus does not count the first value of a late series as an increase.
  for (const status of ['ok', 'undecided', 'invalid', 'expired', 'exhausted']) latency.labels(subject, status)
  const deathHelp = 'Messages that went to the dead letters'
  const deadLetters = counter('router_intake_dead_letters_total', deathHelp, ['subject', 'reason'])
  return {
    pending: ofBroker('router_jetstream_pending_messages', 'Messages not handed out yet'),
    ackPending: ofBroker('router_jetstream_ack_pending_messages', 'Messages handed out and not acked'),
    delivered: countOfBroker('router_jetstream_delivered_messages_total', 'Messages handed to this router'),
    redelivered: countOfBroker('router_jetstream_redelivered_messages_total', 'Of those, handed out before'),
    latency: (outcome: string) => latency.labels(subject, outcome),
    latencyP50: ofSubject('router_intake_processing_latency_p50', 'Milliseconds, of the last 5 s'),
    latencyP95: ofSubject('router_intake_processing_latency_p95', 'Milliseconds, of the last 5 s'),
    latencyP99: ofSubject('router_intake_processing_latency_p99', 'Milliseconds, of the last 5 s'),
    inFlight: ofSubject('router_intake_inflight_messages', 'Messages under way in this router'),
    inFlightMax: ofSubject('router_intake_inflight_messages_max', 'The most that were under way at once'),
    backpressureActive: ofSubject('router_intake_backpressure_active', '1 while requests are refused'),
    backpressureLevel: ofSubject('router_intake_backpressure_level', '0 inactive, 1 warning, 2 active'),
    triggered: (trigger: string) => triggered.labels(subject, trigger),
    rejected: (reason: string) => rejections.labels(subject, reason),
    buried: (reason: string) => deadLetters.labels(subject, reason),
    ...gatewayMetrics(registry),
  }
}

function gatewayMetrics(registry: Registry) {
  const status = new Gauge({
    registers: [registry],
    name: 'gateway_backpressure_status',
    help: 'What the gateway knows of the routers: 1 for the one that is',
    labelNames: ['status'],
  })
  const rateAdjustments = new CounterFamily({
    registry,
    name: 'gateway_rate_limit_backpressure_adjustment_total',
    help: 'Times that rate limits were reduced because of backpressure',
    labelNames: [],
  })
  return {
    rateAdjustments: rateAdjustments.labels(),
    showStatus(current: RouterStatus): void {
      for (const one of gatewayStatuses) status.labels({ status: one }).set(one === current ? 1 : 0)
    },
  }
}
