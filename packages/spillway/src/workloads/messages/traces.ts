/** Events that consumers attach to messages. */
import type { TraceEvent } from '@spillway/protocol/schema'
import type { Static } from 'typebox'
import { CarriedJson, jsonOf } from '../../http/carried-json.js'
import type { AdministrationContext } from './administration.js'
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
  data: string
  worker: string | null
  created_at: Date
}

const listMax = 1_000

export class Traces {
  readonly #context: AdministrationContext

  constructor(context: AdministrationContext) {
    this.#context = context
  }

  /** Its id; null: there is no such message. */
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

  /** Oldest first. */
  async list(partition: string, transactionId: string): Promise<TraceView[]> {
    const { intake, schema } = this.#context
    const { rows } = await intake.read<TraceRow>(
      `SELECT id, grp, event, names, data, worker, created_at FROM ${schema}.mq_traces
       WHERE partition = $1 AND transaction_id = $2 ORDER BY id LIMIT ${listMax}`,
      [partition, transactionId],
    )
    return rows.map(toView)
  }
}

function toView(row: TraceRow): TraceView {
  const createdAt = row.created_at.toISOString()
  return {
    id: String(row.id),
    event_type: row.event,
    eventType: row.event,
    data: new CarriedJson(row.data),
    consumer_group: row.grp,
    consumerGroup: row.grp,
    worker_id: row.worker,
    created_at: createdAt,
    createdAt,
    trace_names: row.names,
    traceNames: row.names,
  }
}
