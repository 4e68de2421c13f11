/** Messages that a consumer group abandoned. They outlive the log, until they are replayed. */
import type { DeadMessage, ListDeadMessagesQuery, PurgeDeadMessagesQuery } from '@spillway/protocol/schema'
import { limits } from '@spillway/protocol/wire'
import { isUuid, leftOutSql, listedErrorSql } from 'spillway/workload'
import type { Static } from 'typebox'
import { instantOrNull } from '../timestamps.js'
import { offsetPage, pageOf, viewOf } from './pages.js'
import { patientTransaction } from './patient.js'
import { type Admin, type AdminRequest, mayUse } from './route.js'
import { listedPayloadSql, payloadView } from './stored-payload.js'
import { visibleSql } from './visible-queues.js'

type DeadLetter = Omit<Static<typeof DeadMessage>, 'data' | 'error'>

interface DeadRow extends Record<string, unknown> {
  sealed: boolean
  payload: string | null
  payload_bytes: number | null
  error_message_bytes: number | null
}

const listDefault = 100
/** Nobody pages this far, and counting further would read the whole table. */
const countMax = 100_000
const replayMs = 10_000
const purgeStep = 1_000

/** Newest first, without long payloads and errors. */
export async function listDeadLetters(
  { intake, schema, seal, pageBytesMax }: Admin,
  { query, visible }: AdminRequest<Static<typeof ListDeadMessagesQuery>>,
): Promise<unknown> {
  const { queue = null, consumerGroup = null, partition = null, from, to, skipped = false } = query
  const { limit, offset } = pageOf(query, listDefault, limits.listItemsMax)
  const range = [instantOrNull('from', from), instantOrNull('to', to)]
  const values = [queue, consumerGroup, partition, ...range, skipped, visible]
  const where = `($1::text IS NULL OR d.queue = $1) AND ($2::text IS NULL OR d.grp = $2) AND ($3::text IS NULL OR d.partition_name = $3)
    AND ($4::timestamptz IS NULL OR d.moved_at >= $4) AND ($5::timestamptz IS NULL OR d.moved_at < $5::timestamptz + interval '1 ms')
    AND (d.is_letter OR $6::boolean) AND ${visibleSql('d.queue', '$7')}`
  const { columns, join } = listedPayloadSql('x')
  const [page, counted] = await Promise.all([
    intake.read<DeadRow>(
      `SELECT x.id, x.message_id AS "messageId", x.partition AS "partitionId", x.transaction_id AS "transactionId", x.trace_id AS "traceId", x.grp AS "consumerGroup",
         ${listedErrorSql('x.error')} AS "errorMessage", x.retry_count AS "retryCount", NOT x.is_letter AS skipped, x.queue, x.queue AS "queueName",
         x.partition_name AS partition, x.partition_name AS "partitionName", x.namespace, x.task, x.created_at AS "createdAt", x.created_at AS "originalCreatedAt",
         x.moved_at AS "failedAt", x.moved_at AS "movedToDlqAt", ${leftOutSql('octet_length(x.error)')} AS error_message_bytes, x.sealed, ${columns}
       FROM (SELECT d.* FROM ${schema}.mq_dead d WHERE ${where} ORDER BY d.moved_at DESC, d.id LIMIT $8 OFFSET $9) x ${join}
       ORDER BY x.moved_at DESC, x.id`,
      [...values, limit + 1, offset],
    ),
    intake.read<{ n: number }>(
      `SELECT count(*) AS n FROM (SELECT FROM ${schema}.mq_dead d WHERE ${where} LIMIT ${countMax}) x`,
      values,
    ),
  ])
  const found = page.rows.map(({ sealed, payload, payload_bytes, error_message_bytes, ...row }) => {
    const letter = viewOf<DeadLetter>(row)
    return {
      ...letter,
      ...(error_message_bytes !== null && { error_message_bytes, truncated: true }),
      ...payloadView(seal, { sealed, payload, payload_bytes, partition: letter.partitionId, id: letter.messageId }),
    }
  })
  const { items: messages, pagination } = offsetPage(found, { limit, offset }, pageBytesMax)
  return { messages, total: counted.rows[0]?.n ?? 0, limit, offset, pagination }
}

/** Permanent, in steps. */
export async function purgeDeadLetters(
  { intake, schema }: Admin,
  { query, visible }: AdminRequest<Static<typeof PurgeDeadMessagesQuery>>,
): Promise<unknown> {
  const { queue, consumerGroup = null, partition = null } = query
  const to = instantOrNull('to', query.to)
  let purged = 0
  for (let isFull = mayUse({ visible }, queue); isFull; ) {
    const { rowCount } = await intake.statements.release(
      `DELETE FROM ${schema}.mq_dead x WHERE x.id IN (SELECT d.id FROM ${schema}.mq_dead d WHERE d.queue = $1 AND ($2::text IS NULL OR d.grp = $2)
         AND ($3::text IS NULL OR d.partition_name = $3) AND ($4::timestamptz IS NULL OR d.moved_at < $4::timestamptz) LIMIT ${purgeStep})`,
      [queue, consumerGroup, partition, to],
    )
    purged += rowCount ?? 0
    isFull = rowCount === purgeStep
  }
  return { purged }
}

export async function replayDeadLetter(admin: Admin, request: AdminRequest): Promise<unknown> {
  const { intake, schema } = admin
  const id = request.params.id.toLowerCase()
  if (!isUuid(id)) return null
  const { rows } = await intake.read<{ queue: string }>(`SELECT queue FROM ${schema}.mq_dead WHERE id = $1`, [id])
  const [letter] = rows
  if (letter === undefined || !mayUse(request, letter.queue)) return null
  const replayed = await replay(admin, id)
  return replayed && { replayed: true, id, ...replayed }
}

/** Moves a dead letter to the end of its partition, for its group only. Null: it no longer exists. */
export async function replay({ intake, schema, wake }: Admin, id: string): Promise<{ queue: string } | null> {
  const [replayed] = await patientTransaction(intake, replayMs, async (tx) => {
    const { rows } = await tx.query<{ queue: string }>(
      `SELECT queue, partition AS "partitionId", message_id AS "messageId", transaction_id AS "transactionId" FROM ${schema}.mq_replay($1)`,
      [id],
    )
    return rows
  })
  if (replayed === undefined) return null
  wake(replayed.queue)
  return replayed
}
