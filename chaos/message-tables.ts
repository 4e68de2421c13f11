/** What is read from the tables of the messages: the rows, what must hold of them at any moment, and what at rest. */
import { queueName } from './workload.js'

/** Each message as an effect; its number in the partition is its place. */
export const messagesSql = (
  schema: string,
): string => `SELECT m.seq::int, (extract(epoch FROM m.created_at) * 1000)::float8, p.name, (m.payload::json->>'n')::int, m.id, 'push'
  FROM ${schema}.mq_messages m JOIN ${schema}.mq_partitions p ON p.id = m.partition JOIN ${schema}.mq_queues q ON q.id = p.queue WHERE q.name = '${queueName}'`

/**
 * Between any two transactions. A group that has something to read, in a partition that it has joined, is in one place: in
 * line, or in a lease (whose time may be over); what leases and cursors say of each other is the same; numbers have no gaps.
 */
export const messagesAuditSql = (schema: string): string => `WITH places AS (
    SELECT p.name, g.name AS grp, p.tail, greatest(p.low, ${schema}.mq_head(c.head, r.head, g.reached, p.id, p.low, p.tail)) AS head, c.lease, l.id IS NOT NULL AS leased, r.grp IS NOT NULL AS ready
    FROM ${schema}.mq_partitions p JOIN ${schema}.mq_groups g ON g.queue = p.queue
      LEFT JOIN ${schema}.mq_cursors c ON c.partition = p.id AND c.grp = g.id
      LEFT JOIN ${schema}.mq_ready r ON r.partition = p.id AND r.grp = g.id
      LEFT JOIN ${schema}.mq_leases l ON l.id = c.lease AND l.grp = g.id AND p.id = ANY (l.partitions)
    WHERE c.head IS NOT NULL OR r.grp IS NOT NULL OR p.id > g.reached IS NOT TRUE
  )
  SELECT format('messages: %s of %s has read %s of %s, and is %s', grp, name, head, tail, CASE WHEN ready THEN 'in line and leased' ELSE 'neither in line nor leased' END) AS fault
    FROM places WHERE head < tail AND ready = leased
  UNION ALL SELECT format('messages: %s of %s has read %s of %s', grp, name, head, tail) FROM places WHERE head > tail
  UNION ALL SELECT format('messages: %s of %s is in lease %s, which does not say so', grp, name, lease) FROM places WHERE lease IS NOT NULL AND NOT leased
  UNION ALL SELECT format('messages: lease %s names partition %s, whose cursor does not name it', l.id, u.part) FROM ${schema}.mq_leases l, unnest(l.partitions) u(part)
    WHERE NOT EXISTS (SELECT FROM ${schema}.mq_cursors c WHERE c.partition = u.part AND c.grp = l.grp AND c.lease = l.id)
  UNION ALL SELECT format('messages: lease %s is of nothing', l.id) FROM ${schema}.mq_leases l WHERE l.partitions = '{}'
  UNION ALL SELECT format('messages: %s has %s messages from %s to %s, behind %s and up to %s', p.name, coalesce(m.n, 0), m.first, m.last, p.low, p.tail)
    FROM ${schema}.mq_partitions p LEFT JOIN (SELECT partition, count(*) AS n, min(seq) AS first, max(seq) AS last FROM ${schema}.mq_messages GROUP BY 1) m ON m.partition = p.id
    WHERE coalesce(m.n, 0) <> p.tail - p.low OR m.first <= p.low OR m.last > p.tail`

/** When all is consumed. Nobody of the run gives a message up, so that each was agreed to, once. */
export const messagesRestSql = (schema: string): string => `${messagesAuditSql(schema)}
  UNION ALL SELECT format('messages: lease %s is there at rest', l.id) FROM ${schema}.mq_leases l
  UNION ALL SELECT format('messages: %s gave up %s', d.grp, d.transaction_id) FROM ${schema}.mq_dead d
  UNION ALL SELECT format('messages: %s has agreed to %s of the %s messages of %s', g.name, coalesce(c.consumed, 0), p.tail, p.name)
    FROM ${schema}.mq_partitions p JOIN ${schema}.mq_groups g ON g.queue = p.queue LEFT JOIN ${schema}.mq_cursors c ON c.partition = p.id AND c.grp = g.id
    WHERE coalesce(c.consumed, 0) <> p.tail`

/** Partitions that a group has to read, and leases. A group that is not there yet has to read all. */
export const unconsumedSql = (
  schema: string,
): string => `SELECT (SELECT count(*) FROM ${schema}.mq_leases)::int + count(*)::int AS n
  FROM ${schema}.mq_partitions p JOIN ${schema}.mq_queues q ON q.id = p.queue AND q.name = '${queueName}' CROSS JOIN unnest($1::text[]) u(name)
    LEFT JOIN ${schema}.mq_groups g ON g.queue = q.id AND g.name = u.name LEFT JOIN ${schema}.mq_cursors c ON c.partition = p.id AND c.grp = g.id
    LEFT JOIN ${schema}.mq_ready r ON r.partition = p.id AND r.grp = g.id
  WHERE CASE WHEN g.id IS NULL THEN 0 ELSE ${schema}.mq_head(c.head, r.head, g.reached, p.id, p.low, p.tail) END < p.tail`
