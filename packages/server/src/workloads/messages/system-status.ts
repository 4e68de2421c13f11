/** Status of the messages: depth, lag and throughput of all, and of one queue by partition and group. */
import type { GroupState, QueueStatus, SystemStatus as SystemStatusSchema } from '@spillway/protocol/schema'
import { cutRows, pageSql } from 'spillway/workload'
import type { Static } from 'typebox'
import type { AdministrationContext } from './administration.js'
import { type Asked, offsetPage } from './administration-setting.js'
import { joinedSql, looksMax, oldestSql, placedSql, progressSql, unjoinedSql } from './group-progress.js'
import type { PatientReads } from './patient-reads.js'
import {
  anyQueue,
  filterValues,
  type PartitionRow,
  type QueueFilter,
  type QueueOverview,
  queueFilterSql,
  toCounts,
  toPartition,
  toQueue,
  toSummary,
} from './queue-overview.js'
import { toConfigured } from './queues.js'
import type { Throughput } from './throughput.js'
import { visibleSql } from './visible-queues.js'

type StatusView = Static<typeof SystemStatusSchema>
type QueueView = Static<typeof QueueStatus>
type GroupView = Static<typeof GroupState>
type PartitionState = QueueView['partitions'][number]

interface GroupRow extends Record<string, unknown> {
  name: string
  depth: number
  processing: number
  consumed: number
  lagging: number
  looked: number
  lag_seconds: number | null
}

interface GroupPlace extends Record<string, unknown> {
  partition: string
  grp_name: string
  depth: number
  open: number
  moved_at: Date | null
  /** The partition's position in the page, from 1. */
  place: number
  cut: boolean
}

const queuesMax = 100
const groupsMax = 1_000
/** The JSON size of a group in a partition, without its name. */
const groupBytes = 100
const errorsMax = 10
/** How many of the newest dead letters are read for their errors. */
const errorsOf = 10_000

export class SystemStatus {
  readonly #context: AdministrationContext
  readonly #overview: QueueOverview
  readonly #reads: PatientReads
  readonly #throughput: Throughput

  constructor(context: AdministrationContext, reads: PatientReads, overview: QueueOverview, throughput: Throughput) {
    this.#context = context
    this.#reads = reads
    this.#overview = overview
    this.#throughput = throughput
  }

