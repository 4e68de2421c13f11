import { cutRows, pageSql } from '../page-sql.js'
import type { LedgerRow, Store, Tx } from '../port.js'

interface Row extends Record<string, unknown> {
  seq: number
  at: string
  type: string
  actor: string
  trace_id: string
  payload: string
  prev_hash: string
  hash: string
}

/** The ledger's part of the store (sql/functions/ledger.sql). */
export function ledgerStatements(
  read: Tx['query'],
  s: string,
): Pick<Store, 'ledgerAppend' | 'ledgerHead' | 'ledgerRows' | 'ledgerCheck'> {
  return {
    ledgerAppend: async (tx, events) => {
      const { rows } = await tx.query<{ seq: number }>(`SELECT ${s}.ledger_append($1, $2, $3, $4) AS seq`, [
        events.map((e) => e.type),
        events.map((e) => e.actor),
        events.map((e) => e.traceId),
        events.map((e) => e.payload),
      ])
      return Number(rows[0]?.seq ?? 0)
    },
    ledgerHead: async () => {
      const { rows } = await read<{ seq: number | null; hash: string | null; last: number }>(
        `SELECT h.seq, h.hash, l.last FROM (SELECT coalesce(max(seq), 0) AS last FROM ${s}.ledger) l LEFT JOIN ${s}.ledger_head h ON true`,
      )
      const [row] = rows
      const lastRow = Number(row?.last ?? 0)
      return { lastRow, head: row?.hash == null ? null : { seq: Number(row.seq), hash: row.hash } }
    },
    ledgerRows: async (after, limit, bytesMax) => {
      const { rows } = await read<Row & { cut: boolean }>(
        pageSql(
          `SELECT seq, ${s}.ledger_time(at) AS at, type, actor, trace_id, payload, prev_hash, hash, octet_length(payload) AS bytes FROM ${s}.ledger WHERE seq > $1 ORDER BY seq LIMIT $2`,
          'r.seq',
          '$3',
        ),
        [after, limit, bytesMax],
      )
      return cutRows(rows, toRow)
    },
    ledgerCheck: async (after, prevHash, count) => {
      const { rows } = await read<{
        seen: number
        last_seq: number | null
        last_hash: string | null
        broken_at: number | null
      }>(`SELECT * FROM ${s}.ledger_check($1, $2, $3)`, [after, prevHash, count])
      const [row] = rows
      return {
        seen: Number(row?.seen ?? 0),
        lastSeq: row?.last_seq ?? null,
        lastHash: row?.last_hash ?? null,
        brokenAt: row?.broken_at ?? null,
      }
    },
  }
}

const toRow = (row: Row): LedgerRow => ({
  seq: Number(row.seq),
  at: row.at,
  type: row.type,
  actor: row.actor,
  traceId: row.trace_id,
  payload: row.payload,
  prevHash: row.prev_hash,
  hash: row.hash,
})
