/** Single messages, dead letters and traces. */
import {
  AddTrace,
  DeadMessagePage,
  ListDeadMessagesQuery,
  ListMessagesQuery,
  ListTracesQuery,
  LoggedMessagePage,
  MessageDetails,
  PurgeDeadMessagesQuery,
  Purged,
  ReplayedMessage,
  TraceEvent,
  TraceEvents,
} from '@spillway/protocol/schema'
import { limits, queueModeGroup } from '@spillway/protocol/wire'
import type { FastifyLike as App } from 'spillway/workload'
import { carry, fitPage, sendProblem } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import type { AppRequest as Request } from '../../http/app.js'
import {
  type AdministrationSetting,
  answers,
  instantOrNull,
  invalid,
  isUuid,
  notFound,
  offsetPage,
  pageOf,
  tags,
} from './administration-setting.js'
import type { MessageName } from './message-log.js'

const listDefault = 100
/** How far one may page when every skipped row must be read. */
const reachMax = 1_000
const messageUrl = '/api/v1/messages/:partitionId/:transactionId'
const tracesUrl = '/api/v1/traces/:partitionId/:transactionId'
/** 18 digits: more may not fit into a bigint. */
const traceForm = /^\d{1,18}$/

interface MessageParams {
  partitionId: string
  transactionId: string
}
const Replayed = Type.Object({ ...ReplayedMessage.properties, replayed: Type.Boolean(), id: Type.String() })
const Retried = Type.Object({ ...ReplayedMessage.properties, retried: Type.Boolean() })
const Named = { partitionId: Type.String(), transactionId: Type.String() }
const Removed = Type.Object({ success: Type.Boolean(), ...Named, message: Type.String() })
const Buried = Type.Object({ movedToDLQ: Type.Boolean(), ...Named, consumerGroups: Type.Array(Type.String()) })
const Traced = Type.Object({ success: Type.Boolean(), traceId: Type.String() })

export function messageLogRoutes(app: App, setting: AdministrationSetting): void {
  addDeadLetters(app, setting)
  addReading(app, setting)
  addHandling(app, setting)
  addTraces(app, setting)
}

function addDeadLetters(
  app: App,
  { administration, hooks, operate, read, visible, mayUse, pageBytesMax }: AdministrationSetting,
): void {
  const { dead } = administration
  app.get<{ Querystring: Static<typeof ListDeadMessagesQuery> }>(
    '/api/v1/dlq',
    {
      schema: {
        tags,
        summary: 'Dead letters, newest first',
        querystring: ListDeadMessagesQuery,
        response: answers(DeadMessagePage),
      },
      config: read,
    },
    async (request) => {
      const { queue = null, consumerGroup = null, partition = null, from, to, skipped = false } = request.query
      const { limit, offset } = pageOf(request.query, listDefault, limits.listItemsMax)
      const found = await dead.list(
        {
          queue,
          group: consumerGroup,
          partition,
          from: instantOrNull('from', from),
          to: instantOrNull('to', to),
          withSkipped: skipped,
          visible: visible(request),
        },
        limit + 1,
        offset,
      )
      const { items: messages, pagination } = offsetPage(found.messages, { limit, offset }, pageBytesMax)
      return { messages, total: found.total, limit, offset, pagination }
    },
  )

  app.delete<{ Querystring: Static<typeof PurgeDeadMessagesQuery> }>(
    '/api/v1/dlq',
    {
      schema: {
        tags,
        summary: 'Delete dead letters of a queue, and the records of what was skipped',
        querystring: PurgeDeadMessagesQuery,
        response: answers(Purged),
      },
      config: operate,
    },
    async (request) => {
      const { queue, consumerGroup = null, partition = null, to } = request.query
      const filter = { queue, group: consumerGroup, partition, to: instantOrNull('to', to) }
      return { purged: mayUse(request, queue) ? await dead.purge(filter) : 0 }
    },
  )

  app.post<{ Params: { id: string } }>(
    '/api/v1/dlq/:id/replay',
    {
      schema: {
        tags,
        summary: 'Put a dead letter at the end of its partition, for its group alone',
        response: answers(Replayed),
      },
      config: operate,
    },
    async (request, reply) => {
      const id = request.params.id.toLowerCase()
      const queue = isUuid(id) ? await dead.queueOf(id) : null
      const replayed = queue !== null && mayUse(request, queue) ? await dead.replay(id) : null
      if (replayed === null) return notFound(reply, 'dead letter')
      hooks.wake(replayed.queue)
      return { replayed: true, id, ...replayed }
    },
  )
}

/** Null: it does not exist, or not for this caller. */
async function nameOf(
  { administration, mayUse }: AdministrationSetting,
  request: Request,
  { partitionId, transactionId }: MessageParams,
): Promise<(MessageName & { queue: string }) | null> {
  if (!isUuid(partitionId)) return null
  const name = { partition: partitionId.toLowerCase(), transactionId }
  const queue = await administration.log.queueOf(name)
  return queue !== null && mayUse(request, queue) ? { ...name, queue } : null
}

