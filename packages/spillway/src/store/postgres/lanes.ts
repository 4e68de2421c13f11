import type { LaneRow } from '../port.js'
import { plainArray } from './arrays.js'
import type { Database } from './database.js'

interface Row extends Omit<LaneRow, 'id'>, Record<string, unknown> {
  /** Null: no lane fits. */
  id: string | null
  last: string | null
}

const columns = `id, queue, partition, depth, paused_by AS "pausedBy", ready AS "isReady", label,
  parked_for AS "parkedFor", due_at AS "dueAt", due_ms AS "dueMs", age_ms AS "ageMs", head, type, started AS "isStarted",
  attempts, max_attempts AS "maxAttempts", last`

export function laneStatements({ s, on: { reads } }: Database) {
  return {
    /**
     * Up to `limit` lanes that hold operations, behind the lane `after`, of a queue and of queues by name (`orders*`: a
     * prefix). Examines `examined` lanes at most: `last` is where to continue if it ended for that, else null.
     */
    lanes: async (
      filter: { queue: string | null; queues: readonly string[] | null },
      page: { after: string | null; limit: number; examined: number },
    ): Promise<{ rows: LaneRow[]; last: string | null }> => {
      const { rows } = await reads<Row>(`SELECT ${columns} FROM ${s}.lanes_page($1, $2, $3, $4, $5)`, [
        filter.queue,
        filter.queues,
        page.after,
        page.limit,
        page.examined,
      ])
      const found = rows.filter((row): row is Row & LaneRow => row.id !== null)
      return { rows: found.map(({ last, ...row }) => row as LaneRow), last: rows[0]?.last ?? null }
    },
    /** Unfinished operations of each lane, or of each key. */
    laneDepths: async (lanes: readonly string[]): Promise<number[]> => {
      const { rows } = await reads<{ id: string; depth: number }>(
        `SELECT x.id, sum(x.depth) AS depth FROM (
           SELECT l.id, l.depth FROM ${s}.lanes l WHERE l.id = ANY ($1)
           UNION ALL SELECT k.key, k.lanes FROM ${s}.turns k WHERE k.key = ANY ($1)) x GROUP BY x.id`,
        [plainArray(lanes)],
      )
      const depths = new Map(rows.map(({ id, depth }) => [id, Number(depth)]))
      return lanes.map((lane) => depths.get(lane) ?? 0)
    },
  }
}
