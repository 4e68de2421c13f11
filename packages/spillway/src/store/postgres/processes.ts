/** The processes, and their leases. */
import type { Pulse } from '../port.js'
import type { Database } from './database.js'

type Row = Omit<Pulse, 'deadLetters'> & Record<string, unknown>

const pulseColumns = `alive, waiting, next_due_ms AS "nextDueMs", oldest_ms AS "oldestMs", coalesce(held, '{}') AS held,
  coalesce(running, '{}') AS running, coalesce(gates, '[]') AS gates, coalesce(halts, '[]') AS halts,
  coalesce(cancels, '[]') AS cancels, lost AS "lostWorkers"`

export function processStatements({ s, probe, on, value }: Database) {
  return {
    /** `announced`: which operations of a type it may run, if not all, by label: the type, a space and a digest. */
    enlist: async (
      worker: string,
      name: string,
      leaseMs: number,
      announced: Readonly<Record<string, string>> = {},
    ): Promise<void> => {
      await on.heartbeat(`SELECT ${s}.enlist($1, $2, $3, $4)`, [worker, name, leaseMs, JSON.stringify(announced)])
    },
    /** The announcements of live processes, by label; and the store's clock. */
    announced: async (): Promise<{ nowMs: number; by: Record<string, string> }> => {
      const { rows } = await on.reads<{ now_ms: number; by: Record<string, string> }>(
        `SELECT extract(epoch FROM ${s}.clock())::float8 * 1000 AS now_ms, coalesce((SELECT json_object_agg(x.label, x.text)
           FROM (SELECT DISTINCT ON (e.key) e.key AS label, e.value AS text FROM ${s}.workers w, jsonb_each_text(w.announced) e
             WHERE w.until >= ${s}.clock()) x), '{}') AS by`,
      )
      return { nowMs: rows[0]?.now_ms ?? 0, by: rows[0]?.by ?? {} }
    },
    pulse: async (worker: string, leaseMs: number, running: Record<string, number>): Promise<Pulse> => {
      const values = [worker, leaseMs, JSON.stringify(running)]
      const beat = `${s}.pulse($1, $2, $3)`
      const { rows } = await probe.beat(
        () => on.accept<Row>(`SELECT ${pulseColumns} FROM ${s}.space_check() c, ${beat} p`, values),
        () => on.heartbeat<Row>(`SELECT ${pulseColumns} FROM ${beat}`, values),
      )
      const [row] = rows
      if (row === undefined) throw new Error('pulse answered without a row')
      // Dead letters are counted beside the types.
      const { '!dead': deadLetters = 0, ...held } = row.held
      return { ...row, held, deadLetters }
    },
    /** Why nothing can be accepted right now; null when it can. The last known state, without a query. */
    acceptFault: (): Error | null => probe.fault,
    /** Removes one process whose lease expired; null when there is none. */
    recover: async (): Promise<{ worker: string; name: string; lanes: number } | null> => {
      const { rows } = await on.settle<{ worker: string; name: string; lanes: number }>(`SELECT * FROM ${s}.recover()`)
      return rows[0] ?? null
    },
    // Not on the work connections: a process that stops while the database does not answer would wait for half a minute.
    retire: async (worker: string): Promise<number> =>
      (await value<number>(on.heartbeat, `${s}.retire($1)`, [worker])) ?? 0,
    /** Gives back leases whose claim got no answer. */
    disown: async (worker: string, knownFences: readonly number[]): Promise<number> =>
      (await value<number>(on.settle, `${s}.disown($1, $2)`, [worker, knownFences])) ?? 0,
  }
}