function addReading(app: App, setting: AdministrationSetting): void {
  const { administration, read, visible, pageBytesMax } = setting
  app.get<{ Querystring: Static<typeof ListMessagesQuery> }>(
    '/api/v1/messages',
    {
      schema: {
        tags,
        summary: 'Messages, newest first; without a partition: of the 200 partitions that were pushed to last',
        querystring: ListMessagesQuery,
        response: answers(LoggedMessagePage),
      },
      config: read,
    },
    async (request) => {
      const { queue = null, partition = null, ns, namespace = ns ?? null, task = null, status = null } = request.query
      const { from, to } = request.query
      const isQuick = queue !== null && partition !== null && status === null
      const asked = pageOf(request.query, listDefault, limits.listItemsMax)
      const { offset } = asked
      if (!isQuick && offset >= reachMax) {
        throw invalid(
          'offset',
          `must be less than ${reachMax}, unless a queue and a partition are given, and no status`,
        )
      }
      // Pages may be short, so the last one need not start at a multiple of the limit.
      const limit = isQuick ? asked.limit : Math.min(asked.limit, reachMax - offset)
      const filter = {
        ...{ queue, partition, namespace, task, status },
        ...{ from: instantOrNull('from', from), to: instantOrNull('to', to), visible: visible(request) },
      }
      const [found, mode] = await Promise.all([
        administration.list.list(filter, limit + 1, offset),
        administration.list.mode(queue, filter.visible),
      ])
      const { items: messages, pagination } = offsetPage(found, { limit, offset }, pageBytesMax)
      return { messages, mode, pagination }
    },
  )

  app.get<{ Params: MessageParams }>(
    messageUrl,
    { schema: { tags, summary: 'One message', response: answers(MessageDetails) }, config: read },
    async (request, reply) => {
      const name = await nameOf(setting, request, request.params)
      const found = name === null ? null : await administration.log.get(name)
      return found ?? notFound(reply, 'message')
    },
  )
}

function addHandling(app: App, setting: AdministrationSetting): void {
  const { administration, hooks, operate } = setting
  const { dead, log } = administration
  app.delete<{ Params: MessageParams }>(
    messageUrl,
    { schema: { tags, summary: 'Take a message out of the log', response: answers(Removed) }, config: operate },
    async (request, reply) => {
      const name = await nameOf(setting, request, request.params)
      if (name === null || !(await log.remove(name))) return notFound(reply, 'message')
      // The consumer that had it leased can continue.
      hooks.wake(name.queue)
      return { success: true, ...request.params, message: 'Message deleted successfully' }
    },
  )

  app.post<{ Params: MessageParams }>(
    `${messageUrl}/retry`,
    {
      schema: {
        tags,
        summary: 'Replay a message that was given up: its newest dead letter, or skipped record',
        response: answers(Retried),
      },
      config: operate,
    },
    async (request, reply) => {
      const name = await nameOf(setting, request, request.params)
      const letter = name === null ? null : await dead.newestOf(name.partition, name.transactionId)
      const replayed = letter === null ? null : await dead.replay(letter.id)
      if (replayed === null) return notFound(reply, 'message that was given up')
      hooks.wake(replayed.queue)
      return { retried: true, ...replayed }
    },
  )

  app.post<{ Params: MessageParams }>(
    `${messageUrl}/dlq`,
    {
      schema: {
        tags,
        summary: 'Make it a dead letter for every group that has neither settled nor leased it',
        response: answers(Buried),
      },
      config: operate,
    },
    async (request, reply) => {
      const name = await nameOf(setting, request, request.params)
      const buried = name === null ? null : await log.bury(name)
      switch (buried?.kind) {
        case 'done':
          return { movedToDLQ: true, ...request.params, consumerGroups: buried.groups }
        case 'nobody': {
          const detail = 'No consumer group has it before it: all have settled it, have it leased, or there is none.'
          return sendProblem(reply, { code: 'conflict', detail })
        }
        default:
          return notFound(reply, 'message')
      }
    },
  )
}

function addTraces(app: App, setting: AdministrationSetting): void {
  const { administration, consume, read, pageBytesMax } = setting
  const { traces, log } = administration
  app.post<{ Body: Static<typeof AddTrace> }>(
    '/api/v1/traces',
    {
      schema: { tags, summary: 'Attach an event to a message', body: AddTrace, response: answers(Traced, 201) },
      config: consume,
    },
    async (request, reply) => {
      const { body } = request
      const { traceNames } = body
      if (body.data === null) throw invalid('data', 'is required')
      carry(body, request.bodyText ?? '', ['data'])
      const name = await nameOf(setting, request, body)
      const traceId =
        name === null
          ? null
          : await traces.add({
              ...name,
              group: body.consumerGroup ?? queueModeGroup,
              event: body.eventType ?? 'info',
              names: typeof traceNames === 'string' ? [traceNames] : (traceNames ?? []),
              data: body.data,
              worker: request.principal.identity,
            })
      if (traceId === null) return notFound(reply, 'message')
      return reply.code(201).send({ success: true, traceId })
    },
  )

  app.get<{ Params: MessageParams; Querystring: Static<typeof ListTracesQuery> }>(
    tracesUrl,
    {
      schema: {
        tags,
        summary: 'Events of a message, oldest first',
        querystring: ListTracesQuery,
        response: answers(TraceEvents),
      },
      config: read,
    },
    async (request, reply) => {
      const name = await nameOf(setting, request, request.params)
      if (name === null) return notFound(reply, 'message')
      const { limit } = pageOf(request.query, limits.listEntriesMax)
      const bounds = { limit, bytesMax: pageBytesMax }
      const { rows, isCut } = await traces.list(name, { ...bounds, limit: limit + 1 }, request.query.cursor ?? null)
      if (rows.length === 0 && !(await log.isThere(name))) return notFound(reply, 'message')
      const { items, end } = fitPage(rows, bounds, (event) => event, isCut)
      return { traces: items, next_cursor: end?.id ?? null }
    },
  )
  app.get<{ Params: MessageParams & { traceId: string } }>(
    `${tracesUrl}/:traceId`,
    { schema: { tags, summary: 'One event of a message, whole', response: answers(TraceEvent) }, config: read },
    async (request, reply) => {
      const { traceId } = request.params
      const name = traceForm.test(traceId) ? await nameOf(setting, request, request.params) : null
      return (name === null ? null : await traces.get(name, traceId)) ?? notFound(reply, 'event')
    },
  )
}
