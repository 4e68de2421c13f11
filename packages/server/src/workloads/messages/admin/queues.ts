/** Queues and their contents. */
import {
  ListEntriesQuery,
  ListQueuesQuery,
  type MessageCounts,
  QueueDetails,
  QueuePage,
  type QueueSummary,
  ResourceOverview,
} from '@spillway/protocol/schema'
import type { Static } from 'typebox'
import { joinedSql, looksMax, oldestSql, partitionSql, queuesSql, rankedSql } from './group-progress-sql.js'
import { type Asked, offsetPage, pageOf } from './pages.js'
import { type Admin, readers, route } from './route.js'
import { visibleSql } from './visible-queues.js'

/** Undefined: any. */
export interface QueueFilter {
  queue?: string | undefined
  /** A part of its name. */
  search?: string | undefined
  namespace?: string | undefined
  task?: string | undefined
  visible?: readonly string[] | undefined
}

type Counts = Static<typeof MessageCounts>
type Summary = Static<typeof QueueSummary>
type Queue = Pick<Summary, 'id' | 'name' | 'namespace' | 'task' | 'createdAt'>
type Partition = Static<typeof QueueDetails>['partitions'][number]
type Overview = Static<typeof ResourceOverview>

/** Messages by state, without the dead ones. */
type LiveCounts = Omit<Counts, 'failed' | 'deadLetter'>

interface DeadCounts {
  letters: number
  skipped: number
}

interface Sums extends LiveCounts {
  partitions: number
  consumed: number
  ingested: number
}

type QueueRow = Queue & Sums

interface Totals extends Sums {
  queues: number
  namespaces: number
  tasks: number
}

export type PartitionRow = Omit<Partition, 'stats' | 'messages'> & LiveCounts & DeadCounts & { consumed: number }

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

export const queueRoutes = [
  ...['/api/v1/resources/queues', '/api/v1/status/queues'].map((url) =>
    route('GET', url, readers, {
      summary: 'Queues and their depth, newest first',
      query: ListQueuesQuery,
      answer: QueuePage,
      async handle(admin, { query: { search, namespace, task, ...page }, principal }) {
        const asked = pageOf(page, listDefault)
        const filter = { search, namespace, task, visible: principal.queues }
        const newest = 'q.created_at DESC, q.id DESC'
        const rows = await queueRows(admin, filter, `ORDER BY ${newest} LIMIT $6 OFFSET $7`, `ORDER BY ${newest}`, [
          asked.limit + 1,
          asked.offset,
        ])
        const { items: queues, pagination } = offsetPage(rows.map(toSummary), asked, admin.pageBytesMax)
        return { queues, pagination }
      },
    }),
  ),
  route('GET', '/api/v1/resources/queues/:queue', readers, {
    summary: 'One queue and its partitions',
    query: ListEntriesQuery,
    answer: QueueDetails,
    missing: 'queue',
    /** Partitions are sorted by name. */
    async handle(admin, { params: { queue }, query }) {
      const asked = pageOf(query, listDefault)
      const [row] = await queueRows(admin, { queue })
      if (row === undefined) return null
      const [partitions, dead] = await Promise.all([partitionRows(admin, row.id, asked), countDead(admin, { queue })])
      const page = offsetPage(partitions.map(toPartition), asked, admin.pageBytesMax)
      return {
        ...toQueue(row),
        partitionCount: row.partitions,
        partitions: page.items,
        totals: toCounts(row, dead),
        pagination: page.pagination,
      }
    },
  }),
  route('GET', '/api/v1/resources/overview', readers, {
    summary: 'All queues together',
    answer: ResourceOverview,
    async handle(admin, { principal: { queues: visible } }) {
      const filter = { visible }
      const [row, dead, lag] = await Promise.all([
        totalOf(admin, filter),
        countDead(admin, filter),
        lagOf(admin, visible),
      ])
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
    },
  }),
]

/** `page`: order and limit of the queues; `end`: of the answer. Their values begin with $6. */
export function queueRows(
  { readLong, schema }: Admin,
  filter: QueueFilter,
  page = '',
  end = '',
  values: readonly unknown[] = [],
): Promise<QueueRow[]> {
  return readLong(
    `WITH page AS (SELECT q.* FROM ${schema}.mq_queues q WHERE ${queueFilterSql} ${page})
     SELECT q.id::text, q.name, q.namespace, q.task, q.created_at AS "createdAt", coalesce(x.partitions, 0) AS partitions, coalesce(x.total, 0) AS total, coalesce(x.pending, 0) AS pending,
       coalesce(x.processing, 0) AS processing, coalesce(x.completed, 0) AS completed, coalesce(x.consumed, 0) AS consumed, coalesce(x.ingested, 0) AS ingested
     FROM page q LEFT JOIN (
       SELECT p.queue, count(*) AS partitions, sum(p.total)::bigint AS total, sum(p.pending)::bigint AS pending, sum(p.processing)::bigint AS processing,
         sum(p.completed)::bigint AS completed, sum(p.consumed)::bigint AS consumed, sum(p.tail)::bigint AS ingested
       FROM (${partitionSql(schema, 'p.queue = ANY (ARRAY(SELECT page.id FROM page))')}) p GROUP BY p.queue
     ) x ON x.queue = q.id ${end}`,
    [...filterValues(filter), ...values],
  )
}

