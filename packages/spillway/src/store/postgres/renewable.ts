import type pg from 'pg'
import { type StoreFault, toStoreFault } from './faults.js'

/**
 * A pool that is thrown away as a whole when one of its connections does not answer in time: behind a broken network or
 * a frozen server the others hang just the same, and finding that out one by one would take a timeout for each.
 */
export interface Renewable {
  readonly current: pg.Pool
  /** The fault in our words; renews the pool if it was a silent connection of this very pool. */
  judge(pool: pg.Pool, error: unknown): StoreFault
  end(): Promise<void>
}

export function renewable(open: () => pg.Pool): Renewable {
  let current = open()
  return {
    get current() {
      return current
    },
    judge(pool, error) {
      const fault = toStoreFault(error)
      // With a SQLSTATE it was the server that gave up: it answers.
      if (fault.code === 'timeout' && fault.sqlState === undefined && pool === current) {
        current = open()
        // Ends once the last of its connections is given back; nobody waits for that.
        pool.end().catch(() => undefined)
      }
      return fault
    },
    end: () => current.end(),
  }
}
