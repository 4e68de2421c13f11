/** Single messages: reading, removing from the log, and moving to the dead letters by hand. */
import type { MessageDetails } from '@spillway/protocol/schema'
import { queueModeGroup } from '@spillway/protocol/wire'
import { isUuid, ProblemError, type Tx } from 'spillway/workload'
import type { Static } from 'typebox'
import { toConfigured } from '../queues.js'
import { replay } from './dead-letters.js'
import { headSql } from './group-progress-sql.js'
import { abandonedColumns, type ListedRow, toListed, toMode } from './message-list.js'
import { messageSql, stateSql, statusSql } from './message-state-sql.js'
import { viewOf } from './pages.js'
import { patientTransaction } from './patient.js'
import { type Admin, type AdminRequest, mayUse } from './route.js'
import { payloadView } from './stored-payload.js'

/** Identifies a message: its partition and its transaction id. */
export interface MessageName {
  partition: string
  transactionId: string
  queue: string
}

type Details = Static<typeof MessageDetails>
type Group = Details['consumerGroups'][number]
type DeadLetter = Details['deadLetters'][number]

interface StoredRow extends ListedRow {
  sealed: boolean
  payload: string
}

interface LoggedRow extends StoredRow {
  seq: number
  grp: number | null
  config: Record<string, unknown>
}

const deadMax = 100
const writeMs = 10_000
const buriedByHand = 'It was moved to the dead letters by an operator.'

/** Null: it does not exist, or not for this caller. A deleted partition is known by its dead letters. */
export async function messageOf(
  { intake, schema }: Admin,
  request: Pick<AdminRequest, 'visible'>,
  { partitionId, transactionId }: { partitionId: string; transactionId: string },
): Promise<MessageName | null> {
  if (!isUuid(partitionId)) return null
  const partition = partitionId.toLowerCase()
  const { rows } = await intake.read<{ queue: string | null }>(
    `SELECT coalesce((SELECT q.name FROM ${schema}.mq_partitions p JOIN ${schema}.mq_queues q ON q.id = p.queue WHERE p.id = $1),
       (SELECT d.queue FROM ${schema}.mq_dead d WHERE d.partition = $1 AND d.transaction_id = $2 LIMIT 1)) AS queue`,
    [partition, transactionId],
  )
  const queue = rows[0]?.queue ?? null
  return queue !== null && mayUse(request, queue) ? { partition, transactionId, queue } : null
}

export async function getMessage(admin: Admin, request: AdminRequest): Promise<Details | null> {
  const { intake, schema, seal } = admin
  const name = await messageOf(admin, request, request.params)
  if (name === null) return null
  const values = [name.partition, name.transactionId]
  const [found, dead] = await Promise.all([
    intake.read<LoggedRow>(
      `SELECT m.id, m.partition, m.seq, m.grp, m.transaction_id, m.trace_id, m.sealed, m.payload, m.created_at, p.name AS partition_name,
         q.name AS queue_name, q.namespace, q.task, q.priority, to_jsonb(q) AS config, ${statusSql} AS status, s.bus_groups, s.bus_settled, s.until, 1 AS candidates
       FROM (SELECT x.* FROM (${messageSql(schema, 'm.*', '$1', '$2')}) x ORDER BY x.seq DESC LIMIT 1) m
         JOIN ${schema}.mq_partitions p ON p.id = m.partition JOIN ${schema}.mq_queues q ON q.id = p.queue ${stateSql(schema, 'm')}`,
      values,
    ),
    intake.read(
      `SELECT id, grp AS "consumerGroup", error AS "errorMessage", retry_count AS "retryCount", NOT is_letter AS skipped, moved_at AS "movedToDlqAt"
       FROM ${schema}.mq_dead WHERE partition = $1 AND transaction_id = $2 ORDER BY moved_at DESC, id LIMIT ${deadMax}`,
      values,
    ),
  ])
  const letters = dead.rows.map(viewOf<DeadLetter>)
  const [row] = found.rows
  if (row === undefined) return detailsOfDeadLetters(admin, letters)
  const groups = await groupsOf(admin, row)
  const shown = payloadView(seal, row)
  const hasQueueMode = groups.some((group) => group.name === queueModeGroup)
  return {
    ...toListed(row),
    ...shown,
    payload: shown.data,
    isEncrypted: row.sealed,
    errorMessage: letters[0]?.errorMessage ?? null,
    retryCount: Math.max(0, ...[...groups, ...letters].map(({ retryCount }) => retryCount)),
    inLog: true,
    queueConfig: { ...toConfigured(row.config).options },
    mode: { ...toMode(hasQueueMode, groups.length - (hasQueueMode ? 1 : 0)), consumedByGroups: row.bus_settled },
    consumerGroups: groups,
    deadLetters: letters,
  }
}

/** A message that is no longer in the log; its letters are sorted, newest first. */
async function detailsOfDeadLetters(
  { intake, schema, seal }: Admin,
  letters: readonly DeadLetter[],
): Promise<Details | null> {
  const [newest] = letters
  if (newest === undefined) return null
  const status = letters.some(({ skipped }) => !skipped) ? 'dead_letter' : 'failed'
  const { rows } = await intake.read<StoredRow>(
    `SELECT ${abandonedColumns}, 0 AS priority, $2::text AS status, d.sealed, d.payload FROM ${schema}.mq_dead d WHERE d.id = $1`,
    [newest.id, status],
  )
  const [row] = rows
  // It was replayed or deleted a moment ago.
  if (row === undefined) return null
  const shown = payloadView(seal, row)
  return {
    ...toListed(row),
    ...shown,
    payload: shown.data,
    isEncrypted: row.sealed,
    errorMessage: newest.errorMessage,
    retryCount: newest.retryCount,
    inLog: false,
    queueConfig: {},
    mode: { ...toMode(false, 0), consumedByGroups: 0 },
    consumerGroups: [],
    deadLetters: [...letters],
  }
}

