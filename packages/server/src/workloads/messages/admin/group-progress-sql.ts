/** Progress of groups, in SQL: from the partitions' tails and the groups' cursors, never by counting messages. */

/** Queue numbers, as an array: the planner would otherwise mix the query with the joins and misjudge their size. */
export const queuesSql = (schema: string, where: string): string =>
  `ANY (ARRAY(SELECT q.id FROM ${schema}.mq_queues q WHERE ${where}))`

/**
 * One row per group and partition of its queue; `where` refers to g and p. `depth`: messages still to settle. Messages
 * replayed for another group count until the group is past them.
 */
export function progressSql(schema: string, where: string): string {
  return `SELECT g.id AS grp, g.name AS grp_name, p.queue, p.id AS partition, p.name AS partition_name, ${depthSql(schema)} AS depth,
      CASE WHEN l.id IS NULL THEN 0 ELSE cardinality(c.open) END AS open, coalesce(c.consumed, 0) AS consumed, c.moved_at, l.id AS lease, l.until,
      greatest(p.low, ${headSql(schema)}) AS head, coalesce(c.done, '{}') AS done
    FROM ${schema}.mq_partitions p JOIN ${schema}.mq_groups g ON g.queue = p.queue
      LEFT JOIN ${schema}.mq_cursors c ON c.partition = p.id AND c.grp = g.id
      LEFT JOIN ${schema}.mq_ready w ON w.partition = p.id AND w.grp = g.id AND c.head IS NULL
      LEFT JOIN ${schema}.mq_leases l ON l.id = c.lease AND l.until > ${schema}.clock()
    WHERE ${where}`
}

/** For a partition p, a group g, its cursor c and its row w in mq_ready, which may be null. */
export const headSql = (schema: string): string => `${schema}.mq_head(c.head, w.head, g.reached, p.id, p.low, p.tail)`

/** For the same. */
const depthSql = (schema: string): string =>
  depthOf(schema, `greatest(p.low, ${headSql(schema)})`, `coalesce(c.done, '{}')`)

/** Calling mq_holes costs more than all the rest, and usually there are none. */
function depthOf(schema: string, head: string, done: string): string {
  return `greatest(0, p.tail - ${head} - cardinality(${done}) - CASE WHEN p.holes = '{}' THEN 0 ELSE ${schema}.mq_holes(p.holes, ${head}, ${done}) END)`
}

/** Joins `o.oldest`: the arrival of the group's first unsettled message. One log read per row for which `when` holds. */
export function oldestSql(schema: string, row: string, when = `${row}.depth > 0`): string {
  return `LEFT JOIN LATERAL (
      SELECT m.created_at AS oldest FROM ${schema}.mq_messages m
      WHERE ${when} AND m.partition = ${row}.partition AND m.seq > ${row}.head AND (${row}.done = '{}' OR NOT m.seq = ANY (${row}.done))
        AND (m.grp IS NULL OR m.grp = ${row}.grp) ORDER BY m.seq LIMIT 1
    ) o ON true`
}

/** Log reads (15 µs each) per answer; the groups that are furthest behind come first. */
export const looksMax = 20_000

/**
 * Adds `rank`: the rank by depth among the rows of the same `among`. Rows beyond `looksMax` are not read, and the reported
 * lag is that of the others.
 */
export function rankedSql(rows: string, among: string): string {
  return `SELECT r.*, row_number() OVER (PARTITION BY ${among} ORDER BY r.depth DESC, r.partition) AS rank FROM (${rows}) r`
}

/** The messages that a partition p holds. */
const totalSql = '(p.tail - p.low - cardinality(p.holes))'

/** Positions of groups with something to read, or that have read something. For all others the head is known without a row. */
const positionsSql = (schema: string): string =>
  `SELECT c.partition, c.grp, c.head, c.done, c.open, c.lease, c.consumed, c.moved_at FROM ${schema}.mq_cursors c
   UNION ALL SELECT w.partition, w.grp, w.head, '{}', '{}', NULL, 0, NULL FROM ${schema}.mq_ready w
     WHERE w.head IS NOT NULL AND NOT EXISTS (SELECT FROM ${schema}.mq_cursors x WHERE x.partition = w.partition AND x.grp = w.grp)`

/**
 * Like `progressSql`, but only for groups and partitions that have a row: in the other partitions that a group has joined it
 * has nothing to read. A million pairs of group and partition cost nothing while they have no rows.
 */
