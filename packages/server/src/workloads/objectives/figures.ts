/** Turns counts into the figures that an operator reads. */
import type { Objective, ObjectiveName } from '@spillway/protocol/wire'

export type ObjectiveWindow = Objective['window']

/** `allowed` is 1 − target, written out: 1 − 0.999 is 0.0010000000000000009. */
const targets: Readonly<Record<ObjectiveName, { target: number; allowed: number; window: ObjectiveWindow }>> = {
  /** Messages handled well, of all received. */
  availability: { target: 0.999, allowed: 0.001, window: '30d' },
  /** Messages that took less than 500 ms. */
  latency: { target: 0.99, allowed: 0.01, window: '1h' },
  /** Seconds in which fewer than 100 messages were pending. */
  depth: { target: 0.99, allowed: 0.01, window: '1h' },
}

export interface Counted {
  good: number
  total: number
}

export function objectiveView(name: ObjectiveName, sums: Readonly<Record<ObjectiveWindow, Counted>>): Objective {
  const { target, allowed, window } = targets[name]
  const { good, total } = sums[window]
  const spent = share(sums[window], allowed)
  return {
    name,
    target,
    window,
    sli: total === 0 ? null : good / total,
    good,
    total,
    error_budget_left: 1 - spent,
    burn_rate: share(sums['1h'], allowed),
    met: spent <= 1,
  }
}

/** Errors divided by the allowed errors. */
function share({ good, total }: Counted, allowed: number): number {
  return total === 0 ? 0 : (total - good) / (total * allowed)
}
