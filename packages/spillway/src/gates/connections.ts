import { checkOptions, checkRequired, isSeconds, isText, wholeNumber } from '../core/options.js'
import type { BoundGate, Gate, GateBinding } from './gate.js'

export interface ConnectionsOptions {
  perIdentity: number
  total: number
  /** Gates of one pool count together. Default: the operation's type. */
  pool?: string
  /** Base of Retry-After. Default 5 s. */
  retryAfterSeconds?: number
}

/**
 * Limits how many requests are open at once, per identity and in total, over all instances. A permit belongs to the process
 * that holds it: when that dies, its permits are free once its lease has expired.
 */
export function connections(options: ConnectionsOptions): Gate<unknown> {
  checkOptions('connections', options, {
    ...{ perIdentity: wholeNumber(1), total: wholeNumber(1), pool: isText, retryAfterSeconds: isSeconds },
  })
  checkRequired('connections', options, 'perIdentity', 'total')
  const retryAfterMs = (options.retryAfterSeconds ?? 5) * 1_000
  return {
    kind: 'connections',
    bind(binding: GateBinding): BoundGate<unknown> {
      const pool = options.pool ?? binding.type
      return {
        kind: 'connections',
        async acquire({ identity }) {
          const outcome = await binding.takeConnection(pool, identity, options)
          switch (outcome) {
            case 'identity_full':
              return {
                code: 'connection_limit',
                detail: `At most ${options.perIdentity} may be open at once. Close one or try again later.`,
                retryAfterMs,
                gate: 'connections',
              }
            case 'pool_full':
              return {
                code: 'overloaded',
                detail: 'All connections are taken. Try again later.',
                retryAfterMs,
                gate: 'connections',
              }
            default:
              return outcome
          }
        },
      }
    },
  }
}
