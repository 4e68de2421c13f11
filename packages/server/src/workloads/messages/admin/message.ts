/** Single messages: reading, removing from the log, and moving to the dead letters by hand. */
import { MessageDetails, ReplayedMessage } from '@spillway/protocol/schema'
import { queueModeGroup } from '@spillway/protocol/wire'
import { isUuid, ProblemError } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import type { RouteRequest } from '../../../route-table.js'
import { toConfigured } from '../queues.js'
import { replay } from './dead-letters.js'
import { headSql } from './group-progress-sql.js'
import { abandonedColumns, type ListedMessage, loggedColumns, toMode } from './message-list.js'
import { messageSql, stateSql } from './message-state-sql.js'
import { type Admin, mayUse, operators, readers, route } from './route.js'
import { payloadView } from './stored-payload.js'

/** Identifies a message: its partition and its transaction id. */
interface MessageName {
  partition: string
  transactionId: string
  queue: string
}

type Details = Static<typeof MessageDetails>
type Group = Details['consumerGroups'][number]
type DeadLetter = Details['deadLetters'][number]

interface StoredMessage extends ListedMessage {
  sealed: boolean
  payload: string
  /** Null: it is no longer in the log. */
  seq: number | null
  /** Not null: it was replayed for this group. */
  grp: number | null
  config: Record<string, unknown>
}

const messageUrl = '/api/v1/messages/:partitionId/:transactionId'
const messageName = { partitionId: Type.String(), transactionId: Type.String() }
const deadMax = 100
const writeMs = 10_000
const buriedByHand = 'It was moved to the dead letters by an operator.'

export const messageRoutes = [
  route('GET', messageUrl, readers, {
    summary: 'One message',
    answer: MessageDetails,
    missing: 'message',
    async handle(admin, request) {
      const name = await messageOf(admin, request, request.params)
      return name === null ? null : detailsOf(admin, [name.partition, name.transactionId])
    },
  }),
  route('DELETE', messageUrl, operators, {
    summary: 'Remove a message from the log',
    answer: Type.Object({ success: Type.Boolean(), ...messageName, message: Type.String() }),
    missing: 'message',
    /** For all groups. */
    async handle(admin, request) {
      const { transaction, schema, consume } = admin
      const name = await messageOf(admin, request, request.params)
      if (name === null) return null
      const [row] = await transaction(writeMs, (query) =>
        query<{ removed: boolean }>(`SELECT ${schema}.mq_remove($1, $2) AS removed`, [
          name.partition,
          name.transactionId,
        ]),
      )
      if (row?.removed !== true) return null
      // The consumer that had it leased can continue.
      consume.wake(name.queue)
      return { success: true, ...request.params, message: 'Message deleted successfully' }
    },
  }),
  route('POST', `${messageUrl}/retry`, operators, {
    summary: 'Replay an abandoned message: its newest dead letter, or record of being skipped',
    answer: Type.Object({ ...ReplayedMessage.properties, retried: Type.Boolean() }),
    missing: 'abandoned message',
    async handle(admin, request) {
      const name = await messageOf(admin, request, request.params)
      if (name === null) return null
      const [letter] = await admin.read<{ id: string }>(
        `SELECT id FROM ${admin.schema}.mq_dead WHERE partition = $1 AND transaction_id = $2 ORDER BY moved_at DESC, id LIMIT 1`,
        [name.partition, name.transactionId],
      )
      const replayed = letter === undefined ? null : await replay(admin, letter.id)
      return replayed && { retried: true, ...replayed }
    },
  }),
  route('POST', `${messageUrl}/dlq`, operators, {
    summary: 'Make it a dead letter for every group that has neither settled nor leased it',
    answer: Type.Object({ movedToDLQ: Type.Boolean(), ...messageName, consumerGroups: Type.Array(Type.String()) }),
    missing: 'message',
    async handle(admin, request) {
      const name = await messageOf(admin, request, request.params)
      const groups = name === null ? null : await bury(admin, name)
      if (groups === null) return null
      if (groups.length > 0) return { movedToDLQ: true, ...request.params, consumerGroups: groups }
      const detail = 'No consumer group is waiting for it: each has settled it or has it leased, or there is no group.'
      throw new ProblemError({ code: 'conflict', detail })
    },
  }),
]

