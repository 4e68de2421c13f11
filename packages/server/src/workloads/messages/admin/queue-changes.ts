/** Creating, changing, emptying and deleting queues; maintenance. */
import { ClearQueueQuery, ConfigureQueue, MaintenanceState, SetMaintenance } from '@spillway/protocol/schema'
import { queueOptionDefaults } from '@spillway/protocol/wire'
import { ProblemError } from 'spillway/workload'
import Type from 'typebox'
import { notFound } from '../../../route-table.js'
import { pushType } from '../push/push.js'
import { optionNames, queueProblem } from '../queues.js'
import { invalid } from '../timestamps.js'
import { type Admin, operators, route, viewers } from './route.js'

const configurers = { role: ['submit', 'consume'] } as const
const serverViewers = { ...viewers, wholeServer: true } as const
const serverOperators = { ...operators, wholeServer: true } as const
const maintenanceUrl = '/api/v1/system/maintenance'
/** Limits per transaction, because pushes to these partitions wait for it. */
const cutPartitions = 50
const cutMessages = 200
const cutMs = 10_000
const restMs = 60_000

export const queueChangeRoutes = [
  route('POST', '/api/v1/configure', configurers, {
    summary: 'Create a queue, or change its options',
    description:
      'Creating one needs submit or consume, changing one needs operate. Repeating the current options changes nothing and gets the same answer as the first time.',
    body: ConfigureQueue,
    status: 201,
    async handle({ queues, seal }, { body, principal }) {
      const { queue, namespace = null, task = null, options } = body
      const problem = queueProblem(principal.queues, queue)
      if (problem !== null) throw new ProblemError(problem)
      const given: Record<string, number | boolean> = {}
      for (const name of optionNames) {
        const value = options?.[name]
        if (value !== undefined && value !== null) given[name] = value
      }
      if (options !== null && options !== undefined && 'ttl' in options) {
        const detail = 'The option ttl is not enforced here. Use retentionSeconds with retentionEnabled.'
        throw invalid('options/ttl', 'is not supported', detail)
      }
      if (given.encryptionEnabled === true && seal === null) {
        const detail = 'This server has no key to encrypt with. Set SPILLWAY_ENCRYPTION_KEY, on every instance.'
        throw invalid('options/encryptionEnabled', 'needs SPILLWAY_ENCRYPTION_KEY', detail)
      }
      const wanted = { queue, namespace, task, options: given }
      const configured = principal.roles.has('operate') ? await queues.configure(wanted) : await queues.create(wanted)
      if (configured === null) {
        const detail = `The queue ${JSON.stringify(queue)} exists. Changing it needs the role operate.`
        throw new ProblemError({ code: 'forbidden', detail })
      }
      return { configured: true, ...configured, options: { ...queueOptionDefaults, ...configured.options } }
    },
  }),
  route('DELETE', '/api/v1/resources/queues/:queue', operators, {
    summary: 'Delete a queue with its messages; dead letters stay',
    answer: Type.Object({ deleted: Type.Boolean(), queue: Type.String(), existed: Type.Boolean() }),
    missing: 'queue',
    async handle(admin, { params: { queue } }) {
      await cutLog(admin, queue)
      const [dropped] = await admin.transaction(restMs, (query) =>
        query<{ existed: boolean }>(`SELECT ${admin.schema}.mq_drop($1) AS existed`, [queue]),
      )
      return { deleted: true, queue, existed: dropped?.existed === true }
    },
  }),
  route('DELETE', '/api/v1/queues/:queue/clear', operators, {
    summary: 'Delete the messages of a queue, or of one partition',
    query: ClearQueueQuery,
    answer: Type.Object({
      cleared: Type.Boolean(),
      count: Type.Integer(),
      queue: Type.String(),
      partition: Type.String({ description: 'Its name, or all' }),
    }),
    missing: 'queue',
    async handle(admin, { params: { queue }, query: { partition } }) {
      const { read, schema, transaction } = admin
      const found = await read(
        `SELECT FROM ${schema}.mq_queues q WHERE q.name = $1
           AND ($2::text IS NULL OR EXISTS (SELECT FROM ${schema}.mq_partitions p WHERE p.queue = q.id AND p.name = $2))`,
        [queue, partition],
      )
      if (found.length === 0) throw notFound(partition === undefined ? 'queue' : 'partition')
      const cut = await cutLog(admin, queue, partition)
      const [rest] = await transaction(restMs, (query) =>
        query<{ n: number }>(`SELECT ${schema}.mq_clear($1, $2) AS n`, [queue, partition]),
      )
      return { cleared: true, count: cut + (rest?.n ?? 0), queue, partition: partition ?? 'all' }
    },
  }),
  route('GET', maintenanceUrl, serverViewers, {
    summary: 'Whether pushes are held',
    answer: MaintenanceState,
    handle: maintenanceState,
  }),
  route('POST', maintenanceUrl, serverOperators, {
    summary: 'Hold pushes (they are accepted and wait), or store the held ones, in order',
    body: SetMaintenance,
    answer: MaintenanceState,
    async handle(admin, { body: { enabled } }) {
      const { intake, push } = admin
      await intake.lanes[enabled ? 'pause' : 'resume']({ type: push.definition.type })
      const message = enabled ? 'Pushes are accepted and held.' : 'Held pushes are stored, in order.'
      return { ...(await maintenanceState(admin)), message }
    },
  }),
]

