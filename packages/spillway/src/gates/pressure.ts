import { checkOptions, isSeconds, oneOf } from '../core/options.js'
import type { BoundGate, Gate, GateBinding } from './gate.js'

export interface PressureOptions {
  /** Refuse from this level on. Default `active`. */
  refuseAt?: 'warning' | 'active'
  /** Base of Retry-After. Default 2 s: the process's own pressure passes quickly or not at all. */
  retryAfterSeconds?: number
}

/** Refuses while this process cannot keep up (event-loop delay, store wait, requests in flight). */
export function pressure(options: PressureOptions = {}): Gate<unknown> {
  checkOptions('pressure', options, { refuseAt: oneOf('warning', 'active'), retryAfterSeconds: isSeconds })
  const refuseAt = options.refuseAt ?? 'active'
  const retryAfterMs = (options.retryAfterSeconds ?? 2) * 1_000
  return {
    kind: 'pressure',
    bind(binding: GateBinding): BoundGate<unknown> {
      return {
        kind: 'pressure',
        early() {
          const level = binding.pressureLevel()
          if (level === 'inactive' || (level === 'warning' && refuseAt === 'active')) return null
          return {
            code: 'overloaded',
            detail: 'This instance has more work than it can do now. Try again later.',
            retryAfterMs,
            gate: 'pressure',
          }
        },
      }
    },
  }
}
