/** Consumer groups: progress, position, and deletion. A group belongs to one queue; several queues may use the same name. */
import type { ConsumerGroup, ConsumerGroupDetails, LaggingPartition } from '@spillway/protocol/schema'
import { fitPage, type Pagination, paginationOf } from 'spillway/workload'
import type { Static } from 'typebox'
import type { AdministrationContext } from './administration.js'
import type { Asked } from './administration-setting.js'
import { joinedSql, looksMax, oldestSql, placedSql, progressSql, queuesSql, unjoinedSql } from './group-progress.js'
import type { PatientReads } from './patient-reads.js'
import { patientTransaction } from './patient-transaction.js'
import { type Visible, visibleSql } from './visible-queues.js'

type GroupView = Static<typeof ConsumerGroup>
type GroupDetails = Static<typeof ConsumerGroupDetails>
type LaggingView = Static<typeof LaggingPartition>

export type SeekTarget = { to: 'start' | 'end' } | { to: 'time'; at: Date }

interface GroupRow extends Record<string, unknown> {
  name: string
  queue_name: string
  mode: 'all' | 'new' | 'time'
  since: Date
  created_at: Date
  partitions: number
  lagging: number
  looked: number
  depth: number
  lag_seconds: number
}

interface PartitionRow extends Record<string, unknown> {
  grp_name: string
  queue_name: string
  partition: string
  partition_name: string
  depth: number
  consumed: number
  moved_at: Date | null
  lease: string | null
  until: Date | null
  oldest: Date | null
  lag_seconds: number
}

/** How many queue names are shown for a group. */
const queuesShown = 1_000
/** A group whose oldest message waits longer is reported as lagging. */
const laggingSeconds = 300
/** Per transaction. A seek visits every partition of the queue. */
const seekPartitions = 200
const seekMs = 60_000
const endMs = 60_000

export class ConsumerGroups {
  readonly #context: AdministrationContext
  readonly #reads: PatientReads

  constructor(context: AdministrationContext, reads: PatientReads) {
    this.#context = context
    this.#reads = reads
  }

