/** Dead letters: reading, redriving and deleting them (docs/reference/http.md). */
import { DeadLetter, DeadLetterPage, ListOperationsQuery } from '@spillway/protocol/schema'
import Type, { type Static } from 'typebox'
import { processedMax, purgeAll, redriveAll, redriveIds } from '../intake/dead-letters.js'
import { deadLetterView } from './operation-view.js'
import { idOfCursor, pageById } from './pages.js'
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
import { seesAll } from './viewer.js'

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
    limit: Type.Optional(Type.Integer({ minimum: 1, maximum: processedMax })),
    cursor: ListOperationsQuery.properties.cursor,
  },
  { additionalProperties: false },
)
const PurgeQuery = Type.Object(
  {
    ...FilterMembers,
    limit: Type.Optional(Type.Integer({ minimum: 1, maximum: processedMax })),
    all: Type.Optional(Type.Boolean()),
  },
  { additionalProperties: false },
)

export const deadLetterRoutes: readonly TicketRoute[] = [
  {
    method: 'GET',
    path: '/api/v1/dead-letters',
    summary: 'Operations that used up their attempts, newest first',
    query: ListOperationsQuery,
    response: answers(DeadLetterPage),
    handle: listDeadLetters,
  },
  {
    method: 'GET',
    path: '/api/v1/dead-letters/:id',
    summary: 'A dead letter, whole',
    query: Nothing,
    response: answers(DeadLetter),
    handle: oneDeadLetter,
  },
  {
    method: 'POST',
    path: '/api/v1/dead-letters/redrive',
    role: 'operate',
    summary: 'Put dead letters back in their lanes, in order',
    query: Nothing,
    body: RedriveBody,
    handle: redrive,
  },
  {
    method: 'DELETE',
    path: '/api/v1/dead-letters',
    role: 'operate',
    summary: 'Delete dead letters for good',
    query: PurgeQuery,
    handle: purge,
  },
]

async function listDeadLetters(context: TicketContext, request: TicketRequest<ListQuery>): Promise<TicketAnswer> {
  const page = pageOf(request.query)
  if (page === null) return badCursor
  const { status: _, ...query } = request.query
  const filter = filterOf(context, request.caller, query)
  const letters = await context.intake.store.deadLetters(filter, page.limit + 1, page.before)
  return json(pageById(letters, { ...page, bytesMax: context.pageBytesMax }, (letter) => deadLetterView(letter)))
}

async function oneDeadLetter({ intake, access }: TicketContext, request: TicketRequest): Promise<TicketAnswer> {
  const { id, caller } = request
  const letter = (await access.visible(caller, id)) === null ? null : await intake.store.deadLetter(id)
  return letter === null ? notFound : json(deadLetterView(letter, seesAll(caller)))
}

async function redrive(
  context: TicketContext,
  { body, caller }: TicketRequest<unknown, Static<typeof RedriveBody>>,
): Promise<TicketAnswer> {
  if (!caller.operates) return needsOperate
  const { ids, filter, limit, cursor, ...loose } = body
  if (ids !== undefined && (filter !== undefined || Object.keys(loose).length > 0)) {
    return refuse({
      code: 'invalid_request',
      detail: 'Say which: ids, or a filter, not both.',
      errors: [{ path: '/ids', message: 'cannot be combined with a filter' }],
    })
  }
  if (ids !== undefined) {
    const narrow = context.access.narrow(caller, {})
    return json(await redriveIds(context.intake, ids, narrow.bound && narrow))
  }
  if (filter === undefined && Object.keys(loose).length === 0) {
    return refuse({
      code: 'invalid_request',
      detail: 'Say which: ids, or a filter (an empty one means all).',
      errors: [{ path: '/ids', message: 'ids or filter is required' }],
    })
  }
  const from = cursor === undefined ? null : idOfCursor(cursor)
  if (cursor !== undefined && from === null) return badCursor
  const which = filterOf(context, caller, { ...loose, ...filter })
  const { nextCursor, ...counts } = await redriveAll(context.intake, which, limit ?? processedMax, from)
  return json({ ...counts, next_cursor: nextCursor })
}

async function purge(
  context: TicketContext,
  { query: asked, caller }: TicketRequest<Static<typeof PurgeQuery>>,
): Promise<TicketAnswer> {
  if (!caller.operates) return needsOperate
  const { limit, all, ...query } = asked
  if (all !== true && limit === undefined && Object.keys(query).length === 0) {
    return refuse({
      code: 'invalid_request',
      detail: 'Say which: a filter, or all=true.',
      errors: [{ path: '/all', message: 'a filter or all=true is required' }],
    })
  }
  const filter = filterOf(context, caller, query)
  return json({ purged: await purgeAll(context.intake, filter, limit ?? processedMax) })
}
