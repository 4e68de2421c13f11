/** Queues and their contents. */
import type {
  MessageCounts,
  NamespaceList,
  QueueDetails,
  QueueSummary,
  ResourceOverview,
} from '@spillway/protocol/schema'
import type { Static } from 'typebox'
import type { AdministrationContext } from './administration.js'
import { type Asked, offsetPage } from './administration-setting.js'
import { joinedSql, looksMax, oldestSql, partitionSql, placedSql, queuesSql } from './group-progress.js'
import type { PatientReads } from './patient-reads.js'
import type { Throughput } from './throughput.js'
import { type Visible, visibleSql } from './visible-queues.js'

export interface QueueFilter {
  queue: string | null
  /** A part of its name. */
  search: string | null
  namespace: string | null
  task: string | null
  visible: Visible
}

export type Counts = Static<typeof MessageCounts>
type Summary = Static<typeof QueueSummary>
type Details = Static<typeof QueueDetails>
type ResourceView = Static<typeof ResourceOverview>
type Share = Omit<Static<typeof NamespaceList>['namespaces'][number], 'namespace'>

export interface QueueRow extends Record<string, unknown> {
  id: number
  name: string
  namespace: string | null
  task: string | null
  created_at: Date
  partitions: number
  total: number
  pending: number
  processing: number
  completed: number
  consumed: number
  ingested: number
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

interface SpreadRow extends Record<string, unknown> {
  avg_seconds: number
  median_seconds: number
  min_seconds: number
  max_seconds: number
  avg_depth: number
  median_depth: number
  min_depth: number
  max_depth: number
}

/** Dead letters are counted up to here. */
export const deadCountMax = 100_000
const partitionDeadMax = 10_000

/** $1 queue, $2 search, $3 namespace, $4 task, $5 visible. */
export const queueFilterSql = `($1::text IS NULL OR q.name = $1) AND ($2::text IS NULL OR position($2 IN q.name) > 0) AND ($3::text IS NULL OR q.namespace = $3)
  AND ($4::text IS NULL OR q.task = $4) AND ${visibleSql('q.name', '$5')}`

export function filterValues({ queue, search, namespace, task, visible }: QueueFilter): unknown[] {
  return [queue, search, namespace, task, visible]
}

export class QueueOverview {
  readonly #context: AdministrationContext
  readonly #reads: PatientReads
  readonly #throughput: Throughput

  constructor(context: AdministrationContext, reads: PatientReads, throughput: Throughput) {
    this.#context = context
    this.#reads = reads
    this.#throughput = throughput
  }

