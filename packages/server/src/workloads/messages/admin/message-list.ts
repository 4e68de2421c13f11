/** Lists of messages, from the partitions' logs. */
import type { ConsumerMode, ListMessagesQuery, LoggedMessage } from '@spillway/protocol/schema'
import { limits, queueModeGroup } from '@spillway/protocol/wire'
import type { Static } from 'typebox'
import { instantOrNull, invalid } from '../timestamps.js'
import { stateSql, statusSql } from './message-state-sql.js'
import { offsetPage, pageOf } from './pages.js'
import type { Admin, AdminRequest } from './route.js'
import { type Visible, visibleSql } from './visible-queues.js'

type LoggedMessageView = Static<typeof LoggedMessage>
type Status = LoggedMessageView['status']
type Mode = Static<typeof ConsumerMode>

export interface ListedRow extends Record<string, unknown> {
  id: string
  partition: string
  transaction_id: string
  trace_id: string | null
  queue_name: string
  partition_name: string
  namespace: string | null
  task: string | null
  priority: number
  status: Status
  bus_groups: number
  bus_settled: number
  until: Date | null
  created_at: Date
  /** The number of candidates it was chosen from. */
  candidates: number
}

const listDefault = 100
/** How far one may page when every skipped row must be read. */
const reachMax = 1_000
/** A list over several partitions reads those with the latest pushes. */
const partitionsMax = 200
/** More than a page needs, because some have another status. */
const candidatesMore = 100

export async function listMessages(
  admin: Admin,
  { query, visible }: AdminRequest<Static<typeof ListMessagesQuery>>,
): Promise<unknown> {
  const { queue = null, partition = null, ns, namespace = ns ?? null, task = null, status = null } = query
  const isQuick = queue !== null && partition !== null && status === null
  const asked = pageOf(query, listDefault, limits.listItemsMax)
  const { offset } = asked
  if (!isQuick && offset >= reachMax) {
    throw invalid('offset', `must be less than ${reachMax}, unless a queue and a partition are given, and no status`)
  }
  // Pages may be short, so the last one need not start at a multiple of the limit.
  const limit = isQuick ? asked.limit : Math.min(asked.limit, reachMax - offset)
  const range = [instantOrNull('from', query.from), instantOrNull('to', query.to)]
  const values = [queue, partition, namespace, task, ...range, visible]
  const [found, mode] = await Promise.all([
    status === 'dead_letter' || status === 'failed'
      ? listAbandoned(admin, status, values, limit + 1, offset)
      : listLogged(admin, status, values, limit + 1, offset),
    modeOf(admin, queue, visible),
  ])
  const { items: messages, pagination } = offsetPage(found.map(toListed), { limit, offset }, admin.pageBytesMax)
  return { messages, mode, pagination }
}

/** Newest first; over several partitions, only the 200 with the latest pushes. */
async function listLogged(
  { intake, schema }: Admin,
  status: 'pending' | 'processing' | 'completed' | null,
  filter: readonly unknown[],
  limit: number,
  offset: number,
): Promise<ListedRow[]> {
  const values = [...filter, limit, offset]
  const reach = status === null ? limit + offset : 2 * (limit + offset) + candidatesMore
  const quick = await intake.read<ListedRow>(listSql(schema, status, 'afterwards'), [...values, reach])
  const [first] = quick.rows
  // Nearly all candidates match. If too few do, the second query checks each one before it counts.
  const isWhole = quick.rows.length === limit || (first !== undefined && first.candidates < reach)
  if (status === null || isWhole) return quick.rows
  const exact = await intake.read<ListedRow>(listSql(schema, status, 'first'), [...values, limit + offset])
  return exact.rows
}

/** Of a row d of mq_dead. */
export const abandonedColumns = `d.message_id AS id, d.partition, d.transaction_id, d.trace_id, d.queue AS queue_name, d.partition_name, d.namespace, d.task,
  0 AS bus_groups, 0 AS bus_settled, NULL::timestamptz AS until, d.created_at, 0 AS candidates`

/** From mq_dead, which keeps them after the log has dropped them. */
async function listAbandoned(
  { intake, schema }: Admin,
  status: 'dead_letter' | 'failed',
  filter: readonly unknown[],
  limit: number,
  offset: number,
): Promise<ListedRow[]> {
  const { rows } = await intake.read<ListedRow>(
    `SELECT ${abandonedColumns}, coalesce(q.priority, 0) AS priority, $8::text AS status
     FROM ${schema}.mq_dead d LEFT JOIN ${schema}.mq_queues q ON q.name = d.queue
     WHERE d.is_letter = ($8 = 'dead_letter') AND ($1::text IS NULL OR d.queue = $1) AND ($2::text IS NULL OR d.partition_name = $2)
       AND ($3::text IS NULL OR d.namespace = $3) AND ($4::text IS NULL OR d.task = $4)
       AND ($5::timestamptz IS NULL OR d.moved_at >= $5 AND d.created_at >= $5) AND ($6::timestamptz IS NULL OR d.created_at < $6::timestamptz + interval '1 ms')
       AND ${visibleSql('d.queue', '$7')}
     ORDER BY d.moved_at DESC, d.id LIMIT $9 OFFSET $10`,
    [...filter, status, limit, offset],
  )
  return rows
}

