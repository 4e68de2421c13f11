/** The ledger's part of the store (sql/functions/ledger.sql). */
import { type CutRows, cutRows, pageSql } from '../page-sql.js'
import type { LedgerEvent, LedgerRow, Tx } from '../port.js'
import type { Database } from './database.js'

type Checked = { seen: number; lastSeq: number | null; lastHash: string | null; brokenAt: number | null }

export function ledgerStatements({ s, on: { reads } }: Database) {
  return {
    /** Appends in the caller's transaction, after all its other locks; returns the last number. */
    ledgerAppend: async (tx: Tx, events: readonly LedgerEvent[]): Promise<number> => {
      const { rows } = await tx.query<{ seq: number }>(`SELECT ${s}.ledger_append($1, $2, $3, $4) AS seq`, [
        events.map((e) => e.type),
        events.map((e) => e.actor),
        events.map((e) => e.traceId),
        events.map((e) => e.payload),
      ])
      return Number(rows[0]?.seq ?? 0)
    },
    /** Null: somebody removed it. `lastRow` is the greatest number, 0 when there is none. */
    ledgerHead: async (): Promise<{ head: { seq: number; hash: string } | null; lastRow: number }> => {
      const { rows } = await reads<{ seq: number | null; hash: string | null; last: number }>(
        `SELECT h.seq, h.hash, l.last FROM (SELECT coalesce(max(seq), 0) AS last FROM ${s}.ledger) l LEFT JOIN ${s}.ledger_head h ON true`,
      )
      const [row] = rows
      return { lastRow: row?.last ?? 0, head: row?.hash == null ? null : { seq: Number(row.seq), hash: row.hash } }
    },
    ledgerRows: async (after: number, limit: number, bytesMax: number): Promise<CutRows<LedgerRow>> => {
      const { rows } = await reads<LedgerRow & { cut: boolean } & Record<string, unknown>>(
        pageSql(
          `SELECT seq, ${s}.ledger_time(at) AS at, type, actor, trace_id AS "traceId", payload, prev_hash AS "prevHash", hash,
             octet_length(payload) AS bytes FROM ${s}.ledger WHERE seq > $1 ORDER BY seq LIMIT $2`,
          'r.seq',
          '$3',
        ),
        [after, limit, bytesMax],
      )
      return cutRows(rows, ({ bytes, upto, follows, cut, ...row }) => row)
    },
    /** Checks the `count` rows after `after`, whose hash is `prevHash`. */
    ledgerCheck: async (after: number, prevHash: string, count: number): Promise<Checked> => {
      const { rows } = await reads<Checked>(
        `SELECT seen, last_seq AS "lastSeq", last_hash AS "lastHash", broken_at AS "brokenAt"
         FROM ${s}.ledger_check($1, $2, $3)`,
        [after, prevHash, count],
      )
      return rows[0] ?? { seen: 0, lastSeq: null, lastHash: null, brokenAt: null }
    },
  }
}
