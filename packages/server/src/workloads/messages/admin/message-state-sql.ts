/**
 * The state of a message, in SQL. The message is in its partition's log; the groups' cursors say who has settled it, and
 * mq_dead says who abandoned it.
 */

/** The log rows of this name: the message, and its replays for single groups. Two arms, so that each uses its index. */
export function messageSql(schema: string, columns: string, partition: string, transactionId: string): string {
  const arm = (kind: string): string =>
    `SELECT ${columns} FROM ${schema}.mq_messages m WHERE m.partition = ${partition} AND m.transaction_id = ${transactionId} AND m.grp ${kind}`
  return `${arm('IS NULL')} UNION ALL ${arm('IS NOT NULL')}`
}

/**
 * Joins to the messages of `m`: `d` (was it abandoned), `s` (what the groups have done with it). For a message that was
 * replayed for one group, other groups do not count.
 */
export function stateSql(schema: string, m: string): string {
  return `LEFT JOIN LATERAL (
      SELECT bool_or(x.is_letter) AS letter FROM ${schema}.mq_dead x
      WHERE x.partition = ${m}.partition AND x.transaction_id = ${m}.transaction_id AND x.seq = ${m}.seq
    ) d ON true
    LEFT JOIN LATERAL (
      SELECT count(*) AS groups, count(*) FILTER (WHERE c.settled) AS settled,
        count(*) FILTER (WHERE c.bus) AS bus_groups, count(*) FILTER (WHERE c.bus AND c.settled) AS bus_settled,
        coalesce(bool_or(c.leased), false) AS leased, max(c.until) FILTER (WHERE c.leased) AS until
      FROM (
        SELECT g.name <> '__QUEUE_MODE__' AS bus, coalesce(${m}.seq <= ${schema}.mq_head(x.head, w.head, g.reached, p.id, p.low, p.tail) OR ${m}.seq = ANY (x.done), false) AS settled,
          coalesce(l.id IS NOT NULL AND ${m}.seq = ANY (x.open), false) AS leased, l.until
        FROM ${schema}.mq_partitions p JOIN ${schema}.mq_groups g ON g.queue = p.queue
          LEFT JOIN ${schema}.mq_cursors x ON x.partition = p.id AND x.grp = g.id LEFT JOIN ${schema}.mq_ready w ON w.partition = p.id AND w.grp = g.id
          LEFT JOIN ${schema}.mq_leases l ON l.id = x.lease AND l.until > ${schema}.clock()
        WHERE p.id = ${m}.partition AND (${m}.grp IS NULL OR g.id = ${m}.grp)
      ) c
    ) s ON true`
}

/** From `d` and `s`. A message that any group abandoned has that status, whatever the other groups do with it. */
export const statusSql = `CASE WHEN d.letter THEN 'dead_letter' WHEN d.letter IS NOT NULL THEN 'failed' WHEN s.leased THEN 'processing'
    WHEN s.groups > 0 AND s.settled = s.groups THEN 'completed' ELSE 'pending' END`
