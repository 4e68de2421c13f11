/** Consumer groups: progress, position, and deletion. */
import {
  ConsumerGroupDetails,
  ConsumerGroupList,
  EndGroupQuery,
  LaggingGroupsQuery,
  LaggingPartitions,
  ListEntriesQuery,
  MoveSubscription,
  SeekGroup,
} from '@spillway/protocol/schema'
import type { FastifyLike as App } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import {
  type AdministrationSetting,
  answers,
  instant,
  invalid,
  linkNext,
  notFound,
  offsetPage,
  pageOf,
  tags,
} from './administration-setting.js'
import type { SeekTarget } from './consumer-groups.js'

const listDefault = 200
const partitionsDefault = 1_000
const lagSecondsDefault = 3_600
const url = '/api/v1/consumer-groups'

interface Group {
  group: string
}
interface GroupOfQueue extends Group {
  queue: string
}
const Ended = Type.Object({
  success: Type.Boolean(),
  consumerGroup: Type.String(),
  queueName: Type.Optional(Type.String()),
  deletedPartitions: Type.Integer(),
  metadataDeleted: Type.Boolean(),
})
const Moved = Type.Object({
  success: Type.Boolean(),
  consumerGroup: Type.String(),
  newTimestamp: Type.String(),
  rowsUpdated: Type.Integer(),
})
const Sought = Type.Object({
  success: Type.Boolean(),
  consumerGroup: Type.String(),
  queueName: Type.String(),
  seekToEnd: Type.Boolean(),
  targetTimestamp: Type.Union([Type.String(), Type.Null()]),
  partitionsUpdated: Type.Integer(),
})

export function consumerGroupRoutes(app: App, setting: AdministrationSetting): void {
  addReading(app, setting)
  addEnding(app, setting)
  addMoving(app, setting)
}

function addReading(
  app: App,
  { administration: { groups }, view, visible, pageBytesMax }: AdministrationSetting,
): void {
  app.get<{ Querystring: Static<typeof ListEntriesQuery> }>(
    url,
    {
      schema: {
        tags,
        summary: 'Consumer groups, one for each queue of theirs',
        querystring: ListEntriesQuery,
        response: answers(ConsumerGroupList),
      },
      config: view,
    },
    async (request, reply) => {
      const asked = pageOf(request.query, listDefault)
      const found = await groups.list(visible(request), asked.limit + 1, asked.offset)
      const { items, pagination } = offsetPage(found, asked, pageBytesMax)
      linkNext(reply, url, pagination)
      return items
    },
  )
  app.get<{ Querystring: Static<typeof LaggingGroupsQuery> }>(
    `${url}/lagging`,
    {
      schema: {
        tags,
        summary: 'Partitions that a group is behind in, the longest first',
        querystring: LaggingGroupsQuery,
        response: answers(LaggingPartitions),
      },
      config: view,
    },
    async (request) => {
      const { minLagSeconds = lagSecondsDefault } = request.query
      const asked = pageOf(request.query, partitionsDefault)
      const found = await groups.lagging(minLagSeconds, visible(request), asked.limit)
      return offsetPage(found, asked, pageBytesMax).items
    },
  )
  app.get<{ Params: Group; Querystring: Static<typeof ListEntriesQuery> }>(
    `${url}/:group`,
    {
      schema: {
        tags,
        summary: 'Where a group stands, by queue and partition',
        querystring: ListEntriesQuery,
        response: answers(ConsumerGroupDetails),
      },
      config: view,
    },
    async (request, reply) => {
      const { group } = request.params
      const asked = pageOf(request.query, partitionsDefault)
      const found = await groups.get(group, visible(request), asked, pageBytesMax)
      if (found === null) return notFound(reply, 'group')
      linkNext(reply, `${url}/${encodeURIComponent(group)}`, found.pagination)
      return found.details
    },
  )
}

