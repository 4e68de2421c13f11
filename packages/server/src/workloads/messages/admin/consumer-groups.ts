/** Consumer groups: progress, position, and deletion. A group belongs to one queue; several queues may use the same name. */
import {
  type ConsumerGroup,
  ConsumerGroupDetails,
  ConsumerGroupList,
  EndGroupQuery,
  ListEntriesQuery,
  MoveSubscription,
  SeekGroup,
} from '@spillway/protocol/schema'
import { fitPage, paginationOf } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import { instant, invalid } from '../timestamps.js'
import { joinedSql, looksMax, oldestSql, progressSql, queuesSql, rankedSql, unjoinedSql } from './group-progress-sql.js'
import { linkNext, offsetPage, pageOf } from './pages.js'
import { type Admin, operators, route, viewers } from './route.js'
import { visibleSql } from './visible-queues.js'

type GroupDetails = Static<typeof ConsumerGroupDetails>
type Partition = GroupDetails[string]['partitions'][number]

const groupsUrl = '/api/v1/consumer-groups'
const groupsDefault = 200
const partitionsDefault = 1_000
/** How many queue names are shown for a group. */
const queuesShown = 1_000
/** A group whose oldest message waits longer is reported as lagging. */
const laggingSeconds = 300
/** Per transaction. A seek visits every partition of the queue. */
const seekPartitions = 200
const seekMs = 60_000
const endMs = 60_000

const Ended = Type.Object({
  success: Type.Boolean(),
  consumerGroup: Type.String(),
  queueName: Type.Optional(Type.String()),
  deletedPartitions: Type.Integer(),
  metadataDeleted: Type.Boolean(),
})

