/** From what was counted to what an operator reads. */
export const objectiveNames = ['availability', 'latency', 'depth'] as const
export type ObjectiveName = (typeof objectiveNames)[number]
export type ObjectiveWindow = '1h' | '30d'

/** `allowed` is 1 − target, written out: 1 − 0.999 is 0.0010000000000000009. */
const targets: Readonly<Record<ObjectiveName, { target: number; allowed: number; window: ObjectiveWindow }>> = {
  /** Messages that were handled well, of all that were received. */
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

export interface ObjectiveView extends Counted {
  name: ObjectiveName
  target: number
  window: ObjectiveWindow
  /** Null: nothing was counted in the window. */
  sli: number | null
  /** 1 all, 0 none, negative when overspent. */
  error_budget_left: number
  /** Error rate of the last hour by the one that is allowed: above 1 the budget does not last. */
  burn_rate: number
  met: boolean
}

export function objectiveView(name: ObjectiveName, sums: Readonly<Record<ObjectiveWindow, Counted>>): ObjectiveView {
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

/** Errors by those that are allowed. */
function share({ good, total }: Counted, allowed: number): number {
  return total === 0 ? 0 : (total - good) / (total * allowed)
}
