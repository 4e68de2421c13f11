import { collectDefaultMetrics, Gauge, Registry } from '@prometheus-io/client'
import { type CounterChild, CounterFamily, HistogramFamily, otherLabel, register } from './families.js'

/** From a tenth of a millisecond (a gate) to a minute (a call that waits). */
const durationBuckets = [0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60]
/** Waiting in a queue may take an hour. */
const waitBuckets = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3_600]
const gateBuckets = [0.000_01, 0.000_05, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1]
const batchBuckets = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024]

/** Operation types that get a series of their own; types are defined in code, so more than this is a mistake. */
const operationTypesMax = 100

export type AttemptOutcome = 'completed' | 'retried' | 'failed' | 'lease_lost' | 'cancelled'
export type PoolState = 'busy' | 'idle' | 'waiting' | 'max'

export interface OperationCount {
  readonly type: string
  readonly status: string
  readonly count: number
}

export type Metrics = ReturnType<typeof createMetrics>

/**
 * The core's metrics, in a registry of their own. Counters and histograms: `metrics.x.labels(…)` once, then `inc` or
 * `observe` on what it returned. Gauges that need the store are set by whoever samples it, never at the scrape, so that
 * a scrape is answered while the store is down.
 */
export function createMetrics(options: { readonly runtime?: boolean } = {}) {
  const registry = new Registry()
  if (options.runtime ?? true) collectRuntime(registry)

  const operations = new Gauge({
    registers: [registry],
    name: 'spillway_operations',
    help: 'Operations held, by type and status',
    labelNames: ['type', 'status'],
  })
  const storePool = new Gauge({
    registers: [registry],
    name: 'spillway_store_pool',
    help: 'Connections to the store: busy, idle, requests waiting for one, and the most allowed',
    labelNames: ['state'],
  })

  return {
    registry,
    contentType: registry.contentType,
    /** The text of a scrape. */
    scrape: (): Promise<string> => registry.metrics(),

    admissions: new CounterFamily({
      registry,
      name: 'spillway_admissions_total',
      help: 'Admission decisions, by route, verdict and reason',
      labelNames: ['route', 'verdict', 'reason'],
      childrenMax: 500,
    }),
    admissionDuration: new HistogramFamily({
      registry,
      name: 'spillway_admission_duration_seconds',
      help: 'Time that a gate took to decide',
      labelNames: ['gate'],
      buckets: gateBuckets,
      childrenMax: 32,
    }),
    operationWait: new HistogramFamily({
      registry,
      name: 'spillway_operation_wait_seconds',
      help: 'From acceptance to the start of the first attempt',
      labelNames: [],
      buckets: waitBuckets,
    }).labels(),
    operationRun: new HistogramFamily({
      registry,
      name: 'spillway_operation_run_seconds',
      help: 'Duration of an attempt',
      labelNames: [],
      buckets: durationBuckets,
    }).labels(),
    operationAttempts: new CounterFamily<readonly ['type', 'outcome']>({
      registry,
      name: 'spillway_operation_attempts_total',
      help: 'Attempts to run an operation, by type and outcome',
      labelNames: ['type', 'outcome'],
      childrenMax: operationTypesMax * 5,
    }),
    deadLetters: new Gauge({
      registers: [registry],
      name: 'spillway_dead_letters',
      help: 'Dead letters kept',
    }),
    flushBatchSize: new HistogramFamily({
      registry,
      name: 'spillway_flush_batch_size',
      help: 'Requests accepted by one commit',
      labelNames: [],
      buckets: batchBuckets,
    }).labels(),
    flushDuration: new HistogramFamily({
      registry,
      name: 'spillway_flush_duration_seconds',
      help: 'Duration of a group commit',
      labelNames: [],
      buckets: durationBuckets,
    }).labels(),
    laneOldestSeconds: new Gauge({
      registers: [registry],
      name: 'spillway_lane_oldest_seconds',
      help: 'Age of the oldest operation that waits in any lane',
    }),
    sweptRows: new CounterFamily({
      registry,
      name: 'spillway_sweep_rows_total',
      help: 'Expired rows that were removed, by table',
      labelNames: ['table'],
      childrenMax: 50,
    }),
    sweepSeconds: new CounterFamily({
      registry,
      name: 'spillway_sweep_seconds_total',
      help: 'Time spent removing expired rows',
      labelNames: [],
    }).labels(),
    sweepBehind: new Gauge({
      registers: [registry],
      name: 'spillway_sweep_behind',
      help: 'Whether rows expire faster than the sweep may remove them (1), by task',
      labelNames: ['task'],
    }),
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
    /** Asked at each scrape. */
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

    attempt(type: string, outcome: AttemptOutcome): CounterChild {
      return this.operationAttempts.labels(type, outcome)
    },
    /** Replaces all counts: what is not in the sample is gone, not stale. */
    setOperations(sample: readonly OperationCount[]): void {
      operations.reset()
      const types = new Set<string>()
      for (const { type, status, count } of sample) {
        if (types.size < operationTypesMax) types.add(type)
        operations.inc({ type: types.has(type) ? type : otherLabel, status }, count)
      }
    },
    setStorePool(sample: Readonly<Record<PoolState, number>>): void {
      for (const [state, count] of Object.entries(sample)) storePool.set({ state }, count)
    },
  }
}

const bufferKinds = ['in', 'out'] as const

/** Both are shown before the first of either. */
function countedKinds(family: CounterFamily<readonly ['kind']>): CounterFamily<readonly ['kind']> {
  for (const kind of bufferKinds) family.labels(kind)
  return family
}

/**
 * What `promtool check metrics` refuses of the runtime's: gauges named like counters (the same figures stand under the
 * names without _total, by type), and names that say their type.
 */
const runtimeLeftOut = [
  ...['handles', 'requests', 'resources'].map((name) => `nodejs_active_${name}_total`),
  ...['summary', 'histogram'].map((type) => `nodejs_eventloop_utilization_${type}`),
]

/** The longest that a timer takes. */
const timerMsMax = 2 ** 31 - 1

function collectRuntime(registry: Registry): void {
  // Utilization is left out below: it need not be measured ten times a second either.
  collectDefaultMetrics({ register: registry, eventLoopUtilizationTimeout: timerMsMax })
  for (const name of runtimeLeftOut) registry.removeSingleMetric(name)
}