export function joinedSql(schema: string, where: string): string {
  return `SELECT g.id AS grp, g.name AS grp_name, p.queue, p.id AS partition, p.name AS partition_name, ${depthOf(schema, 'greatest(p.low, c.head)', 'c.done')} AS depth,
      CASE WHEN l.id IS NULL THEN 0 ELSE cardinality(c.open) END AS open, c.consumed, c.moved_at, l.id AS lease, l.until,
      greatest(p.low, c.head) AS head, c.done
    FROM (${positionsSql(schema)}) c JOIN ${schema}.mq_partitions p ON p.id = c.partition JOIN ${schema}.mq_groups g ON g.id = c.grp
      LEFT JOIN ${schema}.mq_leases l ON l.id = c.lease AND l.until > ${schema}.clock()
    WHERE ${where}`
}

/**
 * For groups (`page`, a relation): how many partitions their queues have, and the messages in those not yet joined: `id,
 * partitions, lagging, depth`. From sums over the partitions by id, so that each group costs one lookup.
 */
export function unjoinedSql(schema: string, page: string): string {
  const sums = `SELECT x.queue, count(*) AS partitions, array_agg(x.id ORDER BY x.id) AS ids, array_agg(x.lagging ORDER BY x.id) AS lagging, array_agg(x.depth ORDER BY x.id) AS depth FROM (
      SELECT p.queue, p.id, count(*) FILTER (WHERE ${totalSql} > 0) OVER w AS lagging, sum(${totalSql}) OVER w AS depth FROM ${schema}.mq_partitions p
      WHERE p.queue = ANY (ARRAY(SELECT y.queue FROM ${page} y)) WINDOW w AS (PARTITION BY p.queue ORDER BY p.id DESC)
    ) x GROUP BY x.queue`
  return `SELECT y.id, coalesce(s.partitions, 0) AS partitions, coalesce(s.lagging[width_bucket(y.reached, s.ids) + 1], 0) - coalesce(a.lagging, 0) AS lagging,
      coalesce(s.depth[width_bucket(y.reached, s.ids) + 1], 0) - coalesce(a.depth, 0) AS depth
    FROM ${page} y LEFT JOIN (${sums}) s ON s.queue = y.queue LEFT JOIN LATERAL (
      SELECT count(*) FILTER (WHERE ${totalSql} > 0) AS lagging, sum(${totalSql}) AS depth
      FROM ${schema}.mq_cursors c JOIN ${schema}.mq_partitions p ON p.id = c.partition WHERE c.grp = y.id AND c.partition > y.reached
    ) a ON y.reached IS NOT NULL`
}

/** One row per partition, over all groups of its queue; `where` refers to p. */
export function partitionSql(schema: string, where: string): string {
  return `SELECT p.id, p.queue, p.name, p.created_at, p.pushed_at, p.low, p.tail, ${totalSql} AS total,
      CASE WHEN k.unread THEN ${totalSql} ELSE coalesce(max(d.depth - d.open), 0) END AS pending,
      coalesce(max(d.open), 0)::bigint AS processing,
      CASE WHEN k.unread THEN 0 ELSE greatest(0, ${totalSql} - coalesce(max(d.depth), 0)) END AS completed,
      coalesce(sum(c.consumed), 0)::bigint AS consumed
    FROM ${schema}.mq_partitions p
      CROSS JOIN LATERAL (SELECT NOT EXISTS (SELECT FROM ${schema}.mq_groups g WHERE g.queue = p.queue) OR EXISTS (
        SELECT FROM ${schema}.mq_groups g WHERE g.queue = p.queue AND g.reached < p.id AND (SELECT x.grp FROM ${schema}.mq_cursors x WHERE x.partition = p.id AND x.grp = g.id) IS NULL
      ) AS unread OFFSET 0) k
      LEFT JOIN (${positionsSql(schema)}) c ON c.partition = p.id
      LEFT JOIN ${schema}.mq_leases l ON l.id = c.lease AND l.until > ${schema}.clock()
      CROSS JOIN LATERAL (
        SELECT ${depthOf(schema, 'greatest(p.low, c.head)', 'c.done')} AS depth,
          CASE WHEN l.id IS NULL THEN 0 ELSE cardinality(c.open) END AS open
      ) d
    WHERE ${where} GROUP BY p.id, k.unread`
}
