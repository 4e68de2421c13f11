/** Listing, pausing and resuming lanes (docs/reference/http.md). */
import { LaneBody, LanePage, LaneState, ListLanesQuery } from '@spillway/protocol/schema'
import type { LaneView } from '@spillway/protocol/wire'
import type { Static } from 'typebox'
import { type LaneReport, lanePage, pauseState, resumeLanes } from '../intake/lanes.js'
import { cursorOf, fitPage } from './pages.js'
import { mayUseQueue } from './queue-names.js'
import { badCursor, pageOf } from './ticket-lists.js'
import {
  answers,
  json,
  Nothing,
  needsOperate,
  refuse,
  type TicketAnswer,
  type TicketContext,
  type TicketRequest,
  type TicketRoute,
} from './ticket-table.js'
import { seesAll } from './viewer.js'

const scopes = {
  pause: 'Without a partition the whole queue, those of its lanes included that are yet to come.',
  resume:
    'Without a partition the whole queue, and each partition of it that was paused alone. With one, that pause only: while the whole queue is paused the lane stays so, and the answer says it.',
}

const list: TicketRoute<Static<typeof ListLanesQuery>> = {
  method: 'GET',
  path: '/api/v1/lanes',
  role: 'view',
  summary: 'Lanes that hold operations, and why they wait',
  description:
    'In an order that does not change, not by name. Parallel operations are in no lane: with their type as `queue`, each is listed as a lane of one. Among very many lanes of other queues a page may be short: `next_cursor` is null on the last one.',
  query: ListLanesQuery,
  response: answers(LanePage),
  handle: listLanes,
}

const changes = (['pause', 'resume'] as const).map((action) => ({
  method: 'POST' as const,
  path: `/api/v1/lanes/${action}`,
  role: 'operate' as const,
  summary: `${action} a lane, or all lanes of a queue`,
  description: scopes[action],
  query: Nothing,
  body: LaneBody,
  response: answers(LaneState),
  handle: (context: TicketContext, request: LaneRequest) => changeLane(action, context, request),
}))

export const laneRoutes = [list, ...changes] as readonly TicketRoute[]

async function listLanes(
  { intake, pageBytesMax: bytesMax }: TicketContext,
  { query, caller }: TicketRequest<Static<typeof ListLanesQuery>>,
): Promise<TicketAnswer> {
  if (!seesAll(caller)) return refuse({ code: 'forbidden', detail: 'This needs the role operate or view.' })
  const page = pageOf(query)
  if (page === null) return badCursor
  const { limit, before: after } = page
  const filter = { queue: query.queue ?? null, queues: caller.queues ?? null }
  const { items, nextCursor } = await lanePage(intake, filter, { limit, after })
  const { items: views, end } = fitPage(items, { limit, bytesMax }, ({ report }) => laneView(report))
  return json({ items: views, next_cursor: end === null ? nextCursor : cursorOf(end.id) })
}

function laneView({ oldestAgeSeconds, pausedBy, head, waitingBecause, ...lane }: LaneReport): LaneView {
  return {
    ...lane,
    oldest_age_seconds: oldestAgeSeconds,
    paused_by: pausedBy,
    head: {
      ...{ id: head.id, operation_type: head.type, status: head.status, attempt: head.attempt },
      max_attempts: head.maxAttempts,
      next_attempt_at: head.nextAttemptAt?.toISOString() ?? null,
    },
    waiting_because: waitingBecause,
  }
}

type LaneRequest = TicketRequest<unknown, Static<typeof LaneBody>>

async function changeLane(
  action: 'pause' | 'resume',
  { intake }: TicketContext,
  { body, caller }: LaneRequest,
): Promise<TicketAnswer> {
  if (!caller.operates) return needsOperate
  const { queue, partition } = body
  if (!mayUseQueue(caller.queues, queue)) {
    return refuse({ code: 'forbidden', detail: `You may not use the queue ${JSON.stringify(queue)}.` })
  }
  const lane = [queue, partition ?? null] as const
  if (action === 'pause') await intake.store.pause(...lane)
  const { paused, pausedBy } = await (action === 'pause' ? pauseState : resumeLanes)(intake, ...lane)
  return json({ queue, partition: partition ?? null, paused, paused_by: pausedBy })
}
