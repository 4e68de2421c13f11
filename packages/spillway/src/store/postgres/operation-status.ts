import type { OperationReportRow } from '../port.js'
import { plainArray } from './arrays.js'
import type { Database } from './database.js'

/** Further back, the difference of sequence numbers is close enough: it is off by the cancelled operations. */
export const positionCountedMax = 10_000

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
  /** In a row of a lane: the sequence numbers that wait in it. In the row of all lanes: the stamps of those that are ready. */
  waiting: number[] | null
  priority: number | null
  stamp: number | null
  /** In the row of all lanes: the priorities of those that are ready. */
  levels: number[] | null
  /** For one that waits for its turn: how many of its key may run. `lane` is its key then, and `seq` its turn. */
  most: number | null
}

/**
 * Each lane is counted once, however many of its operations are requested; only ids not in the queue are looked up among
 * those that left. One statement: an operation that moves is seen in exactly one place. The positions are joined here: the
 * planner lacks statistics for that join and compared each with each.
 */
const statusSql = (s: string): string => `
  WITH held AS MATERIALIZED (
    SELECT o.id, o.type, o.lane, o.seq, o.error, o.priority, o.stamp, o.started_at IS NOT NULL AS started, l.head, l.pace_ms,
      p.key, p.turn
    FROM unnest($1::uuid[]) a(id) JOIN ${s}.ops o ON o.id = a.id JOIN ${s}.lanes l ON l.id = o.lane
      LEFT JOIN ${s}.parked p ON p.lane = o.lane AND p.reason = 'turn' AND l.key IS NOT NULL
  ), elsewhere AS MATERIALIZED (
    SELECT ARRAY(SELECT a.id FROM unnest($1::uuid[]) a(id) EXCEPT SELECT w.id FROM held w) AS ids
  )
  SELECT w.id, w.type, CASE WHEN w.started THEN 'processing' ELSE 'pending' END AS status, w.error,
    coalesce(w.key, w.lane) AS lane, coalesce(w.turn, w.seq) AS seq, w.seq - w.head - 1 AS ahead, w.pace_ms,
    NULL::bigint[] AS waiting,
    w.priority, w.stamp, NULL::smallint[] AS levels, k.most
  FROM held w LEFT JOIN ${s}.turns k ON k.key = w.key
  UNION ALL
  SELECT NULL, NULL, NULL, NULL, w.lane, NULL, NULL, NULL, x.seqs, NULL, NULL, NULL, NULL FROM (
    SELECT u.lane, u.head, max(u.seq) AS last FROM held u
    WHERE NOT u.started AND u.seq - u.head BETWEEN 2 AND ${positionCountedMax} GROUP BY u.lane, u.head
  ) w, LATERAL (
    SELECT array_agg(y.seq ORDER BY y.seq) AS seqs FROM ${s}.ops y
    WHERE y.lane = w.lane AND y.seq > w.head AND y.seq <= w.last AND y.started_at IS NULL
  ) x
  UNION ALL
  SELECT NULL, NULL, NULL, NULL, w.key, NULL, NULL, NULL, x.turns, NULL, NULL, NULL, NULL FROM (
    SELECT DISTINCT u.key FROM held u WHERE u.key IS NOT NULL
  ) w, LATERAL (
    SELECT array_agg(y.turn ORDER BY y.turn) AS turns FROM (
      SELECT p.turn FROM ${s}.parked p WHERE p.key = w.key AND p.reason = 'turn' ORDER BY p.turn LIMIT ${positionCountedMax}) y
  ) x
  UNION ALL
  SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, array_agg(r.stamp), NULL, NULL, array_agg(r.priority), NULL FROM (
    SELECT x.priority, x.stamp FROM ${s}.ready x ORDER BY x.priority, x.stamp LIMIT ${positionCountedMax}
  ) r WHERE EXISTS (SELECT FROM held u WHERE u.lane = u.id AND NOT u.started AND u.key IS NULL)
  UNION ALL
  SELECT h.id, h.type, h.status, h.error, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM ${s}.history h
  WHERE h.id = ANY ((SELECT e.ids FROM elsewhere e)::uuid[])
  UNION ALL
  SELECT d.id, d.type, 'failed', d.error, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM ${s}.dead_letters d
  WHERE d.id = ANY ((SELECT e.ids FROM elsewhere e)::uuid[])`

/** How many are claimed before it. */
function positionAmong(ready: Row | undefined, { priority, stamp }: Row): number {
  const { levels, waiting } = ready ?? {}
  if (!levels || !waiting) return 0
  let from = 0
  let to = levels.length
  while (from < to) {
    const middle = (from + to) >> 1
    const level = levels[middle] ?? 0
    const isBefore = level < Number(priority) || (level === priority && Number(waiting[middle]) < Number(stamp))
    if (isBefore) from = middle + 1
    else to = middle
  }
  return from
}

export function statusStatements({ s, on: { reads } }: Database) {
  return {
    /** The known ones of `ids`; for many at once. */
    statusOf: async (ids: readonly string[]): Promise<OperationReportRow[]> => {
      const { rows } = await reads<Row>(statusSql(s), [plainArray(ids)])
      const positions = new Map<string, Map<number, number>>()
      for (const { lane, waiting } of rows) {
        if (lane !== null && waiting !== null)
          positions.set(lane, new Map(waiting.map((seq, position) => [seq, position])))
      }
      const ready = rows.find(({ levels }) => levels !== null)
      const positionOf = (row: Row): number =>
        row.lane === row.id
          ? positionAmong(ready, row)
          : (positions.get(row.lane ?? '')?.get(row.seq ?? 0) ?? Math.max(0, row.ahead ?? 0))
      return rows.flatMap((row) => {
        const { id, type, status, error, lane, most } = row
        if (id === null) return []
        const waits = status === 'pending'
        const position = waits ? positionOf(row) : null
        return [
          {
            id,
            type,
            status,
            error,
            position,
            paceMs: waits ? row.pace_ms : null,
            isParallel: lane === id,
            abreast: most ?? 1,
          },
        ]
      })
    },
  }
}
