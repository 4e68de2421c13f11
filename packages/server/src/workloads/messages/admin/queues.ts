/** Queues and their contents. */
import type {
  ListEntriesQuery,
  ListQueuesQuery,
  MessageCounts,
  NamespaceList,
  QueueDetails,
  QueueSummary,
  ResourceOverview,
} from '@spillway/protocol/schema'
import type { Static } from 'typebox'
import { joinedSql, looksMax, oldestSql, partitionSql, queuesSql, rankedSql } from './group-progress-sql.js'
import { type Asked, offsetPage, pageOf } from './pages.js'
import type { Admin, AdminRequest } from './route.js'
import { type Visible, visibleSql } from './visible-queues.js'

export interface QueueFilter {
  queue: string | null
  /** A part of its name. */
  search: string | null
  namespace: string | null
  task: string | null
  visible: Visible
}

type Counts = Static<typeof MessageCounts>
type Summary = Static<typeof QueueSummary>
type Details = Static<typeof QueueDetails>
type Overview = Static<typeof ResourceOverview>
type Share = Omit<Static<typeof NamespaceList>['namespaces'][number], 'namespace'>
type EntriesRequest = AdminRequest<Static<typeof ListEntriesQuery>>

interface Sums extends Record<string, unknown> {
  partitions: number
  total: number
  pending: number
  processing: number
  completed: number
  consumed: number
  ingested: number
}

export interface QueueRow extends Sums {
  id: number
  name: string
  namespace: string | null
  task: string | null
  created_at: Date
}

interface Totals extends Sums {
  queues: number
  namespaces: number
  tasks: number
}

export interface PartitionRow extends Record<string, unknown> {
  id: string
  name: string
  created_at: Date
  pushed_at: Date
  total: number
  pending: number
  processing: number
  completed: number
  consumed: number
  oldest: Date | null
  newest: Date | null
  letters: number
  skipped: number
}

const listDefault = 1_000
/** Dead letters are counted up to here. */
const deadCountMax = 100_000
const partitionDeadMax = 10_000

/** $1 queue, $2 search, $3 namespace, $4 task, $5 visible. */
export const queueFilterSql = `($1::text IS NULL OR q.name = $1) AND ($2::text IS NULL OR position($2 IN q.name) > 0) AND ($3::text IS NULL OR q.namespace = $3)
  AND ($4::text IS NULL OR q.task = $4) AND ${visibleSql('q.name', '$5')}`

export function filterValues({ queue, search, namespace, task, visible }: QueueFilter): unknown[] {
  return [queue, search, namespace, task, visible]
}

/** Newest first. */
export async function listQueues(
  admin: Admin,
  request: AdminRequest<Static<typeof ListQueuesQuery>>,
): Promise<unknown> {
  const { search = null, namespace = null, task = null } = request.query
  const asked = pageOf(request.query, listDefault)
  const filter = { queue: null, search, namespace, task, visible: request.visible }
  const newest = 'q.created_at DESC, q.id DESC'
  const rows = await queueRows(admin, filter, `ORDER BY ${newest} LIMIT $6 OFFSET $7`, `ORDER BY ${newest}`, [
    asked.limit + 1,
    asked.offset,
  ])
  const { items: queues, pagination } = offsetPage(rows.map(toSummary), asked, admin.pageBytesMax)
  return { queues, pagination }
}

/** Null: it does not exist. Its partitions are sorted by name. */
export async function getQueue(admin: Admin, { params, query }: EntriesRequest): Promise<Details | null> {
  const filter = { ...anyQueue, queue: params.queue }
  const asked = pageOf(query, listDefault)
  const [row] = await queueRows(admin, filter)
  if (row === undefined) return null
  const [partitions, dead] = await Promise.all([partitionRows(admin, row.id, asked), countDead(admin, filter)])
  const page = offsetPage(partitions.map(toPartition), asked, admin.pageBytesMax)
  return {
    ...toQueue(row),
    partitionCount: row.partitions,
    partitions: page.items,
    totals: toCounts(row, dead),
    pagination: page.pagination,
  }
}

/** All queues together. */
export async function getOverview(admin: Admin, { visible }: AdminRequest): Promise<Overview> {
  const filter = { ...anyQueue, visible }
  const [row, dead, lag] = await Promise.all([totalOf(admin, filter), countDead(admin, filter), lagOf(admin, visible)])
  const [rates] = admin.throughput.sample(`overview ${visible?.join('\0') ?? ''}`, {
    ingested: row.ingested,
    processed: row.consumed,
  })
  return {
    queues: row.queues,
    partitions: row.partitions,
    namespaces: row.namespaces,
    tasks: row.tasks,
    messages: toCounts(row, dead),
    lag,
    ...(rates !== undefined && {
      throughput: { ingestedPerSecond: rates.ingestedPerSecond, processedPerSecond: rates.processedPerSecond },
    }),
    timestamp: new Date().toISOString(),
    statsAge: 0,
  }
}

