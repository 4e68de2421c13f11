/** Lists of messages, from the partitions' logs. */
import { type ConsumerMode, ListMessagesQuery, type LoggedMessage, LoggedMessagePage } from '@spillway/protocol/schema'
import { limits, queueModeGroup } from '@spillway/protocol/wire'
import type { Static } from 'typebox'
import { instantOrNull, invalid } from '../timestamps.js'
import { stateSql, statusSql } from './message-state-sql.js'
import { offsetPage, pageOf } from './pages.js'
import { type Admin, readers, route } from './route.js'
import { visibleSql } from './visible-queues.js'

export type ListedMessage = Static<typeof LoggedMessage>
type Mode = Static<typeof ConsumerMode>

const listDefault = 100
/** How far one may page when every skipped row must be read. */
const reachMax = 1_000
/** A list over several partitions reads those with the latest pushes. */
const partitionsMax = 200
/** More than a page needs, because some have another status. */
const candidatesMore = 100

/** Of a message m in the log, its partition p, its queue q, and its state (`stateSql`). */
export const loggedColumns = `m.id, m.transaction_id AS "transactionId", m.trace_id AS "traceId", m.partition AS "partitionId", q.name || '/' || p.name AS "queuePath",
  q.name AS queue, p.name AS partition, q.namespace, q.task, q.priority AS "queuePriority", ${statusSql} AS status,
  json_build_object('consumedBy', s.bus_settled, 'totalGroups', s.bus_groups) AS "busStatus", m.created_at AS "createdAt", s.until AS "leaseExpiresAt"`

/** The same, of a row d of mq_dead. */
export function abandonedColumns(status: string, priority: string): string {
  return `d.message_id AS id, d.transaction_id AS "transactionId", d.trace_id AS "traceId", d.partition AS "partitionId", d.queue || '/' || d.partition_name AS "queuePath",
    d.queue, d.partition_name AS partition, d.namespace, d.task, ${priority} AS "queuePriority", ${status}::text AS status,
    json_build_object('consumedBy', 0, 'totalGroups', 0) AS "busStatus", d.created_at AS "createdAt", NULL::timestamptz AS "leaseExpiresAt"`
}

export const messageListRoute = route('GET', '/api/v1/messages', readers, {
  summary: 'Messages, newest first; without a partition: of the 200 partitions with the latest pushes',
  query: ListMessagesQuery,
  answer: LoggedMessagePage,
  async handle(admin, { query, principal }) {
    const { queue, partition, ns, namespace = ns, task, status = null } = query
    const isQuick = queue !== undefined && partition !== undefined && status === null
    const asked = pageOf(query, listDefault, limits.listItemsMax)
    const { offset } = asked
    if (!isQuick && offset >= reachMax) {
      throw invalid('offset', `must be less than ${reachMax}, unless a queue and a partition are given, and no status`)
    }
    // Pages may be short, so the last one need not start at a multiple of the limit.
    const limit = isQuick ? asked.limit : Math.min(asked.limit, reachMax - offset)
    const range = [instantOrNull('from', query.from), instantOrNull('to', query.to)]
    const values = [queue, partition, namespace, task, ...range, principal.queues]
    const [found, mode] = await Promise.all([
      status === 'dead_letter' || status === 'failed'
        ? listAbandoned(admin, status, values, limit + 1, offset)
        : listLogged(admin, status, values, limit + 1, offset),
      modeOf(admin, [queue, queueModeGroup, principal.queues]),
    ])
    const { items: messages, pagination } = offsetPage(found, { limit, offset }, admin.pageBytesMax)
    return { messages, mode, pagination }
  },
})

/** Newest first; over several partitions, only the 200 with the latest pushes. */
async function listLogged(
  { read, schema }: Admin,
  status: 'pending' | 'processing' | 'completed' | null,
  filter: readonly unknown[],
  limit: number,
  offset: number,
): Promise<ListedMessage[]> {
  const list = async (judged: 'first' | 'afterwards', reach: number) => {
    const rows = await read<ListedMessage & { candidates: number }>(listSql(schema, status, judged), [
      ...filter,
      ...[limit, offset, reach],
    ])
    // Fewer candidates than it looked for: there are no more.
    const isWhole = rows.length === limit || (rows[0] !== undefined && rows[0].candidates < reach)
    return { isWhole, messages: rows.map(({ candidates: _, ...message }) => message) }
  }
  const reach = status === null ? limit + offset : 2 * (limit + offset) + candidatesMore
  const quick = await list('afterwards', reach)
  // Nearly all candidates match. If too few do, the second query checks each one before it counts.
  if (status === null || quick.isWhole) return quick.messages
  return (await list('first', limit + offset)).messages
}

/** From mq_dead, which keeps them after the log has dropped them. */
function listAbandoned(
  { read, schema }: Admin,
  status: 'dead_letter' | 'failed',
  filter: readonly unknown[],
  limit: number,
  offset: number,
): Promise<ListedMessage[]> {
  return read(
    `SELECT ${abandonedColumns('$8', 'coalesce(q.priority, 0)')}
     FROM ${schema}.mq_dead d LEFT JOIN ${schema}.mq_queues q ON q.name = d.queue
     WHERE d.is_letter = ($8 = 'dead_letter') AND ($1::text IS NULL OR d.queue = $1) AND ($2::text IS NULL OR d.partition_name = $2)
       AND ($3::text IS NULL OR d.namespace = $3) AND ($4::text IS NULL OR d.task = $4)
       AND ($5::timestamptz IS NULL OR d.moved_at >= $5 AND d.created_at >= $5) AND ($6::timestamptz IS NULL OR d.created_at < $6::timestamptz + interval '1 ms')
       AND ${visibleSql('d.queue', '$7')}
     ORDER BY d.moved_at DESC, d.id LIMIT $9 OFFSET $10`,
    [...filter, status, limit, offset],
  )
}

/** Who reads a queue: consumers without a group, groups, or both. */
async function modeOf({ read, schema }: Admin, values: readonly unknown[]): Promise<Mode> {
  const [groups] = await read<{ queue_mode: boolean | null; bus: number }>(
    `SELECT bool_or(g.name = $2) AS queue_mode, count(DISTINCT g.name) FILTER (WHERE g.name <> $2) AS bus
     FROM ${schema}.mq_groups g JOIN ${schema}.mq_queues q ON q.id = g.queue
     WHERE ($1::text IS NULL OR q.name = $1) AND ${visibleSql('q.name', '$3')}`,
    values,
  )
  return toMode(groups?.queue_mode === true, groups?.bus ?? 0)
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
    SELECT ${loggedColumns}, (SELECT count(*) FROM chosen) AS candidates
    FROM chosen m JOIN ${schema}.mq_partitions p ON p.id = m.partition JOIN ${schema}.mq_queues q ON q.id = p.queue ${judge.state} ${late ? `WHERE ${isStatus} ${newest} ${page}` : newest}`
}

export const toMode = (hasQueueMode: boolean, busGroupsCount: number): Mode => ({
  hasQueueMode,
  busGroupsCount,
  type: hasQueueMode ? (busGroupsCount > 0 ? 'hybrid' : 'queue') : busGroupsCount > 0 ? 'bus' : 'none',
})