/**
 * Removes a queue's log in short steps, up to its end at the start. The final statement locks all partitions at once, or
 * blocks every push: over a million messages that would take seconds.
 */
async function cutLog({ read, schema, transaction }: Admin, queue: string, partition?: string): Promise<number> {
  const [log] = await read<{ ids: string[] | null; tails: number[] | null }>(
    `SELECT array_agg(p.id ORDER BY p.id)::text[] AS ids, array_agg(p.tail ORDER BY p.id) AS tails
       FROM ${schema}.mq_partitions p JOIN ${schema}.mq_queues q ON q.id = p.queue
       WHERE q.name = $1 AND ($2::text IS NULL OR p.name = $2) AND p.low < p.tail`,
    [queue, partition],
  )
  const ids = log?.ids ?? []
  const tails = log?.tails ?? []
  let cut = 0
  for (let at = 0; at < ids.length; ) {
    const end = at + cutPartitions
    const gone = await transaction(cutMs, async (query) => {
      const values = [ids.slice(at, end), tails.slice(at, end)]
      // Partitions before messages: the same lock order as a push.
      await query(
        `SELECT FROM ${schema}.mq_partitions p WHERE p.id = ANY ($1::uuid[]) ORDER BY p.id FOR NO KEY UPDATE`,
        values.slice(0, 1),
      )
      return query<{ n: number }>(
        `SELECT ${schema}.mq_cut(u.id, u.tail, ${cutMessages}) AS n FROM unnest($1::uuid[], $2::bigint[]) u(id, tail)`,
        values,
      )
    })
    cut += gone.reduce((sum, { n }) => sum + n, 0)
    if (gone.every(({ n }) => n < cutMessages)) at = end
  }
  return cut
}

/**
 * Maintenance: pushes are accepted and held in the operation queue, on every instance, and reach their partitions in order
 * when it ends. It is a pause of the operation type in the store, so it is exact and outlives every process.
 */
async function maintenanceState({ read, schema }: Admin) {
  // The operation queue's limit bounds the waiting pushes.
  const [held] = await read<{ held: boolean; n: number }>(
    `SELECT EXISTS (SELECT FROM ${schema}.pauses p WHERE p.queue = '' AND p.partition = $1) AS held,
       coalesce((SELECT sum(json_array_length(o.payload->'messages')) FROM ${schema}.ops o WHERE o.type = $1), 0) AS n`,
    [pushType],
  )
  return { maintenanceMode: held?.held === true, bufferedMessages: Number(held?.n ?? 0) }
}