/** Null: it does not exist, or not for this caller. A deleted partition is known by its dead letters. */
export async function messageOf(
  { read, schema }: Admin,
  request: Pick<RouteRequest, 'principal'>,
  { partitionId, transactionId }: { partitionId: string; transactionId: string },
): Promise<MessageName | null> {
  if (!isUuid(partitionId)) return null
  const partition = partitionId.toLowerCase()
  const [row] = await read<{ queue: string | null }>(
    `SELECT coalesce((SELECT q.name FROM ${schema}.mq_partitions p JOIN ${schema}.mq_queues q ON q.id = p.queue WHERE p.id = $1),
       (SELECT d.queue FROM ${schema}.mq_dead d WHERE d.partition = $1 AND d.transaction_id = $2 LIMIT 1)) AS queue`,
    [partition, transactionId],
  )
  const queue = row?.queue ?? null
  return queue !== null && mayUse(request, queue) ? { partition, transactionId, queue } : null
}

/** `values`: partition and transaction id. */
async function detailsOf(admin: Admin, values: readonly string[]): Promise<Details | null> {
  const { read, schema, seal } = admin
  const [[logged], letters] = await Promise.all([
    read<StoredMessage>(
      `SELECT ${loggedColumns}, m.seq, m.grp, m.sealed, m.payload, to_jsonb(q) AS config
       FROM (SELECT x.* FROM (${messageSql(schema, 'm.*', '$1', '$2')}) x ORDER BY x.seq DESC LIMIT 1) m
         JOIN ${schema}.mq_partitions p ON p.id = m.partition JOIN ${schema}.mq_queues q ON q.id = p.queue ${stateSql(schema, 'm')}`,
      values,
    ),
    read<DeadLetter>(
      `SELECT id, grp AS "consumerGroup", error AS "errorMessage", retry_count AS "retryCount", NOT is_letter AS skipped, moved_at AS "movedToDlqAt"
       FROM ${schema}.mq_dead WHERE partition = $1 AND transaction_id = $2 ORDER BY moved_at DESC, id LIMIT ${deadMax}`,
      values,
    ),
  ])
  const row = logged ?? (await abandonedMessage(admin, letters))
  if (row === undefined) return null
  const { seq, grp, config, sealed, payload, ...listed } = row
  const isLogged = seq !== null
  const groups = isLogged ? await groupsOf(admin, [listed.partitionId, seq, grp]) : []
  const shown = payloadView(seal, { payload, sealed, partition: listed.partitionId, id: listed.id })
  const hasQueueMode = groups.some((group) => group.name === queueModeGroup)
  const retries = [...groups, ...letters].map(({ retryCount }) => retryCount)
  return {
    ...listed,
    ...shown,
    payload: shown.data,
    isEncrypted: sealed,
    errorMessage: letters[0]?.errorMessage ?? null,
    retryCount: isLogged ? Math.max(0, ...retries) : (letters[0]?.retryCount ?? 0),
    inLog: isLogged,
    queueConfig: isLogged ? { ...toConfigured(config).options } : {},
    mode: {
      ...toMode(hasQueueMode, groups.length - (hasQueueMode ? 1 : 0)),
      consumedByGroups: listed.busStatus.consumedBy,
    },
    consumerGroups: groups,
    deadLetters: letters,
  }
}

/** A message that is no longer in the log; its letters are sorted, newest first. Undefined: replayed or deleted meanwhile. */
async function abandonedMessage(
  { read, schema }: Admin,
  letters: readonly DeadLetter[],
): Promise<StoredMessage | undefined> {
  const status = letters.some(({ skipped }) => !skipped) ? 'dead_letter' : 'failed'
  const [row] = await read<StoredMessage>(
    `SELECT ${abandonedColumns('$2', '0')}, d.sealed, d.payload, NULL AS seq, NULL AS grp, NULL AS config FROM ${schema}.mq_dead d WHERE d.id = $1`,
    [letters[0]?.id, status],
  )
  return row
}

