import { collectDefaultMetrics, Registry } from 'prom-client'
import {
  CounterFamily,
  createMetrics as createCoreMetrics,
  durationBuckets,
  HistogramFamily,
  register,
} from 'spillway/workload'

export type Metrics = ReturnType<typeof createMetrics>

/** The metrics of the core and the server, in one registry of Prometheus' client. */
export function createMetrics(options: { readonly runtime?: boolean } = {}) {
  const registry = new Registry()
  if (options.runtime ?? true) collectRuntime(registry)

  return {
    ...createCoreMetrics(registry),
    registry,
    contentType: registry.contentType,
    /** The text of a scrape. */
    scrape: (): Promise<string> => registry.metrics(),

    httpRequests: new CounterFamily({
      registry,
      name: 'spillway_http_requests_total',
      help: 'Answers sent, by route pattern, method and status',
      labelNames: ['route', 'method', 'status'],
      childrenMax: 1_000,
    }),
    httpDuration: new HistogramFamily({
      registry,
      name: 'spillway_http_request_duration_seconds',
      help: 'From the first byte of a request to the end of its answer, by route pattern',
      labelNames: ['route'],
      buckets: durationBuckets,
      childrenMax: 100,
    }),

    bufferRefusals: countedKinds(
      new CounterFamily<readonly ['kind']>({
        registry,
        name: 'spillway_buffer_refusals_total',
        help: 'Requests refused because bodies (in) and answers (out) hold all of the buffer space, or the share of their identity',
        labelNames: ['kind'],
      }),
    ),
    unreadAnswers: new CounterFamily({
      registry,
      name: 'spillway_unread_answers_closed_total',
      help: 'Connections closed because their client read nothing of an answer for 30 seconds',
      labelNames: [],
    }).labels(),
    /** Read at each scrape. */
    readBuffers(budget: { held(kind: 'in' | 'out'): number }): void {
      register(
        {
          registry,
          name: 'spillway_buffer_bytes',
          help: 'Bytes held of request bodies (in) and of answers that are being sent (out)',
        },
        'gauge',
        () => bufferKinds.map((kind) => ({ labels: { kind }, value: budget.held(kind) })),
      )
    },
  }
}

const bufferKinds = ['in', 'out'] as const

/** Creates both series before the first count. */
function countedKinds(family: CounterFamily<readonly ['kind']>): CounterFamily<readonly ['kind']> {
  for (const kind of bufferKinds) family.labels(kind)
  return family
}

/**
 * Runtime metrics that `promtool check metrics` rejects: gauges named like counters. The same figures exist under the
 * names without _total, by type.
 */
const runtimeLeftOut = ['handles', 'requests', 'resources'].map((name) => `nodejs_active_${name}_total`)

function collectRuntime(registry: Registry): void {
  collectDefaultMetrics({ register: registry })
  for (const name of runtimeLeftOut) registry.removeSingleMetric(name)
}
