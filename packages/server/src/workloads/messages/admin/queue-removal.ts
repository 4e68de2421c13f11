/** Emptying and deleting queues. */
import type { ClearQueueQuery } from '@spillway/protocol/schema'
import type { Static } from 'typebox'
import { patientTransaction } from './patient.js'
import { type Admin, type AdminRequest, notFound } from './route.js'

/** Limits per transaction, because pushes to these partitions wait for it. */
const cutPartitions = 50
const cutMessages = 200
const cutMs = 10_000
const restMs = 60_000

/** Removes the messages of a queue, or of one partition. */
export async function clearQueue(
  admin: Admin,
  { params: { queue }, query }: AdminRequest<Static<typeof ClearQueueQuery>>,
): Promise<unknown> {
  const { intake, schema } = admin
  const { partition = null } = query
  const { rows } = await intake.read(
    `SELECT FROM ${schema}.mq_queues q WHERE q.name = $1
       AND ($2::text IS NULL OR EXISTS (SELECT FROM ${schema}.mq_partitions p WHERE p.queue = q.id AND p.name = $2))`,
    [queue, partition],
  )
  if (rows.length === 0) throw notFound(partition === null ? 'queue' : 'partition')
  const cut = await cutLog(admin, queue, partition)
  const rest = await patientTransaction(intake, restMs, async (tx) => {
    const cleared = await tx.query<{ n: number }>(`SELECT ${schema}.mq_clear($1, $2) AS n`, [queue, partition])
    return cleared.rows[0]?.n ?? 0
  })
  return { cleared: true, count: cut + rest, queue, partition: partition ?? 'all' }
}

/** Dead letters stay. */
export async function deleteQueue(admin: Admin, { params: { queue } }: AdminRequest): Promise<unknown> {
  const { intake, schema } = admin
  await cutLog(admin, queue, null)
  const { rows } = await patientTransaction(intake, restMs, (tx) =>
    tx.query<{ existed: boolean }>(`SELECT ${schema}.mq_drop($1) AS existed`, [queue]),
  )
  return { deleted: true, queue, existed: rows[0]?.existed === true }
}

/**
 * Removes a queue's log in short steps, up to its end at the start. The final statement locks all partitions at once, or
 * blocks every push: over a million messages that would take seconds.
 */
async function cutLog({ intake, schema }: Admin, queue: string, partition: string | null): Promise<number> {
  const { rows } = await intake.read<{ ids: string[] | null; tails: number[] | null }>(
    `SELECT array_agg(p.id ORDER BY p.id)::text[] AS ids, array_agg(p.tail ORDER BY p.id) AS tails
       FROM ${schema}.mq_partitions p JOIN ${schema}.mq_queues q ON q.id = p.queue
       WHERE q.name = $1 AND ($2::text IS NULL OR p.name = $2) AND p.low < p.tail`,
    [queue, partition],
  )
  const ids = rows[0]?.ids ?? []
  const tails = rows[0]?.tails ?? []
  let cut = 0
  for (let at = 0; at < ids.length; ) {
    const end = at + cutPartitions
    const gone = await patientTransaction(intake, cutMs, async (tx) => {
      const values = [ids.slice(at, end), tails.slice(at, end)]
      // Partitions before messages: the same lock order as a push.
      await tx.query(
        `SELECT FROM ${schema}.mq_partitions p WHERE p.id = ANY ($1::uuid[]) ORDER BY p.id FOR NO KEY UPDATE`,
        values.slice(0, 1),
      )
      const steps = await tx.query<{ n: number }>(
        `SELECT ${schema}.mq_cut(u.id, u.tail, ${cutMessages}) AS n FROM unnest($1::uuid[], $2::bigint[]) u(id, tail)`,
        values,
      )
      return steps.rows.map(({ n }) => n)
    })
    cut += gone.reduce((sum, n) => sum + n, 0)
    if (gone.every((n) => n < cutMessages)) at = end
  }
  return cut
}
