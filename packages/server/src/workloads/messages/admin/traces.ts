/** Events that consumers attach to messages. */
import { AddTrace, ListTracesQuery, TraceEvent, TraceEvents } from '@spillway/protocol/schema'
import { limits, queueModeGroup } from '@spillway/protocol/wire'
import { CarriedJson, carry, cutRows, fitPage, jsonOf, leftOutSql, listedSql, pageSql } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import { invalid } from '../timestamps.js'
import { messageOf } from './message.js'
import { messageSql } from './message-state-sql.js'
import { pageOf } from './pages.js'
import { consumers, readers, route } from './route.js'

interface TraceRow {
  id: number
  grp: string | null
  event: string
  names: string[]
  /** Null: left out. */
  data: string | null
  data_bytes: number | null
  worker: string | null
  created_at: string
}

const tracesUrl = '/api/v1/traces/:partitionId/:transactionId'
const columns = 'id, grp, event, names, worker, created_at'
/** The size of the data, for lists. */
const size = 'octet_length(data)'
/** 18 digits: more may not fit into a bigint. */
const traceForm = /^\d{1,18}$/

export const traceRoutes = [
  route('POST', '/api/v1/traces', consumers, {
    summary: 'Attach an event to a message',
    body: AddTrace,
    answer: Type.Object({ success: Type.Boolean(), traceId: Type.String() }),
    status: 201,
    missing: 'message',
    async handle(admin, request) {
      const { intake, schema } = admin
      const { body, bodyText = '' } = request
      const { traceNames } = body
      if (body.data === null) throw invalid('data', 'is required')
      carry(body, bodyText, ['data'])
      const name = await messageOf(admin, request, body)
      if (name === null) return null
      const names = typeof traceNames === 'string' ? [traceNames] : (traceNames ?? [])
      const event = [body.consumerGroup ?? queueModeGroup, body.eventType ?? 'info', names, jsonOf(body.data ?? null)]
      const { rows } = await intake.statements.release<{ id: number }>(
        `INSERT INTO ${schema}.mq_traces (partition, transaction_id, grp, event, names, data, worker, created_at)
         SELECT $1::uuid, $2::text, $3::text, $4::text, $5::text[], $6::text, $7::text, ${schema}.clock()
         WHERE EXISTS (${messageSql(schema, 'm.seq', '$1::uuid', '$2::text')})
         RETURNING id`,
        [name.partition, name.transactionId, ...event, request.principal.identity],
      )
      return rows[0] === undefined ? null : { success: true, traceId: String(rows[0].id) }
    },
  }),
  route('GET', tracesUrl, readers, {
    summary: 'Events of a message, oldest first',
    query: ListTracesQuery,
    answer: TraceEvents,
    missing: 'message',
    async handle(admin, request) {
      const { read, schema, pageBytesMax } = admin
      const name = await messageOf(admin, request, request.params)
      if (name === null) return null
      const { limit } = pageOf(request.query, limits.listEntriesMax)
      const values = [name.partition, name.transactionId]
      // After the cursor, without long data.
      const found = await read<TraceRow & { cut: boolean }>(
        pageSql(
          `SELECT ${columns}, ${listedSql('data', size)} AS data, ${leftOutSql(size)} AS data_bytes,
             octet_length(array_to_string(names, '')) + coalesce(octet_length(${listedSql('data', size)}), 0) AS bytes
           FROM ${schema}.mq_traces WHERE partition = $1 AND transaction_id = $2 AND ($3::bigint IS NULL OR id > $3) ORDER BY id LIMIT $4`,
          'r.id',
          '$5',
        ),
        [...values, request.query.cursor, limit + 1, pageBytesMax],
      )
      if (found.length === 0) {
        const messages = await read(`${messageSql(schema, 'm.seq', '$1', '$2')} LIMIT 1`, values)
        if (messages.length === 0) return null
      }
      const { rows, isCut } = cutRows(found, toView)
      const { items, end } = fitPage(rows, { limit, bytesMax: pageBytesMax }, (event) => event, isCut)
      return { traces: items, next_cursor: end?.id ?? null }
    },
  }),
  route('GET', `${tracesUrl}/:traceId`, readers, {
    summary: 'One event of a message, in full',
    answer: TraceEvent,
    missing: 'event',
    async handle(admin, request) {
      const { traceId } = request.params
      const name = traceForm.test(traceId) ? await messageOf(admin, request, request.params) : null
      if (name === null) return null
      const [row] = await admin.read<TraceRow>(
        `SELECT ${columns}, data, NULL::int AS data_bytes FROM ${admin.schema}.mq_traces WHERE id = $3 AND partition = $1 AND transaction_id = $2`,
        [name.partition, name.transactionId, traceId],
      )
      return row === undefined ? null : toView(row)
    },
  }),
]

function toView(row: TraceRow): Static<typeof TraceEvent> {
  return {
    id: String(row.id),
    event_type: row.event,
    eventType: row.event,
    data: row.data === null ? null : new CarriedJson(row.data),
    consumer_group: row.grp,
    consumerGroup: row.grp,
    worker_id: row.worker,
    created_at: row.created_at,
    createdAt: row.created_at,
    trace_names: row.names,
    traceNames: row.names,
    ...(row.data_bytes !== null && { data_bytes: row.data_bytes, truncated: true }),
  }
}
