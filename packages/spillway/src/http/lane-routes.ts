/** Pausing and resuming lanes (docs/reference/http.md). */
import { LaneBody, LaneState } from '@spillway/protocol/schema'
import type { Static } from 'typebox'
import { mayUseQueue } from './queue-names.js'
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

const scopes = {
  pause: 'Without a partition the whole queue, those of its lanes included that are yet to come.',
  resume:
    'Without a partition the whole queue, and each partition of it that was paused alone. With one, that pause only: while the whole queue is paused the lane stays so, and the answer says it.',
}

export const laneRoutes: readonly TicketRoute[] = (['pause', 'resume'] as const).map((action) => ({
  method: 'POST',
  path: `/api/v1/lanes/${action}`,
  role: 'operate',
  summary: `${action} a lane, or all lanes of a queue`,
  description: scopes[action],
  query: Nothing,
  body: LaneBody,
  response: answers(LaneState),
  handle: (context: TicketContext, request: LaneRequest) => changeLane(action, context, request),
}))

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
  await intake.store[action](queue, partition ?? null)
  if (action === 'resume') intake.wakeAll()
  const by = await intake.store.pausedBy(queue, partition ?? null)
  return json({ queue, partition: partition ?? null, paused: by !== null, paused_by: by })
}