function addEnding(
  app: App,
  { administration: { groups }, hooks, operate, visible, mayUse }: AdministrationSetting,
): void {
  const end = async (group: string, queues: readonly string[], forget: boolean) => {
    const deletedPartitions = queues.length === 0 ? 0 : await groups.end(group, queues, forget)
    // The next pop of this group starts over.
    for (const queue of queues) hooks.wake(queue)
    return { success: true, consumerGroup: group, deletedPartitions, metadataDeleted: forget }
  }
  app.delete<{ Params: Group; Querystring: Static<typeof EndGroupQuery> }>(
    `${url}/:group`,
    {
      schema: {
        tags,
        summary: 'End a group in all queues; with deleteMetadata=false it begins anew where it began once',
        querystring: EndGroupQuery,
        response: answers(Ended),
      },
      config: operate,
    },
    async (request) => {
      const { group } = request.params
      return end(group, await groups.queuesOf(group, visible(request)), request.query.deleteMetadata ?? true)
    },
  )
  app.delete<{ Params: GroupOfQueue; Querystring: Static<typeof EndGroupQuery> }>(
    `${url}/:group/queues/:queue`,
    {
      schema: { tags, summary: 'End a group in one queue', querystring: EndGroupQuery, response: answers(Ended) },
      config: operate,
    },
    async (request, reply) => {
      const { group, queue } = request.params
      if (!mayUse(request, queue)) return notFound(reply, 'queue')
      const queues = (await groups.queuesOf(group, null)).filter((name) => name === queue)
      return { ...(await end(group, queues, request.query.deleteMetadata ?? true)), queueName: queue }
    },
  )
}

function addMoving(app: App, { administration: { groups }, hooks, operate, visible }: AdministrationSetting): void {
  app.post<{ Params: Group; Body: Static<typeof MoveSubscription> }>(
    `${url}/:group/subscription`,
    {
      schema: {
        tags,
        summary: 'Where a group begins when it begins anew',
        body: MoveSubscription,
        response: answers(Moved),
      },
      config: operate,
    },
    async (request, reply) => {
      const { group } = request.params
      const at = instant('subscriptionTimestamp', request.body.subscriptionTimestamp)
      const queues = await groups.queuesOf(group, visible(request))
      if (queues.length === 0) return notFound(reply, 'group')
      const rowsUpdated = await groups.subscribeFrom(group, queues, at)
      return { success: true, consumerGroup: group, newTimestamp: at.toISOString(), rowsUpdated }
    },
  )
  app.post<{ Params: GroupOfQueue; Body: Static<typeof SeekGroup> }>(
    `${url}/:group/queues/:queue/seek`,
    {
      schema: {
        tags,
        summary: 'Put a group elsewhere in a queue; what it has leased is lost to it',
        body: SeekGroup,
        response: answers(Sought),
      },
      config: operate,
    },
    async (request, reply) => {
      const { group, queue } = request.params
      const target = targetOf(request.body)
      if (!(await groups.queuesOf(group, visible(request))).includes(queue)) return notFound(reply, 'group')
      const partitionsUpdated = await groups.seek(group, queue, target)
      hooks.wake(queue)
      return {
        success: true,
        consumerGroup: group,
        queueName: queue,
        seekToEnd: target.to === 'end',
        targetTimestamp: target.to === 'time' ? target.at.toISOString() : null,
        partitionsUpdated,
      }
    },
  )
}

function targetOf({ timestamp, toEnd, toBeginning }: Static<typeof SeekGroup>): SeekTarget {
  const targets: SeekTarget[] = []
  if (toEnd === true) targets.push({ to: 'end' })
  if (toBeginning === true) targets.push({ to: 'start' })
  if (timestamp !== undefined && timestamp !== null) targets.push({ to: 'time', at: instant('timestamp', timestamp) })
  const [target] = targets
  if (target === undefined || targets.length > 1) throw invalid('', 'say one of toEnd, toBeginning and timestamp')
  return target
}