/** Who reads a queue: consumers without a group, groups, or both. */
async function modeOf({ intake, schema }: Admin, queue: string | null, visible: Visible): Promise<Mode> {
  const { rows } = await intake.read<{ queue_mode: boolean | null; bus: number }>(
    `SELECT bool_or(g.name = $2) AS queue_mode, count(DISTINCT g.name) FILTER (WHERE g.name <> $2) AS bus
     FROM ${schema}.mq_groups g JOIN ${schema}.mq_queues q ON q.id = g.queue
     WHERE ($1::text IS NULL OR q.name = $1) AND ${visibleSql('q.name', '$3')}`,
    [queue, queueModeGroup, visible],
  )
  return toMode(rows[0]?.queue_mode === true, rows[0]?.bus ?? 0)
}

/**
 * $1 queue, $2 partition, $3 namespace, $4 task, $5 from, $6 to, $7 visible, $8 limit, $9 offset, $10 candidates. Each
 * partition returns as many as the page could need, from where its messages of that status are. The status is `judged`
 * afterwards, for the newest of all partitions, which is quick, or first.
 */
function listSql(
  schema: string,
  status: 'pending' | 'processing' | 'completed' | null,
  judged: 'first' | 'afterwards',
): string {
  const columns = 'm.partition, m.seq, m.id, m.transaction_id, m.trace_id, m.grp, m.created_at'
  const isStatus = status === null ? 'true' : `${statusSql} = '${status}'`
  const judge = { state: stateSql(schema, 'm'), where: `AND ${isStatus}` }
  const early = judged === 'first' ? judge : { state: '', where: '' }
  const candidates = (where: string): string =>
    `(SELECT ${columns} FROM ${schema}.mq_messages m ${early.state} WHERE m.partition = p.id AND ${where} ${early.where} ORDER BY m.seq DESC LIMIT $10)`
  const range = 'm.seq > b.low AND m.seq <= b.high'
  const sources = {
    pending: candidates(`${range} AND m.seq > b.head`),
    processing: candidates(`${range} AND m.seq = ANY (b.open)`),
    completed: `${candidates(`${range} AND m.seq <= b.head`)} UNION ALL ${candidates(`${range} AND m.seq > b.head AND m.seq = ANY (b.done)`)}`,
  }
  const cursors = `FROM ${schema}.mq_cursors c`
  const late = judged === 'afterwards' && status !== null
  const page = 'LIMIT $8 OFFSET $9'
  const newest = 'ORDER BY m.created_at DESC, m.partition, m.seq DESC'
  return `WITH chosen AS MATERIALIZED (
      SELECT m.* FROM (
        SELECT p.id, p.name, p.queue, p.low, p.tail FROM ${schema}.mq_partitions p JOIN ${schema}.mq_queues q ON q.id = p.queue
        WHERE ($1::text IS NULL OR q.name = $1) AND ($2::text IS NULL OR p.name = $2) AND ($3::text IS NULL OR q.namespace = $3) AND ($4::text IS NULL OR q.task = $4)
          AND ($5::timestamptz IS NULL OR p.pushed_at >= $5::timestamptz - interval '1 minute') AND ($6::timestamptz IS NULL OR p.created_at < $6::timestamptz + interval '1 ms')
          AND p.low < p.tail AND ${visibleSql('q.name', '$7')}
        ORDER BY p.pushed_at DESC LIMIT ${partitionsMax}
      ) p CROSS JOIN LATERAL (
        SELECT CASE WHEN $5::timestamptz IS NULL THEN p.low ELSE ${schema}.mq_before(p.id, $5) END AS low,
          CASE WHEN $6::timestamptz IS NULL THEN p.tail ELSE ${schema}.mq_before(p.id, $6::timestamptz + interval '1 ms') END AS high,
          coalesce(${schema}.mq_slowest(p.queue, p.id, p.low, p.tail), 0) AS head,
          ARRAY(SELECT unnest(c.done) ${cursors} WHERE c.partition = p.id) AS done, ARRAY(SELECT unnest(c.open) ${cursors} WHERE c.partition = p.id) AS open
      ) b CROSS JOIN LATERAL (${status === null ? candidates(range) : sources[status]}) m ${newest} ${late ? 'LIMIT $10' : page}
    )
    SELECT m.*, p.name AS partition_name, p.queue_name, p.namespace, p.task, p.priority, ${statusSql} AS status, s.bus_groups, s.bus_settled, s.until,
      (SELECT count(*) FROM chosen) AS candidates
    FROM chosen m JOIN LATERAL (
      SELECT p.name, p.queue, q.name AS queue_name, q.namespace, q.task, q.priority FROM ${schema}.mq_partitions p JOIN ${schema}.mq_queues q ON q.id = p.queue WHERE p.id = m.partition
    ) p ON true ${judge.state} ${late ? `WHERE ${isStatus} ${newest} ${page}` : newest}`
}

export const toMode = (hasQueueMode: boolean, busGroupsCount: number): Mode => ({
  hasQueueMode,
  busGroupsCount,
  type: hasQueueMode ? (busGroupsCount > 0 ? 'hybrid' : 'queue') : busGroupsCount > 0 ? 'bus' : 'none',
})

export function toListed(row: ListedRow): LoggedMessageView {
  return {
    id: row.id,
    transactionId: row.transaction_id,
    traceId: row.trace_id,
    partitionId: row.partition,
    queuePath: `${row.queue_name}/${row.partition_name}`,
    queue: row.queue_name,
    partition: row.partition_name,
    namespace: row.namespace,
    task: row.task,
    queuePriority: row.priority,
    status: row.status,
    busStatus: { consumedBy: row.bus_settled, totalGroups: row.bus_groups },
    createdAt: row.created_at.toISOString(),
    leaseExpiresAt: row.until?.toISOString() ?? null,
  }
}
