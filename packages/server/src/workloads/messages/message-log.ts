/** Single messages: reading, removing from the log, and moving to the dead letters by hand. */
import type { MessageDetails } from '@spillway/protocol/schema'
import { queueModeGroup } from '@spillway/protocol/wire'
import type { Static } from 'typebox'
import type { AdministrationContext } from './administration.js'
import { headSql } from './group-progress.js'
import { type ListedRow, toListed, toMode } from './message-list.js'
import { messageSql, stateSql, statusSql } from './message-state.js'
import { patientTransaction } from './patient-transaction.js'
import { toConfigured } from './queues.js'
import { toldPayload } from './stored-payload.js'

/** Identifies a message in a path: its partition and its transaction id. */
export interface MessageName {
  partition: string
  transactionId: string
}

type Details = Static<typeof MessageDetails>

interface DetailRow extends ListedRow {
  seq: number
  grp: number | null
  sealed: boolean
  payload: string
  settled: number
}

interface GroupRow extends Record<string, unknown> {
  name: string
  settled: boolean
  leased: boolean
  until: Date | null
  tries: number
}

interface DeadRow extends Record<string, unknown> {
  id: string
  message_id: string
  grp: string
  error: string | null
  retry_count: number
  is_letter: boolean
  moved_at: Date
  created_at: Date
  queue: string
  partition_name: string
  namespace: string | null
  task: string | null
  trace_id: string | null
  sealed: boolean
}

export type Buried = { kind: 'done'; groups: string[] } | { kind: 'unknown' } | { kind: 'nobody' }

const deadMax = 100
const writeMs = 10_000
const buriedByHand = 'It was moved to the dead letters by an operator.'

export class MessageLog {
  readonly #context: AdministrationContext

  constructor(context: AdministrationContext) {
    this.#context = context
  }

  /** The queue of a partition; a deleted partition is known by its dead letters. */
  async queueOf({ partition, transactionId }: MessageName): Promise<string | null> {
    const { intake, schema } = this.#context
    const { rows } = await intake.read<{ name: string | null }>(
      `SELECT coalesce((SELECT q.name FROM ${schema}.mq_partitions p JOIN ${schema}.mq_queues q ON q.id = p.queue WHERE p.id = $1),
         (SELECT d.queue FROM ${schema}.mq_dead d WHERE d.partition = $1 AND d.transaction_id = $2 LIMIT 1)) AS name`,
      [partition, transactionId],
    )
    return rows[0]?.name ?? null
  }

  async isThere({ partition, transactionId }: MessageName): Promise<boolean> {
    const { intake, schema } = this.#context
    const { rows } = await intake.read(`${messageSql(schema, 'm.seq', '$1', '$2')} LIMIT 1`, [partition, transactionId])
    return rows.length > 0
  }

  async get(name: MessageName): Promise<Details | null> {
    const { intake, schema, seal } = this.#context
    const values = [name.partition, name.transactionId]
    const [found, dead] = await Promise.all([
      intake.read<DetailRow & { config: Record<string, unknown> }>(
        `SELECT m.id, m.partition, m.seq, m.grp, m.transaction_id, m.trace_id, m.sealed, m.payload, m.created_at, p.name AS partition_name,
           q.name AS queue_name, q.namespace, q.task, q.priority, to_jsonb(q) AS config, ${statusSql} AS status, s.bus_groups, s.bus_settled, s.settled, s.until, 1 AS candidates
         FROM (SELECT x.* FROM (${messageSql(schema, 'm.*', '$1', '$2')}) x ORDER BY x.seq DESC LIMIT 1) m
           JOIN ${schema}.mq_partitions p ON p.id = m.partition JOIN ${schema}.mq_queues q ON q.id = p.queue ${stateSql(schema, 'm')}`,
        values,
      ),
      intake.read<DeadRow>(
        `SELECT id, message_id, grp, error, retry_count, is_letter, moved_at, created_at, queue, partition_name, namespace, task, trace_id, sealed
         FROM ${schema}.mq_dead WHERE partition = $1 AND transaction_id = $2 ORDER BY moved_at DESC, id LIMIT ${deadMax}`,
        values,
      ),
    ])
    const [row] = found.rows
    if (row === undefined) return this.#ofDeadLetters(name, dead.rows)
    const groups = await this.#groupsOf(row)
    const told = toldPayload(seal, row)
    const hasQueueMode = groups.some((group) => group.name === queueModeGroup)
    return {
      ...toListed(row),
      ...told,
      payload: told.data,
      isEncrypted: row.sealed,
      errorMessage: dead.rows[0]?.error ?? null,
      retryCount: Math.max(0, ...groups.map(({ tries }) => tries), ...dead.rows.map((letter) => letter.retry_count)),
      inLog: true,
      queueConfig: { ...toConfigured(row.config).options },
      mode: { ...toMode(hasQueueMode, groups.length - (hasQueueMode ? 1 : 0)), consumedByGroups: row.bus_settled },
      consumerGroups: groups.map((group) => ({
        name: group.name,
        consumed: group.settled,
        processing: group.leased,
        retryCount: group.tries,
        leaseExpiresAt: group.until?.toISOString() ?? null,
      })),
      deadLetters: dead.rows.map(toLetter),
    }
  }