export async function listNamespaces(admin: Admin, request: EntriesRequest): Promise<unknown> {
  const { items, pagination } = await shares(admin, request, 'namespace')
  return { namespaces: items.map(({ name, ...share }) => ({ namespace: name, ...share })), pagination }
}

export async function listTasks(admin: Admin, request: EntriesRequest): Promise<unknown> {
  const { items, pagination } = await shares(admin, request, 'task')
  return { tasks: items.map(({ name, ...share }) => ({ task: name, ...share })), pagination }
}

/** By namespace or task; without one, a queue is left out. */
async function shares({ query, schema, pageBytesMax }: Admin, request: EntriesRequest, column: 'namespace' | 'task') {
  const asked = pageOf(request.query, listDefault)
  const { rows } = await query<QueueRow & { queues: number }>(
    `SELECT q.${column} AS name, count(DISTINCT q.id) AS queues, count(p.id) AS partitions, coalesce(sum(p.total), 0)::bigint AS total,
       coalesce(sum(p.pending), 0)::bigint AS pending, coalesce(sum(p.processing), 0)::bigint AS processing
     FROM ${schema}.mq_queues q LEFT JOIN (${partitionSql(schema, `p.queue = ${queuesSql(schema, `q.${column} <> ''`)}`)}) p ON p.queue = q.id
     WHERE q.${column} <> '' AND ${visibleSql('q.name', '$1')} GROUP BY q.${column} ORDER BY q.${column} LIMIT $2 OFFSET $3`,
    [request.visible, asked.limit + 1, asked.offset],
  )
  const found = rows.map(({ name, queues, partitions, total, pending, processing }): Share & { name: string } => ({
    name,
    queues,
    partitions,
    messages: { total, pending, processing },
  }))
  return offsetPage(found, asked, pageBytesMax)
}

/** `page`: order and limit of the queues; `end`: of the answer. Their values begin with $6. */
export async function queueRows(
  { query, schema }: Admin,
  filter: QueueFilter,
  page = '',
  end = '',
  values: readonly unknown[] = [],
): Promise<QueueRow[]> {
  const { rows } = await query<QueueRow>(
    `WITH page AS (SELECT q.* FROM ${schema}.mq_queues q WHERE ${queueFilterSql} ${page})
     SELECT q.id, q.name, q.namespace, q.task, q.created_at, coalesce(x.partitions, 0) AS partitions, coalesce(x.total, 0) AS total, coalesce(x.pending, 0) AS pending,
       coalesce(x.processing, 0) AS processing, coalesce(x.completed, 0) AS completed, coalesce(x.consumed, 0) AS consumed, coalesce(x.ingested, 0) AS ingested
     FROM page q LEFT JOIN (
       SELECT p.queue, count(*) AS partitions, sum(p.total)::bigint AS total, sum(p.pending)::bigint AS pending, sum(p.processing)::bigint AS processing,
         sum(p.completed)::bigint AS completed, sum(p.consumed)::bigint AS consumed, sum(p.tail)::bigint AS ingested
       FROM (${partitionSql(schema, 'p.queue = ANY (ARRAY(SELECT page.id FROM page))')}) p GROUP BY p.queue
     ) x ON x.queue = q.id ${end}`,
    [...filterValues(filter), ...values],
  )
  return rows
}

/** By name, with one more than the page if there are more. */
export async function partitionRows(
  { query, schema }: Admin,
  queue: number,
  { limit, offset }: Asked,
): Promise<PartitionRow[]> {
  const at = (order: string): string =>
    `(SELECT m.created_at FROM ${schema}.mq_messages m WHERE m.partition = p.id ORDER BY m.seq ${order} LIMIT 1)`
  const page = `SELECT x.id FROM ${schema}.mq_partitions x WHERE x.queue = $1 ORDER BY x.name, x.id LIMIT $2 OFFSET $3`
  const { rows } = await query<PartitionRow>(
    `SELECT p.id, p.name, p.created_at, p.pushed_at, p.total, p.pending, p.processing, p.completed, p.consumed, ${at('ASC')} AS oldest, ${at('DESC')} AS newest, d.letters, d.skipped
     FROM (${partitionSql(schema, `p.id = ANY (ARRAY(${page}))`)}) p CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE x.is_letter) AS letters, count(*) FILTER (WHERE NOT x.is_letter) AS skipped
       FROM (SELECT y.is_letter FROM ${schema}.mq_dead y WHERE y.partition = p.id LIMIT ${partitionDeadMax}) x
     ) d ORDER BY p.name, p.id`,
    [queue, limit + 1, offset],
  )
  return rows
}

