import type { Permit } from '../gates/gate.js'
import type { FleetNumbers } from './fleet-numbers.js'
import type { PoolLimits, PoolPermits } from './pool-permits.js'

export interface PoolOptions extends PoolLimits {
  name: string
}

export interface ConnectionPool {
  readonly total: number
  /** Over all live instances, as of the last heartbeat. */
  readonly held: number
  /** Throws when the store does not answer. If this process lost its lease, the permit is void; releasing it does nothing. */
  take(identity: string): Promise<Permit | 'identity_full' | 'pool_full'>
}

export function connectionPool(
  intake: { fleet: FleetNumbers; permitsOf(pool: string): PoolPermits },
  { name, perIdentity, total }: PoolOptions,
): ConnectionPool {
  for (const limit of [perIdentity, total]) {
    if (!Number.isInteger(limit) || limit < 0) {
      throw new RangeError(`The limits of the pool ${name} are whole numbers from 0 on, not ${limit}.`)
    }
  }
  const permits = intake.permitsOf(name)
  return {
    total,
    get held() {
      return intake.fleet.sumOf(`pool:${name}`)
    },
    take: (identity) => permits.take(identity, { perIdentity, total }),
  }
}