  async all(filter: QueueFilter): Promise<StatusView> {
    const overview = this.#overview
    const [total, queues, dead, leases, topErrors] = await Promise.all([
      overview.total(filter),
      overview.deepest(filter, queuesMax),
      overview.dead(filter),
      this.#leases(filter),
      this.#errors(filter),
    ])
    return {
      timestamp: new Date().toISOString(),
      throughput: this.#throughput.look(`status ${JSON.stringify(filter)}`, {
        ingested: total.ingested,
        processed: total.consumed,
      }),
      queues: queues.map((row) => ({ ...toSummary(row), totalConsumed: row.consumed })),
      messages: toCounts(total, dead),
      leases,
      deadLetterQueue: { totalMessages: dead.letters, affectedPartitions: dead.partitions, topErrors },
    }
  }

  /** Null: it does not exist. Its partitions are sorted by name. */
  async queue(name: string, asked: Asked, bytesMax: number): Promise<QueueView | null> {
    const { intake, schema } = this.#context
    const overview = this.#overview
    const filter = { ...anyQueue, queue: name }
    const row = await overview.row(name)
    if (row === null) return null
    const [config, partitions, dead, groups] = await Promise.all([
      intake.read<Record<string, unknown>>(`SELECT q.* FROM ${schema}.mq_queues q WHERE q.id = $1`, [row.id]),
      overview.partitions(row.id, asked.limit + 1, asked.offset),
      overview.dead(filter),
      this.#groups(row.id),
    ])
    const room = Math.max(0, bytesMax - Buffer.byteLength(JSON.stringify(groups)))
    const { states, isCut } = await this.#withGroups(partitions, room)
    const page = offsetPage(states, asked, room, isCut)
    const counts = toCounts(row, dead)
    const { options } = toConfigured(config.rows[0] ?? {})
    return {
      queue: { ...toQueue(row), priority: options.priority, config: { ...options, maxQueueSize: options.maxSize } },
      partitionCount: row.partitions,
      partitions: page.items,
      totals: { messages: counts, ...counts },
      consumerGroups: groups,
      throughput: this.#throughput.look(`queue ${name}`, { ingested: row.ingested, processed: row.consumed }),
      pagination: page.pagination,
    }
  }

  async #groups(queue: number): Promise<GroupView[]> {
    const { schema } = this.#context
    const { rows } = await this.#reads.query<GroupRow>(
      `WITH page AS MATERIALIZED (SELECT g.id, g.name, g.queue, g.reached FROM ${schema}.mq_groups g WHERE g.queue = $1 ORDER BY g.name LIMIT ${groupsMax})
       SELECT page.name, (coalesce(x.depth, 0) + u.depth)::bigint AS depth, coalesce(x.processing, 0) AS processing, coalesce(x.consumed, 0) AS consumed,
         coalesce(x.lagging, 0) + u.lagging AS lagging, coalesce(x.looked, 0) AS looked, x.lag_seconds
       FROM page JOIN (${unjoinedSql(schema, 'page')}) u ON u.id = page.id LEFT JOIN (
         SELECT r.grp, sum(r.depth) AS depth, sum(r.open)::bigint AS processing, sum(r.consumed)::bigint AS consumed,
           count(*) FILTER (WHERE r.depth > 0) AS lagging, count(o.oldest) AS looked, floor(extract(epoch FROM ${schema}.clock() - min(o.oldest)))::bigint AS lag_seconds
         FROM (${placedSql(joinedSql(schema, 'p.queue = $1'), '1')}) r ${oldestSql(schema, 'r', `r.depth > 0 AND r.place <= ${looksMax}`)} GROUP BY r.grp
       ) x ON x.grp = page.id ORDER BY page.name`,
      [queue],
    )
    return rows.map(({ name, depth, processing, consumed, lagging, looked, lag_seconds }) => ({
      name,
      depth,
      processing,
      consumed,
      partitionsWithLag: lagging,
      partitionsLookedAt: looked,
      maxTimeLag: Math.max(0, lag_seconds ?? 0),
    }))
  }

  /**
   * Partitions, each with all groups of the queue. With very many groups there are fewer partitions, and the first one,
   * which is always present, may lack groups.
   */
  async #withGroups(
    partitions: readonly PartitionRow[],
    bytesMax: number,
  ): Promise<{ states: PartitionState[]; isCut: boolean }> {
    const { schema } = this.#context
    const progress = progressSql(schema, 'p.id = ANY ($1::uuid[])')
    const found = await this.#reads.query<GroupPlace>(
      pageSql(
        `SELECT g.partition, g.grp_name, g.depth, g.open, g.moved_at, array_position($1::uuid[], g.partition) AS place, octet_length(g.grp_name) + ${groupBytes} AS bytes FROM (${progress}) g`,
        'r.place, r.grp_name',
        '$2',
      ),
      [partitions.map(({ id }) => id), bytesMax],
    )
    const { rows, isCut } = cutRows(found.rows, (row) => row)
    const groups = new Map<string, GroupPlace[]>()
    for (const row of rows) {
      const before = groups.get(row.partition)
      if (before === undefined) groups.set(row.partition, [row])
      else before.push(row)
    }
    // The last partition that was read may lack groups.
    const whole = isCut ? Math.max(1, (rows.at(-1)?.place ?? 1) - 1) : partitions.length
    const isPart = isCut && rows.at(-1)?.place === 1
    const states = partitions.slice(0, whole).map((partition) => ({
      ...toPartition(partition),
      cursor: { totalConsumed: partition.consumed },
      consumerGroups: (groups.get(partition.id) ?? []).map((row) => ({
        name: row.grp_name,
        depth: row.depth,
        processing: row.open,
        lastConsumedAt: row.moved_at?.toISOString() ?? null,
      })),
      ...(isPart && { truncated: true as const }),
    }))
    return { states, isCut: whole < partitions.length }
  }

  async #leases(filter: QueueFilter): Promise<StatusView['leases']> {
    const { schema } = this.#context
    const { rows } = await this.#reads.query<{ active: number; partitions: number; batch: number; open: number }>(
      `SELECT count(DISTINCT l.id) AS active, count(c.grp) AS partitions, coalesce(sum(cardinality(c.batch)), 0)::bigint AS batch, coalesce(sum(cardinality(c.open)), 0)::bigint AS open
       FROM ${schema}.mq_leases l JOIN ${schema}.mq_groups g ON g.id = l.grp JOIN ${schema}.mq_queues q ON q.id = g.queue
         LEFT JOIN LATERAL unnest(l.partitions) u(partition) ON true LEFT JOIN ${schema}.mq_cursors c ON c.partition = u.partition AND c.grp = l.grp AND c.lease = l.id
       WHERE l.until > ${schema}.clock() AND ${queueFilterSql}`,
      filterValues(filter),
    )
    const { active, partitions, batch, open } = rows[0] ?? { active: 0, partitions: 0, batch: 0, open: 0 }
    return { active, partitionsWithLeases: partitions, totalBatchSize: batch, totalAcked: batch - open }
  }

  async #errors({ queue, namespace, task, visible }: QueueFilter): Promise<StatusView['deadLetterQueue']['topErrors']> {
    const { schema } = this.#context
    const { rows } = await this.#reads.query<{ error: string | null; count: number }>(
      `SELECT x.error, count(*) AS count FROM (
         SELECT left(d.error, 200) AS error FROM ${schema}.mq_dead d WHERE d.is_letter AND ($1::text IS NULL OR d.queue = $1) AND ($2::text IS NULL OR d.namespace = $2)
           AND ($3::text IS NULL OR d.task = $3) AND ${visibleSql('d.queue', '$4')} ORDER BY d.moved_at DESC LIMIT ${errorsOf}
       ) x GROUP BY x.error ORDER BY count(*) DESC, x.error LIMIT ${errorsMax}`,
      [queue, namespace, task, visible],
    )
    return rows
  }
}
