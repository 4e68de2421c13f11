/** Tickets: reading, waiting for, cancelling and redriving operations (contract §2), as a Fastify plugin. */
import {
  DeadLetter,
  DeadLetterPage,
  LaneBody,
  LaneState,
  ListOperationsQuery,
  Operation,
  OperationPage,
  OperationStats,
  Problem,
  WaitQuery,
} from '@spillway/protocol/schema'
import { limits } from '@spillway/protocol/wire'
import type { FastifyInstance, FastifyReply, FastifyRequest } from 'fastify'
import Type, { type Static, type TSchema } from 'typebox'
import { isUuid } from '../core/operation-id.js'
import type { Intake } from '../intake/intake.js'
import type { Ticket, TicketFilter } from '../store/port.js'
import { jsonOf } from './carried-json.js'
import { goneSignal } from './connections.js'
import { ProblemError } from './faults.js'
import { followOperation, type OutputOf } from './operation-stream.js'
import { deadLetterView, operationView } from './operation-view.js'
import { cursorOf, pageById, placeOf } from './pages.js'
import { sendProblem } from './problem.js'
import { mayUseQueue } from './queue-names.js'
import { refuseUntilReady } from './readiness.js'
import './typebox.js'
import { compileValidator } from './validation.js'
import { defaultViewer, ticketAccess, type Viewer } from './viewer.js'

/** Any Fastify application, with any type provider and logger. */
export type FastifyLike = Pick<
  FastifyInstance,
  'addHook' | 'setSerializerCompiler' | 'get' | 'post' | 'delete' | 'route'
>

export interface TicketRoutesOptions {
  /** Who asks. Default: our server's principal, or `request.user.id`, or the client's address. */
  viewer?: (request: FastifyRequest) => Viewer
  /** For operations with an output stream. */
  outputOf?: OutputOf
  /** A page of a list ends at this size. Default 4 MiB. */
  pageBytesMax?: number
  /** Types whose queue the caller names: a key bound to queues is limited to its queues for these. Default: none. */
  namedTypes?: readonly string[]
}

type ListQuery = Static<typeof ListOperationsQuery>

const redriveBatch = 500
const redriveMax = 100_000
const listLimitDefault = 50

const FilterMembers = {
  type: ListOperationsQuery.properties.type,
  queue: ListOperationsQuery.properties.queue,
  partition: ListOperationsQuery.properties.partition,
  identity: ListOperationsQuery.properties.identity,
  from: ListOperationsQuery.properties.from,
  to: ListOperationsQuery.properties.to,
}
const RedriveBody = Type.Object(
  {
    ids: Type.Optional(Type.Array(Type.String({ minLength: 1, maxLength: 64 }), { maxItems: 1_000 })),
    filter: Type.Optional(Type.Object(FilterMembers, { additionalProperties: false })),
    ...FilterMembers,
    limit: Type.Optional(Type.Integer({ minimum: 1, maximum: redriveMax })),
    cursor: ListOperationsQuery.properties.cursor,
  },
  { additionalProperties: false },
)
const PurgeQuery = Type.Object(
  {
    ...FilterMembers,
    limit: Type.Optional(Type.Integer({ minimum: 1, maximum: redriveMax })),
    all: Type.Optional(Type.Boolean()),
  },
  { additionalProperties: false },
)
/** A route's answers, for the API description; the answer sent is not cut to it. */
const answers = (schema: TSchema): Record<string, TSchema> => ({ 200: schema, '4xx': Problem, '5xx': Problem })
const Id = Type.Object({ id: Type.String() })
/** For a query or a body without members. */
const Nothing = Type.Object({}, { additionalProperties: false })
const nothingFaults = compileValidator(Nothing)
const tags = ['operations']