  /** Removes it from the log, for all groups. False: there is no such message. */
  remove({ partition, transactionId }: MessageName): Promise<boolean> {
    const { intake, schema } = this.#context
    return patientTransaction(intake, writeMs, async (tx) => {
      const { rows } = await tx.query<{ removed: boolean }>(`SELECT ${schema}.mq_remove($1, $2) AS removed`, [
        partition,
        transactionId,
      ])
      return rows[0]?.removed === true
    })
  }

  /** Makes it a dead letter for every group that has not settled it and does not have it delivered now. */
  bury({ partition, transactionId }: MessageName): Promise<Buried> {
    const { intake, schema } = this.#context
    return patientTransaction(intake, writeMs, async (tx): Promise<Buried> => {
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
      if (message === undefined) return { kind: 'unknown' }
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
      if (waiting.rows.length === 0) return { kind: 'nobody' }
      const { rows } = await tx.query<{ name: string }>(
        `WITH settled AS (
           UPDATE ${schema}.mq_cursors c SET done = c.done || $2::bigint WHERE c.partition = $1 AND c.grp = ANY ($3) RETURNING c.grp, c.tries
         ) SELECT g.name, ${schema}.mq_bury($1, s.grp, ARRAY[$2::bigint], ARRAY[$4::text], s.tries, true)
           FROM settled s JOIN ${schema}.mq_groups g ON g.id = s.grp ORDER BY g.name`,
        [partition, message.seq, waiting.rows.map(({ grp }) => grp), buriedByHand],
      )
      return { kind: 'done', groups: rows.map((group) => group.name) }
    })
  }

  /** A message that is no longer in the log. */
  async #ofDeadLetters(
    { partition, transactionId }: MessageName,
    letters: readonly DeadRow[],
  ): Promise<Details | null> {
    const { intake, schema, seal } = this.#context
    const [newest] = letters
    if (newest === undefined) return null
    const { rows } = await intake.read<{ payload: string }>(`SELECT payload FROM ${schema}.mq_dead WHERE id = $1`, [
      newest.id,
    ])
    const [stored] = rows
    // It was replayed or deleted a moment ago.
    if (stored === undefined) return null
    const { sealed, message_id: id } = newest
    const payload = toldPayload(seal, { ...stored, sealed, partition, id })
    return {
      ...toListed({
        ...newest,
        id,
        partition,
        transaction_id: transactionId,
        queue_name: newest.queue,
        priority: 0,
        status: letters.some(({ is_letter }) => is_letter) ? 'dead_letter' : 'failed',
        bus_groups: 0,
        bus_settled: 0,
        until: null,
        candidates: 0,
      }),
      ...payload,
      payload: payload.data,
      isEncrypted: sealed,
      errorMessage: newest.error,
      retryCount: newest.retry_count,
      inLog: false,
      queueConfig: {},
      mode: { ...toMode(false, 0), consumedByGroups: 0 },
      consumerGroups: [],
      deadLetters: letters.map(toLetter),
    }
  }

  async #groupsOf({ partition, seq, grp }: DetailRow): Promise<GroupRow[]> {
    const { intake, schema } = this.#context
    const { rows } = await intake.read<GroupRow>(
      `SELECT g.name, coalesce($2 <= ${headSql(schema)} OR $2::bigint = ANY (c.done), false) AS settled,
         coalesce(l.id IS NOT NULL AND $2::bigint = ANY (c.open), false) AS leased, CASE WHEN $2::bigint = ANY (c.open) THEN l.until END AS until,
         coalesce((c.tries->>($2::text))::int, 0) AS tries
       FROM ${schema}.mq_partitions p JOIN ${schema}.mq_groups g ON g.queue = p.queue
         LEFT JOIN ${schema}.mq_cursors c ON c.partition = p.id AND c.grp = g.id LEFT JOIN ${schema}.mq_ready w ON w.partition = p.id AND w.grp = g.id
         LEFT JOIN ${schema}.mq_leases l ON l.id = c.lease AND l.until > ${schema}.clock()
       WHERE p.id = $1 AND ($3::int IS NULL OR g.id = $3) ORDER BY g.name LIMIT 1000`,
      [partition, seq, grp],
    )
    return rows
  }
}

const toLetter = (row: DeadRow): Details['deadLetters'][number] => ({
  id: row.id,
  consumerGroup: row.grp,
  errorMessage: row.error,
  retryCount: row.retry_count,
  skipped: !row.is_letter,
  movedToDlqAt: row.moved_at.toISOString(),
})