  /** Newest first. */
  async list(filter: QueueFilter, limit: number, offset: number): Promise<Summary[]> {
    const newest = 'q.created_at DESC, q.id DESC'
    const rows = await this.#rows(filter, `ORDER BY ${newest} LIMIT $6 OFFSET $7`, `ORDER BY ${newest}`, [
      limit,
      offset,
    ])
    return rows.map(toSummary)
  }

  /** The deepest first. */
  deepest(filter: QueueFilter, limit: number): Promise<QueueRow[]> {
    return this.#rows(filter, '', 'ORDER BY pending DESC, q.name LIMIT $6', [limit])
  }

  async row(queue: string): Promise<QueueRow | null> {
    const [row] = await this.#rows({ ...anyQueue, queue }, '', '', [])
    return row ?? null
  }

  async #rows(filter: QueueFilter, page: string, end: string, values: readonly unknown[]): Promise<QueueRow[]> {
    const { schema } = this.#context
    const { rows } = await this.#reads.query<QueueRow>(
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

  /** Null: it does not exist. Its partitions are sorted by name. */
  async get(queue: string, asked: Asked, bytesMax: number): Promise<Details | null> {
    const row = await this.row(queue)
    if (row === null) return null
    const [partitions, dead] = await Promise.all([
      this.partitions(row.id, asked.limit + 1, asked.offset),
      this.dead({ ...anyQueue, queue }),
    ])
    const page = offsetPage(partitions.map(toPartition), asked, bytesMax)
    return {
      ...toQueue(row),
      partitionCount: row.partitions,
      partitions: page.items,
      totals: toCounts(row, dead),
      pagination: page.pagination,
    }
  }

  async partitions(queue: number, limit: number, offset: number): Promise<PartitionRow[]> {
    const { schema } = this.#context
    const at = (order: string): string =>
      `(SELECT m.created_at FROM ${schema}.mq_messages m WHERE m.partition = p.id ORDER BY m.seq ${order} LIMIT 1)`
    const page = `SELECT x.id FROM ${schema}.mq_partitions x WHERE x.queue = $1 ORDER BY x.name, x.id LIMIT $2 OFFSET $3`
    const { rows } = await this.#reads.query<PartitionRow>(
      `SELECT p.id, p.name, p.created_at, p.pushed_at, p.total, p.pending, p.processing, p.completed, p.consumed, ${at('ASC')} AS oldest, ${at('DESC')} AS newest, d.letters, d.skipped
       FROM (${partitionSql(schema, `p.id = ANY (ARRAY(${page}))`)}) p CROSS JOIN LATERAL (
         SELECT count(*) FILTER (WHERE x.is_letter) AS letters, count(*) FILTER (WHERE NOT x.is_letter) AS skipped
         FROM (SELECT y.is_letter FROM ${schema}.mq_dead y WHERE y.partition = p.id LIMIT ${partitionDeadMax}) x
       ) d ORDER BY p.name, p.id`,
      [queue, limit, offset],
    )
    return rows
  }

  /** Dead letters and records of skipped messages, of existing and deleted queues. */
  async dead(filter: QueueFilter): Promise<{ letters: number; skipped: number; partitions: number }> {
    const { schema } = this.#context
    const { queue, namespace, task, visible } = filter
    const { rows } = await this.#reads.query<{ letters: number; skipped: number; partitions: number }>(
      `SELECT count(*) FILTER (WHERE x.is_letter) AS letters, count(*) FILTER (WHERE NOT x.is_letter) AS skipped, count(DISTINCT x.partition) FILTER (WHERE x.is_letter) AS partitions
       FROM (SELECT d.is_letter, d.partition FROM ${schema}.mq_dead d WHERE ($1::text IS NULL OR d.queue = $1) AND ($2::text IS NULL OR d.namespace = $2)
         AND ($3::text IS NULL OR d.task = $3) AND ${visibleSql('d.queue', '$4')} LIMIT ${deadCountMax}) x`,
      [queue, namespace, task, visible],
    )
    return rows[0] ?? { letters: 0, skipped: 0, partitions: 0 }
  }

  /** Totals over all queues. */
  async total(filter: QueueFilter): Promise<QueueRow & { queues: number; namespaces: number; tasks: number }> {
    const { schema } = this.#context
    const { rows } = await this.#reads.query<QueueRow & { queues: number; namespaces: number; tasks: number }>(
      `SELECT (SELECT count(*) FROM ${schema}.mq_queues q WHERE ${queueFilterSql}) AS queues,
         (SELECT count(DISTINCT nullif(q.namespace, '')) FROM ${schema}.mq_queues q WHERE ${queueFilterSql}) AS namespaces,
         (SELECT count(DISTINCT nullif(q.task, '')) FROM ${schema}.mq_queues q WHERE ${queueFilterSql}) AS tasks,
         count(*) AS partitions, coalesce(sum(p.total), 0)::bigint AS total, coalesce(sum(p.pending), 0)::bigint AS pending, coalesce(sum(p.processing), 0)::bigint AS processing,
         coalesce(sum(p.completed), 0)::bigint AS completed, coalesce(sum(p.consumed), 0)::bigint AS consumed, coalesce(sum(p.tail), 0)::bigint AS ingested
       FROM (${partitionSql(schema, `p.queue = ${queuesSql(schema, queueFilterSql)}`)}) p`,
      filterValues(filter),
    )
    const [row] = rows
    if (row === undefined) throw new Error('a count without a row')
    return row
  }

  async resources(visible: Visible): Promise<ResourceView> {
    const filter = { ...anyQueue, visible }
    const [row, dead, lag] = await Promise.all([this.total(filter), this.dead(filter), this.#lag(visible)])
    const [rates] = this.#throughput.look(`overview ${visible?.join('\0') ?? ''}`, {
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

  /** Over all groups and their joined partitions in which messages wait. */
  async #lag(visible: Visible): Promise<ResourceView['lag']> {
    const { schema } = this.#context
    const four = (value: string, name: string): string =>
      `coalesce(avg(${value}), 0)::float8 AS avg_${name}, coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY ${value}), 0)::float8 AS median_${name},
       coalesce(min(${value}), 0)::float8 AS min_${name}, coalesce(max(${value}), 0)::float8 AS max_${name}`
    const waiting = `SELECT r.* FROM (${joinedSql(schema, `p.queue = ${queuesSql(schema, visibleSql('q.name', '$1'))}`)}) r WHERE r.depth > 0`
    const { rows } = await this.#reads.query<SpreadRow>(
      `SELECT ${four('x.seconds', 'seconds')}, ${four('x.depth', 'depth')} FROM (
         SELECT r.depth, greatest(0, extract(epoch FROM ${schema}.clock() - o.oldest))::float8 AS seconds
         FROM (${placedSql(waiting, '1')}) r ${oldestSql(schema, 'r', `r.place <= ${looksMax}`)}
       ) x`,
      [visible],
    )
    const [row] = rows
    if (row === undefined) throw new Error('a spread without a row')
    const round = (value: number): number => Math.round(value * 1_000) / 1_000
    return {
      time: {
        avg: round(row.avg_seconds),
        median: round(row.median_seconds),
        min: round(row.min_seconds),
        max: round(row.max_seconds),
      },
      offset: { avg: round(row.avg_depth), median: row.median_depth, min: row.min_depth, max: row.max_depth },
    }
  }

  /** By namespace or task; without one, a queue is left out. */
  async by(
    column: 'namespace' | 'task',
    visible: Visible,
    limit: number,
    offset: number,
  ): Promise<(Share & { name: string })[]> {
    const { schema } = this.#context
    const { rows } = await this.#reads.query<QueueRow & { queues: number }>(
      `SELECT q.${column} AS name, count(DISTINCT q.id) AS queues, count(p.id) AS partitions, coalesce(sum(p.total), 0)::bigint AS total,
         coalesce(sum(p.pending), 0)::bigint AS pending, coalesce(sum(p.processing), 0)::bigint AS processing
       FROM ${schema}.mq_queues q LEFT JOIN (${partitionSql(schema, `p.queue = ${queuesSql(schema, `q.${column} <> ''`)}`)}) p ON p.queue = q.id
       WHERE q.${column} <> '' AND ${visibleSql('q.name', '$1')} GROUP BY q.${column} ORDER BY q.${column} LIMIT $2 OFFSET $3`,
      [visible, limit, offset],
    )
    return rows.map(({ name, queues, partitions, total, pending, processing }) => ({
      name,
      queues,
      partitions,
      messages: { total, pending, processing },
    }))
  }
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
  { total, pending, processing, completed }: Pick<QueueRow, 'total' | 'pending' | 'processing' | 'completed'>,
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