/** The routes under `/api/v1/operations`, `/api/v1/dead-letters` and `/api/v1/lanes`. */
export function ticketRoutes(intake: Intake, options: TicketRoutesOptions = {}): (app: FastifyLike) => Promise<void> {
  const bytesMax = options.pageBytesMax ?? limits.pageBytes
  const { store } = intake
  const access = ticketAccess(store, options.viewer ?? defaultViewer, options.namedTypes ?? [])
  const { viewerOf, visible } = access
  const notFound = (reply: FastifyReply): FastifyReply =>
    sendProblem(reply, { code: 'not_found', detail: 'There is no such operation.' })

  const ownFilter = (request: FastifyRequest, query: Omit<ListQuery, 'limit' | 'cursor'>): TicketFilter => {
    const filter: TicketFilter = {}
    for (const name of ['status', 'type', 'queue', 'partition', 'identity'] as const) {
      const value = query[name]
      if (value !== undefined) Object.assign(filter, { [name]: value })
    }
    if (query.from !== undefined) filter.from = instant('from', query.from)
    if (query.to !== undefined) filter.to = instant('to', query.to)
    return access.narrow(viewerOf(request), filter)
  }
  const operating = (request: FastifyRequest, reply: FastifyReply): boolean => {
    if (viewerOf(request).operates) return true
    sendProblem(reply, { code: 'forbidden', detail: 'This needs the role operate.' })
    return false
  }

  return async (app) => {
    app.setSerializerCompiler(() => jsonOf)
    refuseUntilReady(app, intake)

    app.get<{ Querystring: ListQuery }>(
      '/api/v1/operations',
      {
        schema: {
          tags,
          summary: 'List operations, newest first',
          querystring: ListOperationsQuery,
          response: answers(OperationPage),
        },
      },
      async (request, reply) => {
        const page = pageOf(request.query)
        if (page === null) return badCursor(reply)
        const { identity } = request.query
        const viewer = viewerOf(request)
        const seesAll = viewer.operates || viewer.views === true
        if (identity !== undefined && !seesAll && identity !== viewer.identity) return { items: [], next_cursor: null }
        const tickets = await store.tickets(ownFilter(request, request.query), page.limit + 1, page.before)
        return pageById(tickets, { ...page, bytesMax }, operationView)
      },
    )

    app.get(
      '/api/v1/operations/stats',
      {
        schema: {
          tags,
          summary: 'What is unfinished, and what finished in the last 5 minutes',
          querystring: Nothing,
          response: answers(OperationStats),
        },
      },
      async (request) => {
        const rows = await store.stats(access.narrow(viewerOf(request), {}).bound)
        const pool = store.poolState()
        return {
          stats: rows.map((row) => ({
            operation_type: row.type,
            priority: row.priority,
            status: row.status,
            count: row.count,
            oldest: row.oldest.toISOString(),
            newest: row.newest.toISOString(),
            avg_latency_seconds: row.averageLatencySeconds,
          })),
          systemHealth: {
            poolUtilization: Math.round(intake.busy * 1_000) / 1_000,
            poolWaiting: pool.waiting,
            queueDepth: rows
              .filter((r) => r.status === 'pending' || r.status === 'processing')
              .reduce((n, r) => n + r.count, 0),
            oldestAgeSeconds: rows
              .filter((r) => r.status === 'pending' || r.status === 'processing')
              .reduce((age, r) => Math.max(age, (Date.now() - r.oldest.getTime()) / 1_000), 0),
          },
        }
      },
    )

    app.get<{ Params: Static<typeof Id>; Querystring: Static<typeof WaitQuery> }>(
      '/api/v1/operations/:id',
      {
        schema: {
          tags,
          summary: 'One operation; ?wait=N waits for it to finish',
          querystring: WaitQuery,
          response: answers(Operation),
        },
        serializerCompiler: () => JSON.stringify,
      },
      async (request, reply) => {
        const { id } = request.params
        const ticket = await visible(request, id)
        if (ticket === null) return notFound(reply)
        const waitMs = (request.query.wait ?? 0) * 1_000
        if (waitMs === 0 || isFinished(ticket)) return operationView(ticket)
        const finished = await intake.waiters.wait(id, waitMs, goneSignal(reply.raw, 'wait'))
        return operationView(finished ?? (await store.ticket(id)) ?? ticket)
      },
    )

    app.get<{ Params: Static<typeof Id> }>(
      '/api/v1/operations/:id/stream',
      {
        // A HEAD would hold a stream open that nobody reads.
        exposeHeadRoute: false,
        schema: {
          tags,
          summary: 'Server-sent events: what becomes of an operation',
          querystring: Nothing,
          description: 'A `status` per change, and output. Goes on behind `Last-Event-ID`; 204 after the last event.',
        },
      },
      async (request, reply) => {
        const ticket = await visible(request, request.params.id)
        if (ticket === null) return notFound(reply)
        return followOperation(intake, ticket, request, reply, options.outputOf)
      },
    )

    app.post<{ Params: Static<typeof Id> }>(
      '/api/v1/operations/:id/cancel',
      {
        config: { role: 'submit' },
        schema: { tags, summary: 'Cancel a pending operation', querystring: Nothing, response: answers(Operation) },
      },
      async (request, reply) => {
        if (!saysNothing(request, reply)) return reply
        const { id } = request.params
        const ticket = await visible(request, id)
        if (ticket === null) return notFound(reply)
        if (ticket.identity !== viewerOf(request).identity && !operating(request, reply)) return reply
        const outcome = await intake.cancel(id, 'cancelled by request')
        switch (outcome) {
          case 'cancelled':
            return operationView((await store.ticket(id)) ?? ticket)
          case 'asked': {
            const finished = await intake.waiters.wait(id, 2_000)
            if (finished === null) reply.code(202)
            return operationView(finished ?? ticket)
          }
          case 'running':
            return sendProblem(reply, {
              code: 'operation_running',
              detail: 'The operation is running, and its handler cannot be stopped.',
            })
          case 'gone':
            return sendProblem(reply, { code: 'operation_finished', detail: 'The operation is finished already.' })
        }
      },
    )

    app.post<{ Params: Static<typeof Id> }>(
      '/api/v1/operations/:id/retry',
      {
        // Callers who may only submit are checked below: another's operation looks like an unknown one.
        config: { role: 'submit' },
        schema: {
          tags,
          summary: 'Put a failed operation back in its lane; needs the role operate',
          querystring: Nothing,
          response: answers(Operation),
        },
      },
      async (request, reply) => {
        if (!saysNothing(request, reply)) return reply
        const { id } = request.params
        const ticket = await visible(request, id)
        if (ticket === null) return notFound(reply)
        if (!operating(request, reply)) return reply
        if (ticket.status !== 'failed') {
          return sendProblem(reply, { code: 'operation_not_failed', detail: `The operation is ${ticket.status}.` })
        }
        const { moved } = await store.redrive([id])
        if (moved === 0) {
          // Another request was faster, or its capacity gate is full.
          const now = await store.ticket(id)
          if (now?.status !== 'failed') {
            return sendProblem(reply, {
              code: 'operation_not_failed',
              detail: `The operation is ${now?.status ?? 'gone'}.`,
            })
          }
          return sendProblem(reply, {
            code: 'capacity_exceeded',
            detail: 'There is no place for it now. Try again later.',
            retryAfterMs: 5_000,
          })
        }
        intake.wakeAll()
        return operationView((await store.ticket(id)) ?? ticket)
      },
    )

    app.get<{ Querystring: ListQuery }>(
      '/api/v1/dead-letters',
      {
        schema: {
          tags,
          summary: 'Operations that used up their attempts, newest first',
          querystring: ListOperationsQuery,
          response: answers(DeadLetterPage),
        },
      },
      async (request, reply) => {
        const page = pageOf(request.query)
        if (page === null) return badCursor(reply)
        const { status: _, ...query } = request.query
        const letters = await store.deadLetters(ownFilter(request, query), page.limit + 1, page.before)
        return pageById(letters, { ...page, bytesMax }, deadLetterView)
      },
    )

    app.get<{ Params: Static<typeof Id> }>(
      '/api/v1/dead-letters/:id',
      { schema: { tags, summary: 'A dead letter, whole', querystring: Nothing, response: answers(DeadLetter) } },
      async (request, reply) => {
        const { id } = request.params
        const letter = (await visible(request, id)) === null ? null : await store.deadLetter(id)
        return letter === null ? notFound(reply) : deadLetterView(letter)
      },
    )

    app.post<{ Body: Static<typeof RedriveBody> }>(
      '/api/v1/dead-letters/redrive',
      {
        config: { role: 'operate' },
        schema: {
          tags,
          summary: 'Put dead letters back in their lanes, in order',
          querystring: Nothing,
          body: RedriveBody,
        },
      },
      async (request, reply) => {
        if (!operating(request, reply)) return reply
        const { ids, filter, limit, cursor, ...loose } = request.body
        if (ids !== undefined && (filter !== undefined || Object.keys(loose).length > 0)) {
          return sendProblem(reply, {
            code: 'invalid_request',
            detail: 'Say which: ids, or a filter, not both.',
            errors: [{ path: '/ids', message: 'cannot be combined with a filter' }],
          })
        }
        if (ids !== undefined) {
          const known = ids.filter(isUuid)
          const { bound } = access.narrow(viewerOf(request), {})
          // A dead letter never changes its queue, so the ids found here stay within the caller's queues.
          const own = bound ? await store.deadLetterIds({ ids: known, bound }, known.length, null) : known
          const { moved } = await store.redrive(own)
          if (moved > 0) intake.wakeAll()
          return { moved, skipped: ids.length - moved }
        }
        if (filter === undefined && Object.keys(loose).length === 0) {
          return sendProblem(reply, {
            code: 'invalid_request',
            detail: 'Say which: ids, or a filter (an empty one means all).',
            errors: [{ path: '/ids', message: 'ids or filter is required' }],
          })
        }
        const from = cursor === undefined ? null : idOfCursor(cursor)
        if (cursor !== undefined && from === null) return badCursor(reply)
        return redriveAll(intake, ownFilter(request, { ...loose, ...filter }), limit ?? redriveMax, from)
      },
    )

    app.delete<{ Querystring: Static<typeof PurgeQuery> }>(
      '/api/v1/dead-letters',
      {
        config: { role: 'operate' },
        schema: { tags, summary: 'Delete dead letters for good', querystring: PurgeQuery },
      },
      async (request, reply) => {
        if (!operating(request, reply)) return reply
        const { limit, all, ...query } = request.query
        if (all !== true && limit === undefined && Object.keys(query).length === 0) {
          return sendProblem(reply, {
            code: 'invalid_request',
            detail: 'Say which: a filter, or all=true.',
            errors: [{ path: '/all', message: 'a filter or all=true is required' }],
          })
        }
        let purged = 0
        const most = limit ?? redriveMax
        while (purged < most) {
          const ids = await store.deadLetterIds(ownFilter(request, query), Math.min(redriveBatch, most - purged), null)
          if (ids.length === 0) break
          purged += await store.purge(ids)
        }
        return { purged }
      },
    )

    const scopes = {
      pause: 'Without a partition the whole queue, those of its lanes included that are yet to come.',
      resume:
        'Without a partition the whole queue, and each partition of it that was paused alone. With one, that pause only: while the whole queue is paused the lane stays so, and the answer says it.',
    }
    for (const action of ['pause', 'resume'] as const) {
      app.post<{ Body: Static<typeof LaneBody> }>(
        `/api/v1/lanes/${action}`,
        {
          config: { role: 'operate' },
          schema: {
            tags,
            summary: `${action} a lane, or all lanes of a queue`,
            description: scopes[action],
            querystring: Nothing,
            body: LaneBody,
            response: answers(LaneState),
          },
        },
        async (request, reply) => {
          if (!operating(request, reply)) return reply
          const { queue, partition } = request.body
          if (!mayUseQueue(viewerOf(request).queues, queue)) {
            return sendProblem(reply, {
              code: 'forbidden',
              detail: `You may not use the queue ${JSON.stringify(queue)}.`,
            })
          }
          await store[action](queue, partition ?? null)
          if (action === 'resume') intake.wakeAll()
          const by = await store.pausedBy(queue, partition ?? null)
          return { queue, partition: partition ?? null, paused: by !== null, paused_by: by }
        },
      )
    }
  }
}

