import type { Metrics } from '../metrics/metrics.js'
import type { PoolState, Pulse } from '../store/port.js'
import type { FleetNumbers } from './fleet-numbers.js'

/** A heartbeat's queue figures, as metrics. */
export function pulseMetrics(metrics: Metrics, fleet: FleetNumbers, pulse: Pulse, pool: PoolState): void {
  metrics.deadLetters.set(pulse.deadLetters)
  metrics.laneOldestSeconds.set(pulse.oldestMs / 1_000)
  metrics.setOperations(
    Object.keys({ ...pulse.held, ...pulse.running })
      .filter((type) => !type.startsWith('!'))
      .flatMap((type) => {
        const { pending, running } = fleet.countsOf(type)
        return [
          { type, status: 'pending', count: pending },
          { type, status: 'processing', count: running },
        ]
      }),
  )
  metrics.setStorePool({ busy: pool.busy, idle: pool.idle, waiting: pool.waiting, max: pool.max })
}
