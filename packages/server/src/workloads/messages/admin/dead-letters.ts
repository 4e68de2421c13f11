/** Messages that a consumer group abandoned. They outlive the log, until they are replayed. */
import {
  type DeadMessage,
  DeadMessagePage,
  ListDeadMessagesQuery,
  PurgeDeadMessagesQuery,
  Purged,
  ReplayedMessage,
} from '@spillway/protocol/schema'
import { limits } from '@spillway/protocol/wire'
import { isUuid, leftOutSql, listedErrorSql } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import { instantOrNull } from '../timestamps.js'
import { offsetPage, pageOf } from './pages.js'
import { type Admin, mayUse, operators, readers, route } from './route.js'
import { listedPayloadSql, payloadView, type StoredPayload } from './stored-payload.js'
import { visibleSql } from './visible-queues.js'

type DeadRow = Omit<Static<typeof DeadMessage>, 'data' | 'error' | 'error_message_bytes'> &
  Pick<StoredPayload, 'sealed' | 'payload' | 'payload_bytes'> & { error_message_bytes: number | null }

const listDefault = 100
/** Nobody pages this far, and counting further would read the whole table. */
const countMax = 100_000
const replayMs = 10_000
const purgeStep = 1_000

export const deadLetterRoutes = [
  route('GET', '/api/v1/dlq', readers, {
    summary: 'Dead letters, newest first',
    query: ListDeadMessagesQuery,
    answer: DeadMessagePage,
    /** Without long payloads and errors. */
    async handle({ read, schema, seal, pageBytesMax }, { query, principal }) {
      const { queue, consumerGroup, partition, from, to, skipped = false } = query
      const { limit, offset } = pageOf(query, listDefault, limits.listItemsMax)
      const range = [instantOrNull('from', from), instantOrNull('to', to)]
      const values = [queue, consumerGroup, partition, ...range, skipped, principal.queues]
      const where = `($1::text IS NULL OR d.queue = $1) AND ($2::text IS NULL OR d.grp = $2) AND ($3::text IS NULL OR d.partition_name = $3)
        AND ($4::timestamptz IS NULL OR d.moved_at >= $4) AND ($5::timestamptz IS NULL OR d.moved_at < $5::timestamptz + interval '1 ms')
        AND (d.is_letter OR $6::boolean) AND ${visibleSql('d.queue', '$7')}`
      const { columns, join } = listedPayloadSql('x')
      const [rows, [counted]] = await Promise.all([
        read<DeadRow>(
          `SELECT x.id, x.message_id AS "messageId", x.partition AS "partitionId", x.transaction_id AS "transactionId", x.trace_id AS "traceId", x.grp AS "consumerGroup",
             ${listedErrorSql('x.error')} AS "errorMessage", x.retry_count AS "retryCount", NOT x.is_letter AS skipped, x.queue, x.queue AS "queueName",
             x.partition_name AS partition, x.partition_name AS "partitionName", x.namespace, x.task, x.created_at AS "createdAt", x.created_at AS "originalCreatedAt",
             x.moved_at AS "failedAt", x.moved_at AS "movedToDlqAt", ${leftOutSql('octet_length(x.error)')} AS error_message_bytes, x.sealed, ${columns}
           FROM (SELECT d.* FROM ${schema}.mq_dead d WHERE ${where} ORDER BY d.moved_at DESC, d.id LIMIT $8 OFFSET $9) x ${join}
           ORDER BY x.moved_at DESC, x.id`,
          [...values, limit + 1, offset],
        ),
        read<{ n: number }>(
          `SELECT count(*) AS n FROM (SELECT FROM ${schema}.mq_dead d WHERE ${where} LIMIT ${countMax}) x`,
          values,
        ),
      ])
      const found = rows.map(({ sealed, payload, payload_bytes, error_message_bytes, ...letter }) => ({
        ...letter,
        ...(error_message_bytes !== null && { error_message_bytes, truncated: true }),
        ...payloadView(seal, { sealed, payload, payload_bytes, partition: letter.partitionId, id: letter.messageId }),
      }))
      const { items: messages, pagination } = offsetPage(found, { limit, offset }, pageBytesMax)
      return { messages, total: counted?.n ?? 0, limit, offset, pagination }
    },
  }),
  route('DELETE', '/api/v1/dlq', operators, {
    summary: 'Delete dead letters of a queue, and the records of skipped messages',
    query: PurgeDeadMessagesQuery,
    answer: Purged,
    async handle({ intake, schema }, request) {
      const { queue, consumerGroup, partition } = request.query
      const to = instantOrNull('to', request.query.to)
      let purged = 0
      for (let isFull = mayUse(request, queue); isFull; ) {
        const { rowCount } = await intake.statements.release(
          `DELETE FROM ${schema}.mq_dead x WHERE x.id IN (SELECT d.id FROM ${schema}.mq_dead d WHERE d.queue = $1 AND ($2::text IS NULL OR d.grp = $2)
             AND ($3::text IS NULL OR d.partition_name = $3) AND ($4::timestamptz IS NULL OR d.moved_at < $4::timestamptz) LIMIT ${purgeStep})`,
          [queue, consumerGroup, partition, to],
        )
        purged += rowCount ?? 0
        isFull = rowCount === purgeStep
      }
      return { purged }
    },
  }),
  route('POST', '/api/v1/dlq/:id/replay', operators, {
    summary: 'Put a dead letter at the end of its partition, for its group only',
    answer: Type.Object({ ...ReplayedMessage.properties, replayed: Type.Boolean(), id: Type.String() }),
    missing: 'dead letter',
    async handle(admin, request) {
      const id = request.params.id.toLowerCase()
      if (!isUuid(id)) return null
      const [letter] = await admin.read<{ queue: string }>(`SELECT queue FROM ${admin.schema}.mq_dead WHERE id = $1`, [
        id,
      ])
      if (letter === undefined || !mayUse(request, letter.queue)) return null
      const replayed = await replay(admin, id)
      return replayed && { replayed: true, id, ...replayed }
    },
  }),
]

/** Moves a dead letter to the end of its partition, for its group only. Null: it no longer exists. */
export async function replay(admin: Admin, id: string): Promise<Static<typeof ReplayedMessage> | null> {
  const { transaction, schema, consume } = admin
  const [replayed] = await transaction(replayMs, (query) =>
    query<Static<typeof ReplayedMessage>>(
      `SELECT queue, partition AS "partitionId", message_id AS "messageId", transaction_id AS "transactionId" FROM ${schema}.mq_replay($1)`,
      [id],
    ),
  )
  if (replayed === undefined) return null
  consume.wake(replayed.queue)
  return replayed
}
