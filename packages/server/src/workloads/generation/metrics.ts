import { Gauge, type Registry } from 'prom-client'
import { CounterFamily, HistogramFamily } from 'spillway/workload'

/** From a local model that answers at once to a stream that waits in the queue until its limit. */
const firstTokenSeconds = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]

const failoverReasons = ['user_limit', 'pool_full', 'no_slot', 'upstream_retry'] as const
/** Why a generation was queued: the user's limit, the global limit, no slot here, or the upstream failed. */
export type FailoverReason = (typeof failoverReasons)[number]

const generationEnds = ['done', 'error', 'cancelled'] as const

/** HEALTHY < 70% ≤ DEGRADED < 90% ≤ CRITICAL < 100% = EXHAUSTED: the values of `sse_pool_state`. */
export function poolStateOf(held: number, total: number): number {
  if (held >= total) return 3
  if (held >= total * 0.9) return 2
  return held >= total * 0.7 ? 1 : 0
}

/** Creates all series before the first stream: Prometheus does not count the first value of a late series as an increase. */
export function createGenerationMetrics(registry: Registry) {
  const gauge = (name: string, help: string) => {
    const made = new Gauge({ registers: [registry], name, help })
    made.set(0)
    return made
  }
  const counter = (name: string, help: string) => new CounterFamily({ registry, name, help, labelNames: [] }).labels()
  const counters = <Value extends string>(name: string, help: string, label: string, values: readonly Value[]) => {
    const family = new CounterFamily({ registry, name, help, labelNames: [label] })
    for (const value of values) family.labels(value)
    return (value: Value): void => family.labels(value).inc()
  }
  const firstToken = new HistogramFamily({
    registry,
    name: 'sse_first_token_seconds',
    help: 'From the request to its first token, waiting in the queue included',
    labelNames: [],
    buckets: firstTokenSeconds,
  })
  return {
    activeConnections: gauge('sse_active_connections', 'Streams that are open to clients of this process'),
    poolState: gauge(
      'sse_pool_state',
      'How full the pool of all instances is: 0 healthy, 1 degraded (from 70%), 2 critical (from 90%), 3 exhausted',
    ),
    queueDepth: gauge('sse_queue_depth', 'Generations of all instances that wait in the queue'),
    failedOver: counters(
      'sse_failovers_total',
      'Generations that were queued instead of begun at once, by the reason',
      'reason',
      failoverReasons,
    ),
    ended: counters('generation_ended_total', 'Generations that ended here, by how', 'end', generationEnds),
    firstToken: firstToken.labels(),
    chunksStreamed: counter('sse_chunks_streamed_total', 'Chunks written to clients of this process'),
    resumes: counter('sse_resumes_total', 'Streams that a client took up again here'),
    slowReadersClosed: counter('sse_slow_reader_closed_total', 'Streams closed because their reader took nothing'),
  }
}
