/** Messages that a consumer group abandoned. They outlive the log, until they are replayed. */
import type { DeadMessage } from '@spillway/protocol/schema'
import { leftOutSql, listedErrorSql } from 'spillway/workload'
import type { Static } from 'typebox'
import type { AdministrationContext } from './administration.js'
import { patientTransaction } from './patient-transaction.js'
import { listedPayloadSql, toldPayload } from './stored-payload.js'
import { type Visible, visibleSql } from './visible-queues.js'

export interface DeadFilter {
  queue: string | null
  group: string | null
  partition: string | null
  /** When they were abandoned. */
  from: Date | null
  to: Date | null
  /** Includes queues without dead letters. */
  withSkipped: boolean
  visible: Visible
}

export interface Replayed {
  queue: string
  partitionId: string
  messageId: string
  transactionId: string
}

type DeadMessageView = Static<typeof DeadMessage>

interface DeadRow extends Record<string, unknown> {
  id: string
  message_id: string
  partition: string
  queue: string
  partition_name: string
  namespace: string | null
  task: string | null
  grp: string
  transaction_id: string
  trace_id: string | null
  sealed: boolean
  payload: string | null
  payload_bytes: number | null
  error: string | null
  error_bytes: number | null
  retry_count: number
  is_letter: boolean
  created_at: Date
  moved_at: Date
}

/** Nobody pages this far, and counting further would read the whole table. */
const countMax = 100_000
const replayMs = 10_000
const purgeStep = 1_000

export class DeadMessages {
  readonly #context: AdministrationContext

  constructor(context: AdministrationContext) {
    this.#context = context
  }

  /** Newest first, without long payloads and errors. */
  async list(
    filter: DeadFilter,
    limit: number,
    offset: number,
  ): Promise<{ messages: DeadMessageView[]; total: number }> {
    const { intake, schema, seal } = this.#context
    const { queue, group, partition, from, to, withSkipped, visible } = filter
    const values = [queue, group, partition, from, to, withSkipped, visible]
    const where = `($1::text IS NULL OR d.queue = $1) AND ($2::text IS NULL OR d.grp = $2) AND ($3::text IS NULL OR d.partition_name = $3)
      AND ($4::timestamptz IS NULL OR d.moved_at >= $4) AND ($5::timestamptz IS NULL OR d.moved_at < $5::timestamptz + interval '1 ms')
      AND (d.is_letter OR $6::boolean) AND ${visibleSql('d.queue', '$7')}`
    const { columns, join } = listedPayloadSql('x')
    const [page, counted] = await Promise.all([
      intake.read<DeadRow>(
        `SELECT x.id, x.message_id, x.partition, x.queue, x.partition_name, x.namespace, x.task, x.grp, x.transaction_id, x.trace_id, x.sealed,
           ${listedErrorSql('x.error')} AS error, ${leftOutSql('octet_length(x.error)')} AS error_bytes, x.retry_count, x.is_letter, x.created_at, x.moved_at, ${columns}
         FROM (SELECT d.* FROM ${schema}.mq_dead d WHERE ${where} ORDER BY d.moved_at DESC, d.id LIMIT $8 OFFSET $9) x ${join}
         ORDER BY x.moved_at DESC, x.id`,
        [...values, limit, offset],
      ),
      intake.read<{ n: number }>(
        `SELECT count(*) AS n FROM (SELECT FROM ${schema}.mq_dead d WHERE ${where} LIMIT ${countMax}) x`,
        values,
      ),
    ])
    return {
      messages: page.rows.map((row) => ({ ...toView(row), ...toldPayload(seal, { ...row, id: row.message_id }) })),
      total: counted.rows[0]?.n ?? 0,
    }
  }

  /** Permanent, in steps; returns how many. */
  async purge(filter: Pick<DeadFilter, 'queue' | 'group' | 'partition' | 'to'>): Promise<number> {
    const { intake, schema } = this.#context
    const { queue, group, partition, to } = filter
    let purged = 0
    for (;;) {
      const { rowCount } = await intake.statements.release(
        `DELETE FROM ${schema}.mq_dead x WHERE x.id IN (SELECT d.id FROM ${schema}.mq_dead d WHERE d.queue = $1 AND ($2::text IS NULL OR d.grp = $2)
           AND ($3::text IS NULL OR d.partition_name = $3) AND ($4::timestamptz IS NULL OR d.moved_at < $4::timestamptz) LIMIT ${purgeStep})`,
        [queue, group, partition, to],
      )
      purged += rowCount ?? 0
      if ((rowCount ?? 0) < purgeStep) return purged
    }
  }

  /** The queue of a dead letter; null: it does not exist. */
  async queueOf(id: string): Promise<string | null> {
    const { intake, schema } = this.#context
    const { rows } = await intake.read<{ queue: string }>(`SELECT queue FROM ${schema}.mq_dead WHERE id = $1`, [id])
    return rows[0]?.queue ?? null
  }

  /** Moves it to the end of its partition, for its group only. Null: it no longer exists. */
  replay(id: string): Promise<Replayed | null> {
    const { intake, schema } = this.#context
    return patientTransaction(intake, replayMs, async (tx) => {
      const { rows } = await tx.query<{
        queue: string
        partition: string
        message_id: string
        transaction_id: string
      }>(`SELECT queue, partition, message_id, transaction_id FROM ${schema}.mq_replay($1)`, [id])
      const [row] = rows
      if (row === undefined) return null
      return {
        queue: row.queue,
        partitionId: row.partition,
        messageId: row.message_id,
        transactionId: row.transaction_id,
      }
    })
  }

  /** The message's newest dead letter. */
  async newestOf(partition: string, transactionId: string): Promise<{ id: string; queue: string } | null> {
    const { intake, schema } = this.#context
    const { rows } = await intake.read<{ id: string; queue: string }>(
      `SELECT id, queue FROM ${schema}.mq_dead WHERE partition = $1 AND transaction_id = $2 ORDER BY moved_at DESC, id LIMIT 1`,
      [partition, transactionId],
    )
    return rows[0] ?? null
  }
}

function toView(row: DeadRow): Omit<DeadMessageView, 'data' | 'error'> {
  const createdAt = row.created_at.toISOString()
  const movedAt = row.moved_at.toISOString()
  return {
    id: row.id,
    messageId: row.message_id,
    partitionId: row.partition,
    transactionId: row.transaction_id,
    traceId: row.trace_id,
    consumerGroup: row.grp,
    errorMessage: row.error,
    retryCount: row.retry_count,
    skipped: !row.is_letter,
    queue: row.queue,
    queueName: row.queue,
    partition: row.partition_name,
    partitionName: row.partition_name,
    namespace: row.namespace,
    task: row.task,
    createdAt,
    originalCreatedAt: createdAt,
    failedAt: movedAt,
    movedToDlqAt: movedAt,
    ...(row.error_bytes !== null && { error_message_bytes: row.error_bytes, truncated: true }),
  }
}
