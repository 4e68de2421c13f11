import type pg from 'pg'
import { type StoreFault, toStoreFault } from './faults.js'

/**
 * A pool that is replaced as a whole when one of its connections does not answer in time: behind a broken network or a
 * frozen server the others hang as well, and detecting that one by one would take a timeout for each.
 */
export interface Renewable {
  readonly current: pg.Pool
  /** Translates the error; replaces the pool if a connection of this very pool timed out. */
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
      // With a SQLSTATE the server itself timed out, so it answers.
      if (fault.code === 'timeout' && fault.sqlState === undefined && pool === current) {
        current = open()
        // Ends once its last connection is released; nobody waits for that.
        pool.end().catch(() => undefined)
      }
      return fault
    },
    end: () => current.end(),
  }
}
