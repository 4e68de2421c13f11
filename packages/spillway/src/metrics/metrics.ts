import {
  type CounterChild,
  CounterFamily,
  GaugeFamily,
  HistogramFamily,
  type MetricRegistry,
  otherLabel,
  register,
} from './families.js'

/** From a tenth of a millisecond (a gate) to a minute (a call that waits). */
export const durationBuckets = [
  0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60,
]
/** Waiting in a queue may take an hour. */
const waitBuckets = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3_600]
const gateBuckets = [0.000_01, 0.000_05, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1]
const batchBuckets = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024]

/** Operation types with their own series; types are defined in code, so more than this is a mistake. */
const operationTypesMax = 100

export type AttemptOutcome = 'completed' | 'retried' | 'failed' | 'lease_lost' | 'cancelled'
export type PoolState = 'busy' | 'idle' | 'waiting' | 'max'

export interface OperationCount {
  readonly type: string
  readonly status: string
  readonly count: number
}

export type Metrics = ReturnType<typeof createMetrics>

/** Metrics are still counted, but not exposed. */
const nowhere: MetricRegistry = { registerMetric: () => undefined }

/**
 * The core's metrics, in the given registry. Counters and histograms: `metrics.x.labels(…)` once, then `inc` or `observe` on
 * the result. Gauges that need the store are set by its sampler, never at the scrape, so that a scrape works while the store
 * is down.
 */
export function createMetrics(registry: MetricRegistry = nowhere) {
  return {
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
    deadLetters: new GaugeFamily({
      registry,
      name: 'spillway_dead_letters',
      help: 'Dead letters kept',
      labelNames: [],
    }).labels(),
    ...waits(registry),
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
    laneOldestSeconds: new GaugeFamily({
      registry,
      name: 'spillway_lane_oldest_seconds',
      help: 'Age of the oldest operation that waits in any lane',
      labelNames: [],
    }).labels(),
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
    sweepBehind: new GaugeFamily({
      registry,
      name: 'spillway_sweep_behind',
      help: 'Whether rows expire faster than the sweep may remove them (1), by task',
      labelNames: ['task'],
    }),

    attempt(type: string, outcome: AttemptOutcome): CounterChild {
      return this.operationAttempts.labels(type, outcome)
    },
    setOperations: operationCounts(registry),
    setStorePool: storePool(registry),
  }
}

/** Requests that found no free slot, and operations that waited for too long. */
function waits(registry: MetricRegistry) {
  return {
    expired: new CounterFamily<readonly ['type']>({
      registry,
      name: 'spillway_operations_expired_total',
      help: 'Operations whose time was over before they could start, by type',
      labelNames: ['type'],
      childrenMax: operationTypesMax,
    }),
    slotWaits: new CounterFamily<readonly ['route', 'end']>({
      registry,
      name: 'spillway_slot_waits_total',
      help: 'Requests that waited for a free slot, by route and end: slot, late, full, gone or closed',
      labelNames: ['route', 'end'],
      childrenMax: operationTypesMax * 5,
    }),
    slotWait: new HistogramFamily({
      registry,
      name: 'spillway_slot_wait_seconds',
      help: 'How long requests waited for a free slot',
      labelNames: [],
      buckets: durationBuckets,
    }).labels(),
  }
}

type CountByLabels = { readonly labels: { type: string; status: string }; value: number }

/** Returns a function that replaces all counts: a type that is missing in the sample is gone, not stale. */
function operationCounts(registry: MetricRegistry): (sample: readonly OperationCount[]) => void {
  let operations: CountByLabels[] = []
  register(
    { registry, name: 'spillway_operations', help: 'Operations held, by type and status' },
    'gauge',
    () => operations,
  )
  return (sample) => {
    const types = new Set<string>()
    const counts = new Map<string, CountByLabels>()
    for (const { type, status, count } of sample) {
      if (types.size < operationTypesMax) types.add(type)
      const labels = { type: types.has(type) ? type : otherLabel, status }
      const key = `${labels.type}\0${status}`
      const known = counts.get(key)
      if (known === undefined) counts.set(key, { labels, value: count })
      else known.value += count
    }
    operations = [...counts.values()]
  }
}

function storePool(registry: MetricRegistry): (sample: Readonly<Record<PoolState, number>>) => void {
  const family = new GaugeFamily({
    registry,
    name: 'spillway_store_pool',
    help: 'Connections to the store: busy, idle, requests waiting for one, and the most allowed',
    labelNames: ['state'],
  })
  return (sample) => {
    for (const [state, count] of Object.entries(sample)) family.labels(state).set(count)
  }
}
