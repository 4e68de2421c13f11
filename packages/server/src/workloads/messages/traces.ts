/** Events that consumers attach to messages. */
import type { TraceEvent } from '@spillway/protocol/schema'
import type { PageBounds } from 'spillway/workload'
import { CarriedJson, type CutRows, cutRows, jsonOf, leftOutSql, listedSql, pageSql } from 'spillway/workload'
import type { Static } from 'typebox'
import type { AdministrationContext } from './administration.js'
import type { MessageName } from './message-log.js'
import { messageSql } from './message-state.js'

export interface NewTrace {
  partition: string
  transactionId: string
  group: string
  event: string
  names: readonly string[]
  data: unknown
  worker: string | null
}

type TraceView = Static<typeof TraceEvent>

interface TraceRow extends Record<string, unknown> {
  id: number
  grp: string | null
  event: string
  names: string[]
  /** Null: left out. */
  data: string | null
  data_bytes: number | null
  worker: string | null
  created_at: Date
}

const columns = 'id, grp, event, names, worker, created_at'
/** The size of the data, for lists. */
const size = 'octet_length(data)'

export class Traces {
  readonly #context: AdministrationContext

  constructor(context: AdministrationContext) {
    this.#context = context
  }

  /** Returns its id; null: there is no such message. */
  async add({ partition, transactionId, group, event, names, data, worker }: NewTrace): Promise<string | null> {
    const { intake, schema } = this.#context
    const { rows } = await intake.statements.release<{ id: number }>(
      `INSERT INTO ${schema}.mq_traces (partition, transaction_id, grp, event, names, data, worker, created_at)
       SELECT $1::uuid, $2::text, $3::text, $4::text, $5::text[], $6::text, $7::text, ${schema}.clock()
       WHERE EXISTS (${messageSql(schema, 'm.seq', '$1::uuid', '$2::text')})
       RETURNING id`,
      [partition, transactionId, group, event, names, jsonOf(data ?? null), worker],
    )
    const [row] = rows
    return row === undefined ? null : String(row.id)
  }

  /** Oldest first, after `after`, without long data, until they have more than `bytesMax` bytes; at least one. */
  async list(
    { partition, transactionId }: MessageName,
    { limit, bytesMax }: PageBounds,
    after: string | null,
  ): Promise<CutRows<TraceView>> {
    const { intake, schema } = this.#context
    const { rows } = await intake.read<TraceRow & { cut: boolean }>(
      pageSql(
        `SELECT ${columns}, ${listedSql('data', size)} AS data, ${leftOutSql(size)} AS data_bytes,
           octet_length(array_to_string(names, '')) + coalesce(octet_length(${listedSql('data', size)}), 0) AS bytes
         FROM ${schema}.mq_traces WHERE partition = $1 AND transaction_id = $2 AND ($3::bigint IS NULL OR id > $3) ORDER BY id LIMIT $4`,
        'r.id',
        '$5',
      ),
      [partition, transactionId, after, limit, bytesMax],
    )
    return cutRows(rows, toView)
  }

  /** A single one, in full. */
  async get({ partition, transactionId }: MessageName, id: string): Promise<TraceView | null> {
    const { intake, schema } = this.#context
    const { rows } = await intake.read<TraceRow>(
      `SELECT ${columns}, data, NULL::int AS data_bytes FROM ${schema}.mq_traces WHERE id = $3 AND partition = $1 AND transaction_id = $2`,
      [partition, transactionId, id],
    )
    return rows[0] === undefined ? null : toView(rows[0])
  }
}

function toView(row: TraceRow): TraceView {
  const createdAt = row.created_at.toISOString()
  return {
    id: String(row.id),
    event_type: row.event,
    eventType: row.event,
    data: row.data === null ? null : new CarriedJson(row.data),
    consumer_group: row.grp,
    consumerGroup: row.grp,
    worker_id: row.worker,
    created_at: createdAt,
    createdAt,
    trace_names: row.names,
    traceNames: row.names,
    ...(row.data_bytes !== null && { data_bytes: row.data_bytes, truncated: true }),
  }
}