const readRoutes = [
  route('GET', groupsUrl, viewers, {
    summary: 'Consumer groups, one for each of their queues',
    query: ListEntriesQuery,
    answer: ConsumerGroupList,
    /** By queue and name. */
    async handle({ readLong, schema, pageBytesMax }, request, reply) {
      const asked = pageOf(request.query, groupsDefault)
      const ranked = rankedSql(joinedSql(schema, 'g.id = ANY (ARRAY(SELECT page.id FROM page))'), 'r.grp')
      // Each group gets its share of the log reads.
      const share = `r.rank <= ${looksMax} / (SELECT count(*) FROM page)`
      const groups = await readLong<Static<typeof ConsumerGroup>>(
        `WITH page AS MATERIALIZED (
           SELECT g.id, g.name, g.queue, g.mode, g.since, g.reached, g.created_at, q.name AS queue_name FROM ${schema}.mq_groups g JOIN ${schema}.mq_queues q ON q.id = g.queue
           WHERE ${visibleSql('q.name', '$1')} ORDER BY q.name, g.name LIMIT $2 OFFSET $3
         )
         SELECT page.name, ARRAY[page.queue_name] AS topics, page.queue_name AS "queueName", u.partitions AS members, coalesce(x.lagging, 0) + u.lagging AS "partitionsWithLag",
           coalesce(x.looked, 0) AS "partitionsLookedAt", (coalesce(x.depth, 0) + u.depth)::bigint AS "totalLag", greatest(0, x.lag_seconds) AS "maxTimeLag",
           CASE WHEN x.lag_seconds > ${laggingSeconds} THEN 'Lagging' ELSE 'Stable' END AS state, CASE page.mode WHEN 'time' THEN 'timestamp' ELSE page.mode END AS "subscriptionMode",
           CASE WHEN page.mode <> 'all' THEN page.since END AS "subscriptionTimestamp", page.created_at AS "subscriptionCreatedAt"
         FROM page JOIN (${unjoinedSql(schema, 'page')}) u ON u.id = page.id LEFT JOIN (
           SELECT r.grp, count(*) FILTER (WHERE r.depth > 0) AS lagging, count(o.oldest) AS looked, sum(r.depth)::bigint AS depth,
             floor(extract(epoch FROM ${schema}.clock() - min(o.oldest)))::bigint AS lag_seconds
           FROM (${ranked}) r ${oldestSql(schema, 'r', `r.depth > 0 AND ${share}`)} GROUP BY r.grp
         ) x ON x.grp = page.id ORDER BY page.queue_name, page.name`,
        [request.principal.queues, asked.limit + 1, asked.offset],
      )
      const { items, pagination } = offsetPage(groups, asked, pageBytesMax)
      linkNext(reply, groupsUrl, pagination)
      return items
    },
  }),
  route('GET', `${groupsUrl}/:group`, viewers, {
    summary: 'The position of a group, by queue and partition',
    query: ListEntriesQuery,
    answer: ConsumerGroupDetails,
    missing: 'group',
    /** Deepest partitions first. */
    async handle(admin, { params: { group }, query, principal }, reply) {
      const { readLong, schema, pageBytesMax } = admin
      const { limit, offset } = pageOf(query, partitionsDefault)
      const queues = await queuesOf(admin, group, principal.queues, queuesShown)
      if (queues.length === 0) return null
      const rows = await readLong<Partition & { queue_name: string }>(
        `SELECT q.name AS queue_name, x.partition_name AS partition, x.partition AS "partitionId", x.lease AS "workerId", x.moved_at AS "lastConsumedAt",
           x.consumed AS "totalConsumed", x.depth AS "offsetLag", coalesce(greatest(0, floor(extract(epoch FROM ${schema}.clock() - o.oldest))), 0)::bigint AS "timeLagSeconds",
           x.lease IS NOT NULL AS "leaseActive", x.until AS "leaseExpiresAt"
         FROM (
           SELECT r.* FROM (${progressSql(schema, `g.name = $1 AND p.queue = ${queuesSql(schema, visibleSql('q.name', '$2'))}`)}) r
           ORDER BY r.depth DESC, r.partition_name, r.partition LIMIT $3 OFFSET $4
         ) x JOIN ${schema}.mq_queues q ON q.id = x.queue ${oldestSql(schema, 'x')} ORDER BY x.depth DESC, x.partition_name, x.partition`,
        [group, principal.queues, limit + 1, offset],
      )
      // Queues are named even without partitions; half of the page is for those with partitions.
      const named = fitPage(queues, { limit: queuesShown, bytesMax: pageBytesMax / 2 }, (queue) => queue).items
      const page = fitPage(rows, { limit, bytesMax: pageBytesMax / 2 }, ({ queue_name: queue, ...partition }) => ({
        queue,
        partition,
      }))
      // Without a prototype: a queue may have any name.
      const details: GroupDetails = Object.create(null)
      for (const queue of named) details[queue] = { partitions: [] }
      for (const { queue, partition } of page.items) {
        details[queue] ??= { partitions: [] }
        details[queue].partitions.push(partition)
      }
      linkNext(reply, `${groupsUrl}/${encodeURIComponent(group)}`, paginationOf(limit, offset, page))
      return details
    },
  }),
]

const changeRoutes = [
  route('DELETE', `${groupsUrl}/:group`, operators, {
    summary: 'End a group in all queues; with deleteMetadata=false it starts again where it first started',
    query: EndGroupQuery,
    answer: Ended,
    async handle(admin, { params: { group }, query, principal }) {
      return end(admin, group, await queuesOf(admin, group, principal.queues), query.deleteMetadata)
    },
  }),
  route('DELETE', `${groupsUrl}/:group/queues/:queue`, operators, {
    summary: 'End a group in one queue',
    query: EndGroupQuery,
    answer: Ended,
    missing: 'queue',
    async handle(admin, { params: { group, queue }, query }) {
      const queues = (await queuesOf(admin, group)).filter((name) => name === queue)
      return { ...(await end(admin, group, queues, query.deleteMetadata)), queueName: queue }
    },
  }),
  route('POST', `${groupsUrl}/:group/subscription`, operators, {
    summary: 'Where a group starts when it is started again',
    body: MoveSubscription,
    answer: Type.Object({
      success: Type.Boolean(),
      consumerGroup: Type.String(),
      newTimestamp: Type.String(),
      rowsUpdated: Type.Integer(),
    }),
    missing: 'group',
    /** Its current position stays. */
    async handle(admin, { params: { group }, body, principal }) {
      const { intake, schema } = admin
      const at = instant('subscriptionTimestamp', body.subscriptionTimestamp)
      const queues = await queuesOf(admin, group, principal.queues)
      if (queues.length === 0) return null
      const { rowCount } = await intake.statements.release(
        `UPDATE ${schema}.mq_groups g SET mode = 'time', since = $3 FROM ${schema}.mq_queues q
         WHERE q.id = g.queue AND g.name = $1 AND q.name = ANY ($2)`,
        [group, queues, at],
      )
      return { success: true, consumerGroup: group, newTimestamp: at.toISOString(), rowsUpdated: rowCount ?? 0 }
    },
  }),
  route('POST', `${groupsUrl}/:group/queues/:queue/seek`, operators, {
    summary: 'Move a group to another position in a queue; it loses its leases',
    body: SeekGroup,
    answer: Type.Object({
      success: Type.Boolean(),
      consumerGroup: Type.String(),
      queueName: Type.String(),
      seekToEnd: Type.Boolean(),
      targetTimestamp: Type.Union([Type.String(), Type.Null()]),
      partitionsUpdated: Type.Integer(),
    }),
    missing: 'group',
    async handle(admin, { params: { group, queue }, body, principal }) {
      const target = targetOf(body)
      if (!(await queuesOf(admin, group, principal.queues)).includes(queue)) return null
      const partitionsUpdated = await seek(admin, group, queue, target)
      admin.consume.wake(queue)
      return {
        success: true,
        consumerGroup: group,
        queueName: queue,
        seekToEnd: target.to === 'end',
        targetTimestamp: target.at?.toISOString() ?? null,
        partitionsUpdated,
      }
    },
  }),
]

