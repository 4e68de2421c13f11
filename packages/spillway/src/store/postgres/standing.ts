import type { StandingRow, Tx } from '../port.js'
import { plainArray } from './arrays.js'

/** Further back the number of sequences between is close enough: it differs by what was cancelled. */
const placeCountedMax = 10_000

/**
 * Each lane is counted once, however many of its operations are asked for; only what is not in the queue is looked for
 * among what has left it. One statement: an operation that moves is seen in exactly one place.
 */
const standingSql = (s: string): string => `
  WITH waiting AS MATERIALIZED (
    SELECT o.id, o.type, o.lane, o.seq, o.error, o.started_at IS NOT NULL AS started, l.head, l.pace_ms
    FROM unnest($1::uuid[]) a(id) JOIN ${s}.ops o ON o.id = a.id JOIN ${s}.lanes l ON l.id = o.lane
  ), counted AS (
    SELECT w.lane, x.seq, x.place FROM (
      SELECT u.lane, u.head, max(u.seq) AS last FROM waiting u
      WHERE NOT u.started AND u.seq - u.head <= ${placeCountedMax} GROUP BY u.lane, u.head
    ) w, LATERAL (
      SELECT y.seq, row_number() OVER (ORDER BY y.seq) - 1 AS place FROM ${s}.ops y
      WHERE y.lane = w.lane AND y.seq > w.head AND y.seq <= w.last AND y.started_at IS NULL
    ) x
  ), left_queue AS MATERIALIZED (
    SELECT array_agg(a.id) AS ids FROM unnest($1::uuid[]) a(id) WHERE NOT EXISTS (SELECT FROM waiting w WHERE w.id = a.id)
  )
  SELECT w.id, w.type, CASE WHEN w.started THEN 'processing' ELSE 'pending' END AS status,
    CASE WHEN NOT w.started THEN coalesce(c.place, greatest(0, w.seq - w.head - 1)) END AS place,
    CASE WHEN NOT w.started THEN w.pace_ms::float8 END AS "paceMs", w.error
  FROM waiting w LEFT JOIN counted c ON c.lane = w.lane AND c.seq = w.seq
  UNION ALL
  SELECT h.id, h.type, h.status, NULL, NULL, h.error FROM ${s}.history h WHERE h.id = ANY ((SELECT ids FROM left_queue)::uuid[])
  UNION ALL
  SELECT d.id, d.type, 'failed', NULL, NULL, d.error FROM ${s}.dead_letters d WHERE d.id = ANY ((SELECT ids FROM left_queue)::uuid[])`

export async function standing(query: Tx['query'], s: string, ids: readonly string[]): Promise<StandingRow[]> {
  const { rows } = await query<StandingRow & Record<string, unknown>>(standingSql(s), [plainArray(ids)])
  return rows
}

export async function laneDepths(query: Tx['query'], s: string, lanes: readonly string[]): Promise<number[]> {
  const { rows } = await query<{ id: string; depth: number }>(
    `SELECT l.id, l.depth FROM ${s}.lanes l WHERE l.id = ANY ($1)`,
    [plainArray(lanes)],
  )
  const depths = new Map(rows.map(({ id, depth }) => [id, depth]))
  return lanes.map((lane) => depths.get(lane) ?? 0)
}
