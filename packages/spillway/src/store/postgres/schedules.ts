/** Recurring work: see sql/functions/schedules.sql. */
import type { Tx } from '../port.js'
import type { Database } from './database.js'

export function scheduleStatements({ s, on, value }: Database) {
  return {
    /** The store's clock, and the last handled due time of each that has one; in epoch milliseconds. */
    scheduleTimes: async (names: readonly string[]): Promise<{ nowMs: number; lastMs: Record<string, number> }> => {
      const { rows } = await on.reads<{ now: number; last: Record<string, number> }>(
        `SELECT extract(epoch FROM ${s}.clock())::float8 * 1000 AS now,
           coalesce((SELECT json_object_agg(x.name, extract(epoch FROM x.last_at) * 1000) FROM ${s}.schedules x
             WHERE x.name = ANY ($1) AND x.last_at IS NOT NULL), '{}') AS last`,
        [names],
      )
      const [row] = rows
      if (row === undefined) throw new Error('the store gave no time')
      return { nowMs: row.now, lastMs: row.last }
    },
    /** `next` is null if it is never due. False: another process has it just now, and nothing was changed. */
    putSchedule: async (schedule: {
      name: string
      cron: string
      timezone: string
      type: string
      next: Date | null
    }): Promise<boolean> => {
      const { name, cron, timezone, type, next } = schedule
      const values = [name, cron, timezone, type, timeOf(next)]
      return (await value<boolean>(on.settle, `${s}.schedule_put($1, $2, $3, $4, $5)`, values)) === true
    },
    dueSchedules: async (names: readonly string[]): Promise<string[]> => {
      const { rows } = await on.reads<{ name: string }>(
        `SELECT x.name FROM ${s}.schedules x WHERE x.name = ANY ($1) AND x.next_at <= ${s}.clock() ORDER BY x.next_at`,
        [names],
      )
      return rows.map(({ name }) => name)
    },
    /** Locks a due schedule until the transaction ends. Null: another process has it, or has another text for it. */
    takeSchedule: async (
      tx: Tx,
      { name, cron, timezone, type }: { name: string; cron: string; timezone: string; type: string },
    ): Promise<{ nextMs: number; nowMs: number } | null> => {
      const { rows } = await tx.query<{ next_ms: number; now_ms: number }>(
        `SELECT * FROM ${s}.schedule_take($1, $2, $3, $4)`,
        [name, cron, timezone, type],
      )
      const [row] = rows
      return row === undefined ? null : { nextMs: row.next_ms, nowMs: row.now_ms }
    },
    /** Everything up to `last` was handled. */
    moveSchedule: async (tx: Tx, name: string, last: Date, next: Date | null): Promise<void> => {
      await tx.query(`UPDATE ${s}.schedules SET last_at = $2, next_at = $3 WHERE name = $1`, [
        name,
        timeOf(last),
        timeOf(next),
      ])
    },
    /** Returns how many were removed. */
    seeSchedules: async (names: readonly string[], keepMs: number): Promise<number> =>
      (await value<number>(on.settle, `${s}.schedules_seen($1, $2)`, [names, keepMs])) ?? 0,
  }
}

const timeOf = (at: Date | null): string => at?.toISOString() ?? 'infinity'
