/** Status of the messages: depth, lag and throughput of all, and of one queue by partition and group. */
import { type GroupState, ListEntriesQuery, QueueStatus, StatusQuery, SystemStatus } from '@spillway/protocol/schema'
import { cutRows, pageSql } from 'spillway/workload'
import type { Static } from 'typebox'
import { toConfigured } from '../queues.js'
import { joinedSql, looksMax, oldestSql, progressSql, rankedSql, unjoinedSql } from './group-progress-sql.js'
import { offsetPage, pageOf } from './pages.js'
import {
  countDead,
  filterValues,
  type PartitionRow,
  partitionRows,
  type QueueFilter,
  queueFilterSql,
  queueRows,
  toCounts,
  toPartition,
  toQueue,
  toSummary,
  totalOf,
} from './queues.js'
import { type Admin, readers, route } from './route.js'
import { visibleSql } from './visible-queues.js'

type StatusView = Static<typeof SystemStatus>
type PartitionState = Static<typeof QueueStatus>['partitions'][number]

/** A group in a partition. */
interface GroupPosition {
  partition: string
  grp_name: string
  depth: number
  open: number
  moved_at: string | null
  /** The partition's position in the page, from 1. */
  nth: number
  cut: boolean
}

const partitionsDefault = 200
const queuesMax = 100
const groupsMax = 1_000
/** The JSON size of a group in a partition, without its name. */
const groupBytes = 100
const errorsMax = 10
/** How many of the newest dead letters are read for their errors. */
const errorsOf = 10_000

export const statusRoutes = [
  route('GET', '/api/v1/status', readers, {
    summary: 'Depth, leases, dead letters and throughput',
    query: StatusQuery,
    answer: SystemStatus,
    async handle(admin, { query: { queue, namespace, task }, principal }) {
      const filter = { queue, namespace, task, visible: principal.queues }
      const [total, deepest, dead, leases, topErrors] = await Promise.all([
        totalOf(admin, filter),
        queueRows(admin, filter, '', 'ORDER BY pending DESC, q.name LIMIT $6', [queuesMax]),
        countDead(admin, filter),
        countLeases(admin, filter),
        listErrors(admin, filter),
      ])
      return {
        timestamp: new Date().toISOString(),
        throughput: admin.throughput.sample(`status ${JSON.stringify(filter)}`, {
          ingested: total.ingested,
          processed: total.consumed,
        }),
        queues: deepest.map((row) => ({ ...toSummary(row), totalConsumed: row.consumed })),
        messages: toCounts(total, dead),
        leases,
        deadLetterQueue: { totalMessages: dead.letters, affectedPartitions: dead.partitions, topErrors },
      }
    },
  }),
  route('GET', '/api/v1/status/queues/:queue', readers, {
    summary: 'One queue: depth, lag and throughput, by partition and group',
    query: ListEntriesQuery,
    answer: QueueStatus,
    missing: 'queue',
    /** Partitions are sorted by name. */
    async handle(admin, { params: { queue }, query }) {
      const { read, schema, pageBytesMax } = admin
      const asked = pageOf(query, partitionsDefault)
      const [row] = await queueRows(admin, { queue })
      if (row === undefined) return null
      const [[config], partitions, dead, groups] = await Promise.all([
        read(`SELECT q.* FROM ${schema}.mq_queues q WHERE q.id = $1`, [row.id]),
        partitionRows(admin, row.id, asked),
        countDead(admin, { queue }),
        groupsOf(admin, row.id),
      ])
      const room = Math.max(0, pageBytesMax - Buffer.byteLength(JSON.stringify(groups)))
      const { states, isCut } = await withGroups(admin, partitions, room)
      const page = offsetPage(states, asked, room, isCut)
      const counts = toCounts(row, dead)
      const { options } = toConfigured(config ?? {})
      return {
        queue: { ...toQueue(row), priority: options.priority, config: { ...options, maxQueueSize: options.maxSize } },
        partitionCount: row.partitions,
        partitions: page.items,
        totals: { messages: counts, ...counts },
        consumerGroups: groups,
        throughput: admin.throughput.sample(`queue ${queue}`, { ingested: row.ingested, processed: row.consumed }),
        pagination: page.pagination,
      }
    },
  }),
]