/** Dead letters and records of skipped messages, of existing and deleted queues. */
export async function countDead(
  { query, schema }: Admin,
  { queue, namespace, task, visible }: QueueFilter,
): Promise<{ letters: number; skipped: number; partitions: number }> {
  const { rows } = await query<{ letters: number; skipped: number; partitions: number }>(
    `SELECT count(*) FILTER (WHERE x.is_letter) AS letters, count(*) FILTER (WHERE NOT x.is_letter) AS skipped, count(DISTINCT x.partition) FILTER (WHERE x.is_letter) AS partitions
     FROM (SELECT d.is_letter, d.partition FROM ${schema}.mq_dead d WHERE ($1::text IS NULL OR d.queue = $1) AND ($2::text IS NULL OR d.namespace = $2)
       AND ($3::text IS NULL OR d.task = $3) AND ${visibleSql('d.queue', '$4')} LIMIT ${deadCountMax}) x`,
    [queue, namespace, task, visible],
  )
  return rows[0] ?? { letters: 0, skipped: 0, partitions: 0 }
}

/** Totals over all queues. */
export async function totalOf({ query, schema }: Admin, filter: QueueFilter): Promise<Totals> {
  const { rows } = await query<Totals>(
    `SELECT (SELECT count(*) FROM ${schema}.mq_queues q WHERE ${queueFilterSql}) AS queues,
       (SELECT count(DISTINCT nullif(q.namespace, '')) FROM ${schema}.mq_queues q WHERE ${queueFilterSql}) AS namespaces,
       (SELECT count(DISTINCT nullif(q.task, '')) FROM ${schema}.mq_queues q WHERE ${queueFilterSql}) AS tasks,
       count(*) AS partitions, coalesce(sum(p.total), 0)::bigint AS total, coalesce(sum(p.pending), 0)::bigint AS pending, coalesce(sum(p.processing), 0)::bigint AS processing,
       coalesce(sum(p.completed), 0)::bigint AS completed, coalesce(sum(p.consumed), 0)::bigint AS consumed, coalesce(sum(p.tail), 0)::bigint AS ingested
     FROM (${partitionSql(schema, `p.queue = ${queuesSql(schema, queueFilterSql)}`)}) p`,
    filterValues(filter),
  )
  const [row] = rows
  if (row === undefined) throw new Error('the totals query returned no row')
  return row
}

/** Over all groups and their joined partitions in which messages wait. */
async function lagOf({ query, schema }: Admin, visible: Visible): Promise<Overview['lag']> {
  const rounded = (value: string): string => `round(coalesce(${value}, 0)::numeric, 3)`
  const spread = (value: string): string =>
    `json_build_object('avg', ${rounded(`avg(${value})`)}, 'median', ${rounded(`percentile_cont(0.5) WITHIN GROUP (ORDER BY ${value})`)},
       'min', ${rounded(`min(${value})`)}, 'max', ${rounded(`max(${value})`)})`
  const waiting = `SELECT r.* FROM (${joinedSql(schema, `p.queue = ${queuesSql(schema, visibleSql('q.name', '$1'))}`)}) r WHERE r.depth > 0`
  const { rows } = await query<Overview['lag']>(
    `SELECT ${spread('x.seconds')} AS time, ${spread('x.depth')} AS "offset" FROM (
       SELECT r.depth, greatest(0, extract(epoch FROM ${schema}.clock() - o.oldest))::float8 AS seconds
       FROM (${rankedSql(waiting, '1')}) r ${oldestSql(schema, 'r', `r.rank <= ${looksMax}`)}
     ) x`,
    [visible],
  )
  const [row] = rows
  if (row === undefined) throw new Error('the lag query returned no row')
  return row
}

export const anyQueue: QueueFilter = { queue: null, search: null, namespace: null, task: null, visible: null }

export const toQueue = (row: QueueRow): Pick<Summary, 'id' | 'name' | 'namespace' | 'task' | 'createdAt'> => ({
  id: String(row.id),
  name: row.name,
  namespace: row.namespace,
  task: row.task,
  createdAt: row.created_at.toISOString(),
})

export const toSummary = (row: QueueRow): Summary => ({
  ...toQueue(row),
  partitions: row.partitions,
  messages: { total: row.total, pending: row.pending, processing: row.processing },
})

export const toCounts = (
  { total, pending, processing, completed }: Pick<Sums, 'total' | 'pending' | 'processing' | 'completed'>,
  { letters, skipped }: { letters: number; skipped: number },
): Counts => ({ total, pending, processing, completed, failed: skipped, deadLetter: letters })

export function toPartition(row: PartitionRow): Details['partitions'][number] {
  const counts = toCounts(row, row)
  return {
    id: row.id,
    name: row.name,
    createdAt: row.created_at.toISOString(),
    lastActivity: row.pushed_at.toISOString(),
    stats: counts,
    messages: counts,
    oldestMessage: row.oldest?.toISOString() ?? null,
    newestMessage: row.newest?.toISOString() ?? null,
  }
}
