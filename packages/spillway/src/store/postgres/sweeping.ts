/** The database calls for sweeping: see sql/functions/sweep.sql. */
import type { SweptRows } from '../port.js'
import type { Database } from './database.js'

/** From each table, in one transaction: it holds their locks for some 10 ms. */
const batchRows = 2_000

interface RowsRow extends Record<string, unknown> {
  keys: number
  rate_rows: number
  lanes: number
  cancels: number
  is_full: boolean
  upto: string[]
}

export function sweepStatements({ s, on: { sweep: query } }: Database) {
  /** Where the last batch ended, if it was full. */
  let from: string[] | null = null
  const history = { partitions_made: 0, partitions_dropped: 0, history: 0 }
  /** Once a round, after its first rows: partitions need a lock that may not be available, and rows do not wait for it. */
  let wantsHistory = true
  return {
    /** Removes a batch of expired rows; the next call starts where a full batch ended. */
    sweep: async (retentionMs: number): Promise<SweptRows> => {
      const { rows } = await query<RowsRow>(
        `SELECT keys, rate_rows, lanes, cancels, is_full, upto::text[] FROM ${s}.sweep_rows($1, coalesce($2::timestamptz[], '{-infinity,-infinity,-infinity}'))`,
        [batchRows, from],
      )
      const [row] = rows
      if (row === undefined) throw new Error('the sweep gave no answer')
      const { keys, rate_rows, lanes, cancels, is_full: isFull, upto } = row
      from = isFull ? upto : null
      const made = wantsHistory
        ? await query<typeof history>(`SELECT * FROM ${s}.sweep_history($1, $2)`, [retentionMs, batchRows])
        : { rows: [history] }
      wantsHistory = !isFull
      const [{ ...partitions } = history] = made.rows
      return {
        ...partitions,
        ...{ keys, rate_rows, lanes, cancels },
        isFull: isFull || partitions.history >= batchRows,
      }
    },
    /** Removes the last errors and the progress of operations that are gone. */
    sweepNotes: async (): Promise<{ failures: number; progress: number; isFull: boolean }> => {
      const { rows } = await query<{ failures: number; progress: number; is_full: boolean }>(
        `SELECT f.failures, p.progress, f.is_full OR p.is_full AS is_full
         FROM ${s}.failures_sweep($1) f, ${s}.progress_sweep($1) p`,
        [batchRows],
      )
      const [{ failures, progress, is_full: isFull } = { failures: 0, progress: 0, is_full: false }] = rows
      return { failures, progress, isFull }
    },
    /**
     * The turn to sweep, for one process at a time. 0: this process has it, for `holdMs` or until it ends it; else the
     * milliseconds to wait.
     */
    takeSweepTurn: async (holdMs: number): Promise<number> => {
      const { rows } = await query<{ ms: number }>(`SELECT ${s}.sweep_take($1) AS ms`, [holdMs])
      return rows[0]?.ms ?? holdMs
    },
    /** Ends the turn: nobody sweeps for `restMs`. */
    endSweepTurn: async (restMs: number): Promise<void> => {
      await query(`SELECT ${s}.sweep_rest($1)`, [Math.ceil(restMs)])
    },
    audit: async (): Promise<string[]> =>
      (await query<{ fault: string }>(`SELECT fault FROM ${s}.audit()`)).rows.map(({ fault }) => fault),
  }
}