/** For a route without a body: none, or an empty object. A schema would require one. */
function saysNothing(request: FastifyRequest, reply: FastifyReply): boolean {
  const checked = request.body === undefined ? null : nothingFaults(request.body)
  if (checked === null || checked.ok) return true
  sendProblem(reply, { code: 'invalid_request', detail: 'The body is not valid.', errors: checked.errors })
  return false
}

/**
 * Processes them once, oldest first: one that dies again at once keeps its id and would otherwise be found first, and
 * redriven, again and again.
 */
async function redriveAll(
  intake: Intake,
  filter: TicketFilter,
  limit: number,
  from: string | null,
): Promise<{ moved: number; skipped: number; next_cursor: string | null }> {
  let moved = 0
  let skipped = 0
  let after = from
  while (moved + skipped < limit) {
    const most = Math.min(redriveBatch, limit - moved - skipped)
    const ids = await intake.store.deadLetterIds(filter, most, after)
    if (ids.length > 0) {
      const batch = await intake.store.redrive(ids)
      moved += batch.moved
      skipped += ids.length - batch.moved
      if (batch.moved > 0) intake.wakeAll()
    }
    if (ids.length < most) return { moved, skipped, next_cursor: null }
    after = ids[ids.length - 1] ?? null
  }
  return { moved, skipped, next_cursor: after === null ? null : cursorOf(after) }
}

/** A leap second has the form of a timestamp, but a Date cannot express it. */
function instant(name: string, text: string): Date {
  const date = new Date(text)
  if (!Number.isNaN(date.getTime())) return date
  const errors = [{ path: `/${name}`, message: 'is not a point in time' }]
  throw new ProblemError({ code: 'invalid_request', detail: 'The query is not valid.', errors })
}

const isFinished = (ticket: Ticket): boolean => ticket.finishedAt !== null

function pageOf(query: ListQuery): { limit: number; before: string | null } | null {
  const limit = Math.min(query.limit ?? listLimitDefault, limits.listItemsMax)
  if (query.cursor === undefined) return { limit, before: null }
  const before = idOfCursor(query.cursor)
  return before === null ? null : { limit, before }
}

function idOfCursor(cursor: string): string | null {
  const id = placeOf(cursor)
  return isUuid(id) ? id : null
}

function badCursor(reply: FastifyReply): FastifyReply {
  return sendProblem(reply, {
    code: 'invalid_request',
    detail: 'The cursor is not one of ours.',
    errors: [{ path: '/cursor', message: 'take next_cursor of the previous page' }],
  })
}
