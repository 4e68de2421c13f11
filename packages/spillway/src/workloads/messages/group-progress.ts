/** How far groups are, in SQL: from the partitions' tails and the groups' cursors, never by counting messages. */

/** The numbers of queues; as an array, so that the planner does not mix it with the joins, whose size it then misjudges. */
export const queuesSql = (schema: string, where: string): string =>
  `ANY (ARRAY(SELECT q.id FROM ${schema}.mq_queues q WHERE ${where}))`

/**
 * A row for each group and partition of its queue; `where` speaks of g and p. `depth`: what it has still to settle. Messages
 * that were replayed for another group count until the group is past them.
 */
export function progressSql(schema: string, where: string): string {
  return `SELECT g.id AS grp, g.name AS grp_name, p.queue, p.id AS partition, p.name AS partition_name, ${depthSql(schema)} AS depth,
      CASE WHEN l.id IS NULL THEN 0 ELSE cardinality(c.open) END AS open, coalesce(c.consumed, 0) AS consumed, c.moved_at, l.id AS lease, l.until,
      greatest(p.low, coalesce(c.head, 0)) AS head, coalesce(c.done, '{}') AS done
    FROM ${schema}.mq_partitions p JOIN ${schema}.mq_groups g ON g.queue = p.queue
      LEFT JOIN ${schema}.mq_cursors c ON c.partition = p.id AND c.grp = g.id
      LEFT JOIN ${schema}.mq_leases l ON l.id = c.lease AND l.until > ${schema}.clock()
    WHERE ${where}`
}

/** Of a partition p and a group's cursor c, which may be null. */
function depthSql(schema: string): string {
  const head = 'greatest(p.low, coalesce(c.head, 0))'
  const done = `coalesce(c.done, '{}')`
  return `greatest(0, p.tail - ${head} - cardinality(${done}) - ${schema}.mq_holes(p.holes, ${head}, ${done}))`
}

/** Joins `o.oldest` to such rows: when the first message came that the group has to settle. One look into the log for each for which `when` holds. */
export function oldestSql(schema: string, row: string, when = `${row}.depth > 0`): string {
  return `LEFT JOIN LATERAL (
      SELECT m.created_at AS oldest FROM ${schema}.mq_messages m
      WHERE ${when} AND m.partition = ${row}.partition AND m.seq > ${row}.head AND (${row}.done = '{}' OR NOT m.seq = ANY (${row}.done))
        AND (m.grp IS NULL OR m.grp = ${row}.grp) ORDER BY m.seq LIMIT 1
    ) o ON true`
}

/** So many looks into the log (15 µs each) are taken for one answer; those who are furthest behind come first. */
export const looksMax = 20_000

/**
 * Such rows with `place`: by depth, among the rows of the same `among`. What is beyond `looksMax` is not looked at, and the
 * lag that is told is that of the others.
 */
export function placedSql(rows: string, among: string): string {
  return `SELECT r.*, row_number() OVER (PARTITION BY ${among} ORDER BY r.depth DESC, r.partition) AS place FROM (${rows}) r`
}

/** A row for each partition, over all groups of its queue; `where` speaks of p. */
export function partitionSql(schema: string, where: string): string {
  const total = 'p.tail - p.low - cardinality(p.holes)'
  return `SELECT p.id, p.queue, p.name, p.created_at, p.pushed_at, p.low, p.tail, ${total} AS total,
      CASE WHEN count(g.id) = 0 THEN ${total} ELSE max(d.depth - d.open) END AS pending,
      coalesce(max(d.open), 0)::bigint AS processing,
      CASE WHEN count(g.id) = 0 THEN 0 ELSE greatest(0, ${total} - max(d.depth)) END AS completed,
      coalesce(sum(c.consumed), 0)::bigint AS consumed
    FROM ${schema}.mq_partitions p LEFT JOIN ${schema}.mq_groups g ON g.queue = p.queue
      LEFT JOIN ${schema}.mq_cursors c ON c.partition = p.id AND c.grp = g.id
      LEFT JOIN ${schema}.mq_leases l ON l.id = c.lease AND l.until > ${schema}.clock()
      CROSS JOIN LATERAL (
        SELECT ${depthSql(schema)} AS depth,
          CASE WHEN l.id IS NULL THEN 0 ELSE cardinality(c.open) END AS open
      ) d
    WHERE ${where} GROUP BY p.id`
}