/** `queue`: its id. */
function groupsOf({ readLong, schema }: Admin, queue: string): Promise<Static<typeof GroupState>[]> {
  return readLong(
    `WITH page AS MATERIALIZED (SELECT g.id, g.name, g.queue, g.reached FROM ${schema}.mq_groups g WHERE g.queue = $1 ORDER BY g.name LIMIT ${groupsMax})
     SELECT page.name, (coalesce(x.depth, 0) + u.depth)::bigint AS depth, coalesce(x.processing, 0) AS processing, coalesce(x.consumed, 0) AS consumed,
       coalesce(x.lagging, 0) + u.lagging AS "partitionsWithLag", coalesce(x.looked, 0) AS "partitionsLookedAt", greatest(0, x.lag_seconds) AS "maxTimeLag"
     FROM page JOIN (${unjoinedSql(schema, 'page')}) u ON u.id = page.id LEFT JOIN (
       SELECT r.grp, sum(r.depth) AS depth, sum(r.open)::bigint AS processing, sum(r.consumed)::bigint AS consumed,
         count(*) FILTER (WHERE r.depth > 0) AS lagging, count(o.oldest) AS looked, floor(extract(epoch FROM ${schema}.clock() - min(o.oldest)))::bigint AS lag_seconds
       FROM (${rankedSql(joinedSql(schema, 'p.queue = $1'), '1')}) r ${oldestSql(schema, 'r', `r.depth > 0 AND r.rank <= ${looksMax}`)} GROUP BY r.grp
     ) x ON x.grp = page.id ORDER BY page.name`,
    [queue],
  )
}

/**
 * Partitions, each with all groups of the queue. With very many groups there are fewer partitions, and the first one,
 * which is always present, may lack groups.
 */
async function withGroups(
  { readLong, schema }: Admin,
  partitions: readonly PartitionRow[],
  bytesMax: number,
): Promise<{ states: PartitionState[]; isCut: boolean }> {
  const progress = progressSql(schema, 'p.id = ANY ($1::uuid[])')
  const found = await readLong<GroupPosition>(
    pageSql(
      `SELECT g.partition, g.grp_name, g.depth, g.open, g.moved_at, array_position($1::uuid[], g.partition) AS nth, octet_length(g.grp_name) + ${groupBytes} AS bytes FROM (${progress}) g`,
      'r.nth, r.grp_name',
      '$2',
    ),
    [partitions.map(({ id }) => id), bytesMax],
  )
  const { rows, isCut } = cutRows(found, (row) => row)
  const groups = new Map<string, GroupPosition[]>()
  for (const row of rows) {
    const before = groups.get(row.partition)
    if (before === undefined) groups.set(row.partition, [row])
    else before.push(row)
  }
  // The last partition that was read may lack groups.
  const whole = isCut ? Math.max(1, (rows.at(-1)?.nth ?? 1) - 1) : partitions.length
  const isPart = isCut && rows.at(-1)?.nth === 1
  const states = partitions.slice(0, whole).map((partition) => ({
    ...toPartition(partition),
    cursor: { totalConsumed: partition.consumed },
    consumerGroups: (groups.get(partition.id) ?? []).map((row) => ({
      name: row.grp_name,
      depth: row.depth,
      processing: row.open,
      lastConsumedAt: row.moved_at,
    })),
    ...(isPart && { truncated: true as const }),
  }))
  return { states, isCut: whole < partitions.length }
}

async function countLeases({ readLong, schema }: Admin, filter: QueueFilter): Promise<StatusView['leases']> {
  const batch = 'coalesce(sum(cardinality(c.batch)), 0)::bigint'
  const [leases] = await readLong<StatusView['leases']>(
    `SELECT count(DISTINCT l.id) AS active, count(c.grp) AS "partitionsWithLeases", ${batch} AS "totalBatchSize", ${batch} - coalesce(sum(cardinality(c.open)), 0)::bigint AS "totalAcked"
       FROM ${schema}.mq_leases l JOIN ${schema}.mq_groups g ON g.id = l.grp JOIN ${schema}.mq_queues q ON q.id = g.queue
         LEFT JOIN LATERAL unnest(l.partitions) u(partition) ON true LEFT JOIN ${schema}.mq_cursors c ON c.partition = u.partition AND c.grp = l.grp AND c.lease = l.id
       WHERE l.until > ${schema}.clock() AND ${queueFilterSql}`,
    filterValues(filter),
  )
  return leases ?? { active: 0, partitionsWithLeases: 0, totalBatchSize: 0, totalAcked: 0 }
}

function listErrors({ readLong, schema }: Admin, { queue, namespace, task, visible }: QueueFilter) {
  return readLong<{ error: string | null; count: number }>(
    `SELECT x.error, count(*) AS count FROM (
         SELECT left(d.error, 200) AS error FROM ${schema}.mq_dead d WHERE d.is_letter AND ($1::text IS NULL OR d.queue = $1) AND ($2::text IS NULL OR d.namespace = $2)
           AND ($3::text IS NULL OR d.task = $3) AND ${visibleSql('d.queue', '$4')} ORDER BY d.moved_at DESC LIMIT ${errorsOf}
       ) x GROUP BY x.error ORDER BY count(*) DESC, x.error LIMIT ${errorsMax}`,
    [queue, namespace, task, visible],
  )
}