/** By name, with one more than the page if there are more. `queue`: its id. */
export function partitionRows(
  { readLong, schema }: Admin,
  queue: string,
  { limit, offset }: Asked,
): Promise<PartitionRow[]> {
  const at = (order: string): string =>
    `(SELECT m.created_at FROM ${schema}.mq_messages m WHERE m.partition = p.id ORDER BY m.seq ${order} LIMIT 1)`
  const page = `SELECT x.id FROM ${schema}.mq_partitions x WHERE x.queue = $1 ORDER BY x.name, x.id LIMIT $2 OFFSET $3`
  return readLong(
    `SELECT p.id, p.name, p.created_at AS "createdAt", p.pushed_at AS "lastActivity", p.total, p.pending, p.processing, p.completed, p.consumed,
       ${at('ASC')} AS "oldestMessage", ${at('DESC')} AS "newestMessage", d.letters, d.skipped
     FROM (${partitionSql(schema, `p.id = ANY (ARRAY(${page}))`)}) p CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE x.is_letter) AS letters, count(*) FILTER (WHERE NOT x.is_letter) AS skipped
       FROM (SELECT y.is_letter FROM ${schema}.mq_dead y WHERE y.partition = p.id LIMIT ${partitionDeadMax}) x
     ) d ORDER BY p.name, p.id`,
    [queue, limit + 1, offset],
  )
}

/** Dead letters and records of skipped messages, of existing and deleted queues. */
export async function countDead(
  { readLong, schema }: Admin,
  { queue, namespace, task, visible }: QueueFilter,
): Promise<DeadCounts & { partitions: number }> {
  const [dead] = await readLong<DeadCounts & { partitions: number }>(
    `SELECT count(*) FILTER (WHERE x.is_letter) AS letters, count(*) FILTER (WHERE NOT x.is_letter) AS skipped, count(DISTINCT x.partition) FILTER (WHERE x.is_letter) AS partitions
     FROM (SELECT d.is_letter, d.partition FROM ${schema}.mq_dead d WHERE ($1::text IS NULL OR d.queue = $1) AND ($2::text IS NULL OR d.namespace = $2)
       AND ($3::text IS NULL OR d.task = $3) AND ${visibleSql('d.queue', '$4')} LIMIT ${deadCountMax}) x`,
    [queue, namespace, task, visible],
  )
  return dead ?? { letters: 0, skipped: 0, partitions: 0 }
}

/** Totals over all queues. */
export async function totalOf({ readLong, schema }: Admin, filter: QueueFilter): Promise<Totals> {
  const [total] = await readLong<Totals>(
    `SELECT (SELECT count(*) FROM ${schema}.mq_queues q WHERE ${queueFilterSql}) AS queues,
       (SELECT count(DISTINCT nullif(q.namespace, '')) FROM ${schema}.mq_queues q WHERE ${queueFilterSql}) AS namespaces,
       (SELECT count(DISTINCT nullif(q.task, '')) FROM ${schema}.mq_queues q WHERE ${queueFilterSql}) AS tasks,
       count(*) AS partitions, coalesce(sum(p.total), 0)::bigint AS total, coalesce(sum(p.pending), 0)::bigint AS pending, coalesce(sum(p.processing), 0)::bigint AS processing,
       coalesce(sum(p.completed), 0)::bigint AS completed, coalesce(sum(p.consumed), 0)::bigint AS consumed, coalesce(sum(p.tail), 0)::bigint AS ingested
     FROM (${partitionSql(schema, `p.queue = ${queuesSql(schema, queueFilterSql)}`)}) p`,
    filterValues(filter),
  )
  if (total === undefined) throw new Error('the totals query returned no row')
  return total
}

/** Over all groups and their joined partitions in which messages wait. */
async function lagOf({ readLong, schema }: Admin, visible: QueueFilter['visible']): Promise<Overview['lag']> {
  const rounded = (value: string): string => `round(coalesce(${value}, 0)::numeric, 3)`
  const spread = (value: string): string =>
    `json_build_object('avg', ${rounded(`avg(${value})`)}, 'median', ${rounded(`percentile_cont(0.5) WITHIN GROUP (ORDER BY ${value})`)},
       'min', ${rounded(`min(${value})`)}, 'max', ${rounded(`max(${value})`)})`
  const waiting = `SELECT r.* FROM (${joinedSql(schema, `p.queue = ${queuesSql(schema, visibleSql('q.name', '$1'))}`)}) r WHERE r.depth > 0`
  const [lag] = await readLong<Overview['lag']>(
    `SELECT ${spread('x.seconds')} AS time, ${spread('x.depth')} AS "offset" FROM (
       SELECT r.depth, greatest(0, extract(epoch FROM ${schema}.clock() - o.oldest))::float8 AS seconds
       FROM (${rankedSql(waiting, '1')}) r ${oldestSql(schema, 'r', `r.rank <= ${looksMax}`)}
     ) x`,
    [visible],
  )
  if (lag === undefined) throw new Error('the lag query returned no row')
  return lag
}

export const toQueue = ({ id, name, namespace, task, createdAt }: QueueRow): Queue => {
  return { id, name, namespace, task, createdAt }
}

export const toSummary = (row: QueueRow): Summary => ({
  ...toQueue(row),
  partitions: row.partitions,
  messages: { total: row.total, pending: row.pending, processing: row.processing },
})

export const toCounts = (
  { total, pending, processing, completed }: LiveCounts,
  { letters, skipped }: DeadCounts,
): Counts => ({ total, pending, processing, completed, failed: skipped, deadLetter: letters })

export function toPartition(row: PartitionRow): Partition {
  const { id, name, createdAt, lastActivity, oldestMessage, newestMessage } = row
  const counts = toCounts(row, row)
  return { id, name, createdAt, lastActivity, stats: counts, messages: counts, oldestMessage, newestMessage }
}