export const groupRoutes = [...readRoutes, ...changeRoutes]

/** Ends the group in these queues. Unless it is forgotten, it starts again where it first started. */
async function end(admin: Admin, group: string, queues: readonly string[], forget = true) {
  const { transaction, schema, consume } = admin
  const [ended] = await transaction(endMs, (query) =>
    query<{ n: number }>(
      `SELECT coalesce(sum(e.partitions), 0)::bigint AS n FROM unnest($2::text[]) u(queue), LATERAL ${schema}.mq_unsubscribe($1, u.queue, $3) e`,
      [group, queues, forget],
    ),
  )
  // The next pop of this group starts over.
  for (const queue of queues) consume.wake(queue)
  return { success: true, consumerGroup: group, deletedPartitions: ended?.n ?? 0, metadataDeleted: forget }
}

interface SeekTarget {
  to: 'start' | 'end' | 'time'
  at: Date | null
}

function targetOf({ timestamp, toEnd, toBeginning }: Static<typeof SeekGroup>): SeekTarget {
  const targets: SeekTarget[] = []
  if (toEnd === true) targets.push({ to: 'end', at: null })
  if (toBeginning === true) targets.push({ to: 'start', at: null })
  if (timestamp !== undefined && timestamp !== null) targets.push({ to: 'time', at: instant('timestamp', timestamp) })
  const [target] = targets
  if (target === undefined || targets.length > 1) throw invalid('', 'say one of toEnd, toBeginning and timestamp')
  return target
}

/** Returns the number of partitions. In steps, because pushes wait while their partition is moved. */
async function seek(
  { transaction, schema }: Admin,
  group: string,
  queue: string,
  { to, at }: SeekTarget,
): Promise<number> {
  let moved = 0
  let after: string | null = null
  do {
    const [step]: { moved: number | null; last: string | null }[] = await transaction(seekMs, (query) =>
      query(`SELECT moved, last FROM ${schema}.mq_seek($1, $2, $3, $4, $5, $6)`, [
        queue,
        group,
        to,
        at,
        after,
        seekPartitions,
      ]),
    )
    moved += step?.moved ?? 0
    after = step?.last ?? null
  } while (after !== null)
  return moved
}

/** The queues that have a group of this name, among those that the patterns `visible` allow. */
async function queuesOf(
  { read, schema }: Admin,
  group: string,
  visible?: readonly string[],
  limit?: number,
): Promise<string[]> {
  const queues = await read<{ name: string }>(
    `SELECT q.name FROM ${schema}.mq_groups g JOIN ${schema}.mq_queues q ON q.id = g.queue
     WHERE g.name = $1 AND ${visibleSql('q.name', '$2')} ORDER BY q.name LIMIT $3`,
    [group, visible, limit],
  )
  return queues.map(({ name }) => name)
}