async function groupsOf({ intake, schema }: Admin, { partition, seq, grp }: LoggedRow): Promise<Group[]> {
  const { rows } = await intake.read(
    `SELECT g.name, coalesce($2 <= ${headSql(schema)} OR $2::bigint = ANY (c.done), false) AS consumed,
       coalesce(l.id IS NOT NULL AND $2::bigint = ANY (c.open), false) AS processing, coalesce((c.tries->>($2::text))::int, 0) AS "retryCount",
       CASE WHEN $2::bigint = ANY (c.open) THEN l.until END AS "leaseExpiresAt"
     FROM ${schema}.mq_partitions p JOIN ${schema}.mq_groups g ON g.queue = p.queue
       LEFT JOIN ${schema}.mq_cursors c ON c.partition = p.id AND c.grp = g.id LEFT JOIN ${schema}.mq_ready w ON w.partition = p.id AND w.grp = g.id
       LEFT JOIN ${schema}.mq_leases l ON l.id = c.lease AND l.until > ${schema}.clock()
     WHERE p.id = $1 AND ($3::int IS NULL OR g.id = $3) ORDER BY g.name LIMIT 1000`,
    [partition, seq, grp],
  )
  return rows.map(viewOf<Group>)
}

/** Removes it from the log, for all groups. */
export async function removeMessage(admin: Admin, request: AdminRequest): Promise<unknown> {
  const { intake, schema, wake } = admin
  const name = await messageOf(admin, request, request.params)
  if (name === null) return null
  const { rows } = await patientTransaction(intake, writeMs, (tx) =>
    tx.query<{ removed: boolean }>(`SELECT ${schema}.mq_remove($1, $2) AS removed`, [
      name.partition,
      name.transactionId,
    ]),
  )
  if (rows[0]?.removed !== true) return null
  // The consumer that had it leased can continue.
  wake(name.queue)
  return { success: true, ...request.params, message: 'Message deleted successfully' }
}

/** Replays its newest dead letter. */
export async function retryMessage(admin: Admin, request: AdminRequest): Promise<unknown> {
  const { intake, schema } = admin
  const name = await messageOf(admin, request, request.params)
  if (name === null) return null
  const { rows } = await intake.read<{ id: string }>(
    `SELECT id FROM ${schema}.mq_dead WHERE partition = $1 AND transaction_id = $2 ORDER BY moved_at DESC, id LIMIT 1`,
    [name.partition, name.transactionId],
  )
  const replayed = rows[0] === undefined ? null : await replay(admin, rows[0].id)
  return replayed && { retried: true, ...replayed }
}

export async function buryMessage(admin: Admin, request: AdminRequest): Promise<unknown> {
  const name = await messageOf(admin, request, request.params)
  const groups =
    name === null ? null : await patientTransaction(admin.intake, writeMs, (tx) => bury(tx, admin.schema, name))
  if (groups === null) return null
  if (groups.length > 0) return { movedToDLQ: true, ...request.params, consumerGroups: groups }
  const detail = 'No consumer group is waiting for it: each has settled it or has it leased, or there is no group.'
  throw new ProblemError({ code: 'conflict', detail })
}

/**
 * Makes it a dead letter for every group that has not settled it and does not have it delivered now. Returns these groups;
 * null: it does not exist.
 */
async function bury(tx: Tx, schema: string, { partition, transactionId }: MessageName): Promise<string[] | null> {
  // This comes first: it takes the queue's guard if a group has not joined this partition yet.
  await tx.query(
    `SELECT ${schema}.mq_subscribe(g.queue, g.name, g.mode, NULL, p.name) FROM ${schema}.mq_partitions p JOIN ${schema}.mq_groups g ON g.queue = p.queue
     WHERE p.id = $1 AND p.id > g.reached ORDER BY g.id`,
    [partition],
  )
  const found = await tx.query<{ seq: number; grp: number | null }>(
    `SELECT x.seq, x.grp FROM (${messageSql(schema, 'm.seq, m.grp', '$1', '$2')}) x ORDER BY x.seq DESC LIMIT 1`,
    [partition, transactionId],
  )
  const [message] = found.rows
  if (message === undefined) return null
  // From now on groups without a cursor must know which messages to skip.
  await tx.query(
    `INSERT INTO ${schema}.mq_cursors (partition, grp, head)
     SELECT r.partition, r.grp, r.head FROM ${schema}.mq_ready r WHERE r.partition = $1 AND r.head IS NOT NULL
     ON CONFLICT (partition, grp) DO NOTHING`,
    [partition],
  )
  const waiting = await tx.query<{ grp: number }>(
    `SELECT c.grp FROM ${schema}.mq_cursors c WHERE c.partition = $1 AND c.head < $2 AND NOT $2::bigint = ANY (c.done || c.batch)
       AND ($3::int IS NULL OR c.grp = $3) ORDER BY c.grp FOR UPDATE`,
    [partition, message.seq, message.grp],
  )
  const { rows } = await tx.query<{ name: string }>(
    `WITH settled AS (
       UPDATE ${schema}.mq_cursors c SET done = c.done || $2::bigint WHERE c.partition = $1 AND c.grp = ANY ($3) RETURNING c.grp, c.tries
     ) SELECT g.name, ${schema}.mq_bury($1, s.grp, ARRAY[$2::bigint], ARRAY[$4::text], s.tries, true)
       FROM settled s JOIN ${schema}.mq_groups g ON g.id = s.grp ORDER BY g.name`,
    [partition, message.seq, waiting.rows.map(({ grp }) => grp), buriedByHand],
  )
  return rows.map((group) => group.name)
}
