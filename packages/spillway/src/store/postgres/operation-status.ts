import type { OperationReportRow } from '../port.js'
import { plainArray } from './arrays.js'
import type { Database } from './database.js'

/** Further back, the difference of sequence numbers is close enough: it is off by the cancelled operations. */
export const placeCountedMax = 10_000

interface Row extends Record<string, unknown> {
  /** Null: the row describes a lane and its waiting operations, not an operation. */
  id: string | null
  type: string
  status: OperationReportRow['status']
  error: string | null
  /** For waiting operations: the lane, and the distance from its head in sequence numbers. */
  lane: string | null
  seq: number | null
  ahead: number | null
  pace_ms: number | null
  waiting: number[] | null
}

/**
 * Each lane is counted once, however many of its operations are requested; only ids not in the queue are looked up among
 * those that left. One statement: an operation that moves is seen in exactly one place. The positions are joined here: the
 * planner lacks statistics for that join and compared each with each.
 */
const statusSql = (s: string): string => `
  WITH held AS MATERIALIZED (
    SELECT o.id, o.type, o.lane, o.seq, o.error, o.started_at IS NOT NULL AS started, l.head, l.pace_ms
    FROM unnest($1::uuid[]) a(id) JOIN ${s}.ops o ON o.id = a.id JOIN ${s}.lanes l ON l.id = o.lane
  ), elsewhere AS MATERIALIZED (
    SELECT ARRAY(SELECT a.id FROM unnest($1::uuid[]) a(id) EXCEPT SELECT w.id FROM held w) AS ids
  )
  SELECT w.id, w.type, CASE WHEN w.started THEN 'processing' ELSE 'pending' END AS status, w.error,
    w.lane, w.seq, w.seq - w.head - 1 AS ahead, w.pace_ms, NULL::bigint[] AS waiting
  FROM held w
  UNION ALL
  SELECT NULL, NULL, NULL, NULL, w.lane, NULL, NULL, NULL, x.seqs FROM (
    SELECT u.lane, u.head, max(u.seq) AS last FROM held u
    WHERE NOT u.started AND u.seq - u.head BETWEEN 2 AND ${placeCountedMax} GROUP BY u.lane, u.head
  ) w, LATERAL (
    SELECT array_agg(y.seq ORDER BY y.seq) AS seqs FROM ${s}.ops y
    WHERE y.lane = w.lane AND y.seq > w.head AND y.seq <= w.last AND y.started_at IS NULL
  ) x
  UNION ALL
  SELECT h.id, h.type, h.status, h.error, NULL, NULL, NULL, NULL, NULL FROM ${s}.history h
  WHERE h.id = ANY ((SELECT e.ids FROM elsewhere e)::uuid[])
  UNION ALL
  SELECT d.id, d.type, 'failed', d.error, NULL, NULL, NULL, NULL, NULL FROM ${s}.dead_letters d
  WHERE d.id = ANY ((SELECT e.ids FROM elsewhere e)::uuid[])`

export function statusStatements({ s, on: { reads } }: Database) {
  return {
    /** The known ones of `ids`; for many at once. */
    statusOf: async (ids: readonly string[]): Promise<OperationReportRow[]> => {
      const { rows } = await reads<Row>(statusSql(s), [plainArray(ids)])
      const places = new Map<string, Map<number, number>>()
      for (const { lane, waiting } of rows) {
        if (lane !== null && waiting !== null) places.set(lane, new Map(waiting.map((seq, place) => [seq, place])))
      }
      const placeOf = ({ lane, seq, ahead }: Row): number =>
        places.get(lane ?? '')?.get(seq ?? 0) ?? Math.max(0, ahead ?? 0)
      return rows.flatMap((row) => {
        const { id, type, status, error } = row
        if (id === null) return []
        const waits = status === 'pending'
        return [{ id, type, status, error, place: waits ? placeOf(row) : null, paceMs: waits ? row.pace_ms : null }]
      })
    },
  }
}
