import { checkOptions, isProblem, isSeconds, isText } from '../core/options.js'
import type { Refusal } from '../intake/refusal.js'
import type { Pulse } from '../store/port.js'
import type { BoundGate, Gate } from './gate.js'

export interface HaltOptions {
  /** Which halt. Default `system`. */
  scope?: string
  /** Base of Retry-After. Default 3,600 s: a person ends a halt. */
  retryAfterSeconds?: number
  problem?: Partial<Pick<Refusal, 'type' | 'title' | 'detail'>>
}

/** Refuses while an operator has halted the scope. The halt is a row in the store; the accepting transaction reads it. */
export function halt(options: HaltOptions = {}): Gate<unknown> {
  checkOptions('halt', options, { scope: isText, retryAfterSeconds: isSeconds, problem: isProblem })
  const scope = options.scope ?? 'system'
  return {
    kind: 'halt',
    bind(): BoundGate<unknown> {
      let halted = false
      const refusal = (): Refusal => ({
        code: 'halted',
        detail: 'Intake is halted by an operator. Reads go on.',
        ...options.problem,
        retryAfterMs: (options.retryAfterSeconds ?? 3_600) * 1_000,
        gate: 'halt',
      })
      return {
        kind: 'halt',
        early: () => (halted ? refusal() : null),
        exact: () => ({ halt: scope }),
        refused: () => {
          halted = true
          return refusal()
        },
        observe(pulse: Pulse) {
          halted = pulse.halts.some((h) => h.scope === scope)
        },
      }
    },
  }
}