/** `values`: partition, seq, and the group that it was replayed for. */
function groupsOf({ read, schema }: Admin, values: readonly unknown[]): Promise<Group[]> {
  return read(
    `SELECT g.name, coalesce($2 <= ${headSql(schema)} OR $2::bigint = ANY (c.done), false) AS consumed,
       coalesce(l.id IS NOT NULL AND $2::bigint = ANY (c.open), false) AS processing, coalesce((c.tries->>($2::text))::int, 0) AS "retryCount",
       CASE WHEN $2::bigint = ANY (c.open) THEN l.until END AS "leaseExpiresAt"
     FROM ${schema}.mq_partitions p JOIN ${schema}.mq_groups g ON g.queue = p.queue
       LEFT JOIN ${schema}.mq_cursors c ON c.partition = p.id AND c.grp = g.id LEFT JOIN ${schema}.mq_ready w ON w.partition = p.id AND w.grp = g.id
       LEFT JOIN ${schema}.mq_leases l ON l.id = c.lease AND l.until > ${schema}.clock()
     WHERE p.id = $1 AND ($3::int IS NULL OR g.id = $3) ORDER BY g.name LIMIT 1000`,
    values,
  )
}

/**
 * Makes it a dead letter for every group that has not settled it and does not have it delivered now. Returns these groups;
 * null: it does not exist.
 */
function bury({ transaction, schema }: Admin, { partition, transactionId }: MessageName): Promise<string[] | null> {
  return transaction(writeMs, async (query) => {
    // This comes first: it takes the queue's guard if a group has not joined this partition yet.
    await query(
      `SELECT ${schema}.mq_subscribe(g.queue, g.name, g.mode, NULL, p.name) FROM ${schema}.mq_partitions p JOIN ${schema}.mq_groups g ON g.queue = p.queue
       WHERE p.id = $1 AND p.id > g.reached ORDER BY g.id`,
      [partition],
    )
    const [message] = await query<{ seq: number; grp: number | null }>(
      `SELECT x.seq, x.grp FROM (${messageSql(schema, 'm.seq, m.grp', '$1', '$2')}) x ORDER BY x.seq DESC LIMIT 1`,
      [partition, transactionId],
    )
    if (message === undefined) return null
    // From now on groups without a cursor must know which messages to skip.
    await query(
      `INSERT INTO ${schema}.mq_cursors (partition, grp, head)
       SELECT r.partition, r.grp, r.head FROM ${schema}.mq_ready r WHERE r.partition = $1 AND r.head IS NOT NULL
       ON CONFLICT (partition, grp) DO NOTHING`,
      [partition],
    )
    const waiting = await query<{ grp: number }>(
      `SELECT c.grp FROM ${schema}.mq_cursors c WHERE c.partition = $1 AND c.head < $2 AND NOT $2::bigint = ANY (c.done || c.batch)
         AND ($3::int IS NULL OR c.grp = $3) ORDER BY c.grp FOR UPDATE`,
      [partition, message.seq, message.grp],
    )
    const buried = await query<{ name: string }>(
      `WITH settled AS (
         UPDATE ${schema}.mq_cursors c SET done = c.done || $2::bigint WHERE c.partition = $1 AND c.grp = ANY ($3) RETURNING c.grp, c.tries
       ) SELECT g.name, ${schema}.mq_bury($1, s.grp, ARRAY[$2::bigint], ARRAY[$4::text], s.tries, true)
         FROM settled s JOIN ${schema}.mq_groups g ON g.id = s.grp ORDER BY g.name`,
      [partition, message.seq, waiting.map(({ grp }) => grp), buriedByHand],
    )
    return buried.map(({ name }) => name)
  })
}