  /** By queue and name. */
  async list(visible: Visible, limit: number, offset: number): Promise<GroupView[]> {
    const { schema } = this.#context
    const placed = placedSql(joinedSql(schema, 'g.id = ANY (ARRAY(SELECT page.id FROM page))'), 'r.grp')
    // Each group gets its share of the log reads.
    const share = `r.place <= ${looksMax} / (SELECT count(*) FROM page)`
    const { rows } = await this.#reads.query<GroupRow>(
      `WITH page AS MATERIALIZED (
         SELECT g.id, g.name, g.queue, g.mode, g.since, g.reached, g.created_at, q.name AS queue_name FROM ${schema}.mq_groups g JOIN ${schema}.mq_queues q ON q.id = g.queue
         WHERE ${visibleSql('q.name', '$1')} ORDER BY q.name, g.name LIMIT $2 OFFSET $3
       )
       SELECT page.name, page.queue_name, page.mode, page.since, page.created_at, u.partitions, coalesce(x.lagging, 0) + u.lagging AS lagging,
         coalesce(x.looked, 0) AS looked, (coalesce(x.depth, 0) + u.depth)::bigint AS depth, coalesce(x.lag_seconds, 0) AS lag_seconds
       FROM page JOIN (${unjoinedSql(schema, 'page')}) u ON u.id = page.id LEFT JOIN (
         SELECT r.grp, count(*) FILTER (WHERE r.depth > 0) AS lagging, count(o.oldest) AS looked, sum(r.depth)::bigint AS depth,
           floor(extract(epoch FROM ${schema}.clock() - min(o.oldest)))::bigint AS lag_seconds
         FROM (${placed}) r ${oldestSql(schema, 'r', `r.depth > 0 AND ${share}`)} GROUP BY r.grp
       ) x ON x.grp = page.id ORDER BY page.queue_name, page.name`,
      [visible, limit, offset],
    )
    return rows.map((row) => ({
      name: row.name,
      topics: [row.queue_name],
      queueName: row.queue_name,
      members: row.partitions,
      partitionsWithLag: row.lagging,
      partitionsLookedAt: row.looked,
      totalLag: row.depth,
      maxTimeLag: Math.max(0, row.lag_seconds),
      state: row.lag_seconds > laggingSeconds ? 'Lagging' : 'Stable',
      subscriptionMode: row.mode === 'time' ? 'timestamp' : row.mode,
      subscriptionTimestamp: row.mode === 'all' ? null : row.since.toISOString(),
      subscriptionCreatedAt: row.created_at.toISOString(),
    }))
  }

  /** Its position, deepest partitions first; null: no group has that name. */
  async get(
    group: string,
    visible: Visible,
    { limit, offset }: Asked,
    bytesMax: number,
  ): Promise<{ details: GroupDetails; pagination: Pagination } | null> {
    const { schema } = this.#context
    const queues = await this.queuesOf(group, visible, queuesShown)
    if (queues.length === 0) return null
    const { rows } = await this.#reads.query<PartitionRow>(
      `SELECT x.*, q.name AS queue_name, o.oldest, coalesce(floor(extract(epoch FROM ${schema}.clock() - o.oldest)), 0)::bigint AS lag_seconds FROM (
         SELECT r.* FROM (${progressSql(schema, `g.name = $1 AND p.queue = ${queuesSql(schema, visibleSql('q.name', '$2'))}`)}) r
         ORDER BY r.depth DESC, r.partition_name, r.partition LIMIT $3 OFFSET $4
       ) x JOIN ${schema}.mq_queues q ON q.id = x.queue ${oldestSql(schema, 'x')} ORDER BY x.depth DESC, x.partition_name, x.partition`,
      [group, visible, limit + 1, offset],
    )
    // Queues are named even without partitions; half of the page is for those with partitions.
    const named = fitPage(queues, { limit: queuesShown, bytesMax: bytesMax / 2 }, (queue) => queue).items
    const page = fitPage(rows, { limit, bytesMax: bytesMax / 2 }, (row) => ({
      queue: row.queue_name,
      partition: {
        partition: row.partition_name,
        partitionId: row.partition,
        workerId: row.lease,
        lastConsumedAt: row.moved_at?.toISOString() ?? null,
        totalConsumed: row.consumed,
        offsetLag: row.depth,
        timeLagSeconds: Math.max(0, row.lag_seconds),
        leaseActive: row.lease !== null,
        leaseExpiresAt: row.until?.toISOString() ?? null,
      },
    }))
    // Without a prototype: a queue may have any name.
    const details: GroupDetails = Object.assign(
      Object.create(null),
      Object.fromEntries(named.map((queue) => [queue, { partitions: [] }])),
    )
    for (const { queue, partition } of page.items) {
      details[queue] ??= { partitions: [] }
      details[queue].partitions.push(partition)
    }
    return { details, pagination: paginationOf(limit, offset, page) }
  }

  /** Partitions in which a message has waited this long, longest first; among the deepest if very many are behind. */
  async lagging(minLagSeconds: number, visible: Visible, limit: number): Promise<LaggingView[]> {
    const { schema } = this.#context
    const behind = `SELECT r.* FROM (${joinedSql(schema, `p.queue = ${queuesSql(schema, visibleSql('q.name', '$2'))}`)}) r WHERE r.depth > 0`
    const { rows } = await this.#reads.query<PartitionRow>(
      `SELECT r.*, q.name AS queue_name, o.oldest, floor(extract(epoch FROM ${schema}.clock() - o.oldest))::bigint AS lag_seconds
       FROM (SELECT b.* FROM (${behind}) b ORDER BY b.depth DESC LIMIT ${looksMax}) r JOIN ${schema}.mq_queues q ON q.id = r.queue ${oldestSql(schema, 'r')}
       WHERE o.oldest <= ${schema}.clock() - make_interval(secs => $1) ORDER BY o.oldest, r.partition LIMIT $3`,
      [minLagSeconds, visible, limit],
    )
    return rows.map((row) => {
      const seconds = Math.max(0, row.lag_seconds)
      return {
        consumer_group: row.grp_name,
        queue_name: row.queue_name,
        partition_name: row.partition_name,
        partition_id: row.partition,
        worker_id: row.lease,
        offset_lag: row.depth,
        time_lag_seconds: seconds,
        lag_hours: Math.round(seconds / 36) / 100,
        oldest_unconsumed_at: (row.oldest ?? new Date(0)).toISOString(),
        last_consumed_at: row.moved_at?.toISOString() ?? null,
      }
    })
  }

  /** The queues that have a group of this name. */
  async queuesOf(group: string, visible: Visible, limit: number | null = null): Promise<string[]> {
    const { intake, schema } = this.#context
    const { rows } = await intake.read<{ name: string }>(
      `SELECT q.name FROM ${schema}.mq_groups g JOIN ${schema}.mq_queues q ON q.id = g.queue
       WHERE g.name = $1 AND ${visibleSql('q.name', '$2')} ORDER BY q.name LIMIT $3`,
      [group, visible, limit],
    )
    return rows.map(({ name }) => name)
  }

  /** Ends the group in these queues. Unless it is forgotten, it starts again where it first started. */
  end(group: string, queues: readonly string[], forget: boolean): Promise<number> {
    const { intake, schema } = this.#context
    return patientTransaction(intake, endMs, async (tx) => {
      const { rows } = await tx.query<{ n: number }>(
        `SELECT coalesce(sum(e.partitions), 0)::bigint AS n FROM unnest($2::text[]) u(queue), LATERAL ${schema}.mq_unsubscribe($1, u.queue, $3) e`,
        [group, queues, forget],
      )
      return rows[0]?.n ?? 0
    })
  }

  /** Sets where the group starts after a restart; its current position stays. Returns the number of queues. */
  async subscribeFrom(group: string, queues: readonly string[], at: Date): Promise<number> {
    const { intake, schema } = this.#context
    const { rowCount } = await intake.statements.release(
      `UPDATE ${schema}.mq_groups g SET mode = 'time', since = $3 FROM ${schema}.mq_queues q
       WHERE q.id = g.queue AND g.name = $1 AND q.name = ANY ($2)`,
      [group, queues, at],
    )
    return rowCount ?? 0
  }

  /** Returns the number of partitions. Leases are lost. In steps, because pushes wait while their partition is moved. */
  async seek(group: string, queue: string, target: SeekTarget): Promise<number> {
    const { intake, schema } = this.#context
    const at = target.to === 'time' ? target.at : null
    let moved = 0
    let after: string | null = null
    for (;;) {
      const step: { moved: number | null; last: string | null } | undefined = await patientTransaction(
        intake,
        seekMs,
        async (tx) => {
          const { rows } = await tx.query<{ moved: number | null; last: string | null }>(
            `SELECT moved, last FROM ${schema}.mq_seek($1, $2, $3, $4, $5, $6)`,
            [queue, group, target.to, at, after, seekPartitions],
          )
          return rows[0]
        },
      )
      moved += step?.moved ?? 0
      if (step === undefined || step.last === null) return moved
      after = step.last
    }
  }
}
