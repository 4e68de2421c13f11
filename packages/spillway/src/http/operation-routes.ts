/** Reading, waiting for, cancelling and retrying operations (docs/reference/http.md). */
import { ListOperationsQuery, Operation, OperationPage, OperationStats, WaitQuery } from '@spillway/protocol/schema'
import type { Static } from 'typebox'
import { cancelTicket, finishedWithin, retryTicket } from '../intake/tickets.js'
import type { StatRow } from '../store/port.js'
import { followOperation } from './operation-stream.js'
import { operationView } from './operation-view.js'
import { pageById } from './pages.js'
import { badCursor, filterOf, type ListQuery, pageOf } from './ticket-lists.js'
import {
  answers,
  json,
  Nothing,
  needsOperate,
  notFound,
  refuse,
  type TicketAnswer,
  type TicketContext,
  type TicketRequest,
  type TicketRoute,
} from './ticket-table.js'
import { compileValidator } from './validation.js'
import { owns, seesAll } from './viewer.js'

export const operationRoutes: readonly TicketRoute[] = [
  {
    method: 'GET',
    path: '/api/v1/operations',
    summary: 'List operations, newest first',
    query: ListOperationsQuery,
    response: answers(OperationPage),
    handle: listOperations,
  },
  {
    method: 'GET',
    path: '/api/v1/operations/stats',
    summary: 'What is unfinished, and what finished in the last 5 minutes',
    query: Nothing,
    response: answers(OperationStats),
    handle: operationStats,
  },
  {
    method: 'GET',
    path: '/api/v1/operations/:id',
    summary: 'One operation; ?wait=N waits for it to finish',
    query: WaitQuery,
    response: answers(Operation),
    handle: oneOperation,
  },
  {
    method: 'GET',
    path: '/api/v1/operations/:id/stream',
    summary: 'Server-sent events: what becomes of an operation',
    description: 'A `status` per change, and output. Goes on behind `Last-Event-ID`; 204 after the last event.',
    query: Nothing,
    streams: true,
    handle: streamOperation,
  },
  {
    method: 'POST',
    path: '/api/v1/operations/:id/cancel',
    role: 'submit',
    summary: 'Cancel a pending operation',
    query: Nothing,
    response: answers(Operation),
    handle: cancelOperation,
  },
  {
    method: 'POST',
    path: '/api/v1/operations/:id/retry',
    // Callers who may only submit are checked by the handler: another's operation looks like an unknown one.
    role: 'submit',
    summary: 'Put a failed operation back in its lane; needs the role operate',
    query: Nothing,
    response: answers(Operation),
    handle: retryOperation,
  },
]

async function listOperations(context: TicketContext, request: TicketRequest<ListQuery>): Promise<TicketAnswer> {
  const { query, caller } = request
  const page = pageOf(query)
  if (page === null) return badCursor
  const tickets = await context.intake.store.tickets(filterOf(context, caller, query), page.limit + 1, page.before)
  return json(pageById(tickets, { ...page, bytesMax: context.pageBytesMax }, (ticket) => operationView(ticket)))
}

async function operationStats({ intake, access }: TicketContext, { caller }: TicketRequest): Promise<TicketAnswer> {
  const rows = await intake.store.stats(access.narrow(caller, {}).bound)
  const unfinished = rows.filter(({ status }) => status === 'pending' || status === 'processing')
  return json({
    stats: rows.map(statView),
    systemHealth: {
      poolUtilization: Math.round(intake.pipeline.busy * 1_000) / 1_000,
      poolWaiting: intake.store.poolState().waiting,
      queueDepth: unfinished.reduce((n, { count }) => n + count, 0),
      oldestAgeSeconds: unfinished.reduce((age, r) => Math.max(age, (Date.now() - r.oldest.getTime()) / 1_000), 0),
    },
  })
}

const statView = (row: StatRow) => ({
  operation_type: row.type,
  priority: row.priority,
  status: row.status,
  count: row.count,
  oldest: row.oldest.toISOString(),
  newest: row.newest.toISOString(),
  avg_latency_seconds: row.averageLatencySeconds,
})

async function oneOperation(
  { intake, access }: TicketContext,
  { id, caller, query, gone }: TicketRequest<Static<typeof WaitQuery>>,
): Promise<TicketAnswer> {
  const ticket = await access.visible(caller, id)
  if (ticket === null) return notFound
  const finished = await finishedWithin(intake, ticket, (query.wait ?? 0) * 1_000, gone())
  return json(operationView(finished, seesAll(caller)))
}

async function streamOperation(context: TicketContext, request: TicketRequest): Promise<TicketAnswer> {
  const ticket = await context.access.visible(request.caller, request.id)
  if (ticket === null) return notFound
  return followOperation(context, ticket, request.lastEventId)
}

async function cancelOperation({ intake, access }: TicketContext, request: TicketRequest): Promise<TicketAnswer> {
  const { id, caller } = request
  const fault = bodyFault(request)
  if (fault !== null) return fault
  const ticket = await access.visible(caller, id)
  if (ticket === null) return notFound
  if (!caller.operates && !owns(caller, ticket)) return needsOperate
  const { outcome, ticket: now } = await cancelTicket(intake, ticket, 'cancelled by request')
  switch (outcome) {
    case 'cancelled':
      return json(operationView(now))
    case 'asked':
      return json(operationView(now), now.finishedAt === null ? 202 : 200)
    case 'running':
      return refuse({
        code: 'operation_running',
        detail: 'The operation is running, and its handler cannot be stopped.',
      })
    case 'finished':
      return refuse({ code: 'operation_finished', detail: 'The operation is finished already.' })
  }
}

async function retryOperation({ intake, access }: TicketContext, request: TicketRequest): Promise<TicketAnswer> {
  const { id, caller } = request
  const fault = bodyFault(request)
  if (fault !== null) return fault
  const ticket = await access.visible(caller, id)
  if (ticket === null) return notFound
  if (!caller.operates) return needsOperate
  const { outcome, ticket: now } = await retryTicket(intake, ticket)
  if (now === null) return notFound
  if (outcome === 'retried') return json(operationView(now))
  if (outcome === 'capacity_full') {
    return refuse({
      code: 'capacity_exceeded',
      detail: 'The capacity limit is reached. Try again later.',
      retryAfterMs: 5_000,
    })
  }
  const detail =
    outcome === 'answered'
      ? 'There is no dead letter to retry: its caller was answered with the failure, or it expired.'
      : `The operation is ${now.status}.`
  return refuse({ code: 'operation_not_failed', detail })
}

const nothingFaults = compileValidator(Nothing)

/** For a route without a body: none, or an empty object. A schema would require one. */
function bodyFault({ body }: TicketRequest): TicketAnswer | null {
  const checked = body === undefined ? null : nothingFaults(body)
  if (checked === null || checked.ok) return null
  return refuse({ code: 'invalid_request', detail: 'The body is not valid.', errors: checked.errors })
}
