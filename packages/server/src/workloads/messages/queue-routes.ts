/** Queues: contents, status, emptying and deleting; maintenance. */
import {
  ClearQueueQuery,
  ListEntriesQuery,
  ListQueuesQuery,
  MaintenanceState,
  NamespaceList,
  QueueDetails,
  QueuePage,
  QueueStatus,
  ResourceOverview,
  SetMaintenance,
  StatusQuery,
  SystemStatus,
  TaskList,
} from '@spillway/protocol/schema'
import type { FastifyLike as App } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import type { AppRequest as Request } from '../../http/app.js'
import { type AdministrationSetting, answers, notFound, offsetPage, pageOf, tags } from './administration-setting.js'
import { anyQueue } from './queue-overview.js'

const listDefault = 1_000
const partitionsDefault = 200
type QueuesQuery = Static<typeof ListQueuesQuery>
type Page = Static<typeof ListEntriesQuery>
interface Queue {
  queue: string
}
const Deleted = Type.Object({ deleted: Type.Boolean(), queue: Type.String(), existed: Type.Boolean() })
const Cleared = Type.Object({
  cleared: Type.Boolean(),
  count: Type.Integer(),
  queue: Type.String(),
  partition: Type.String({ description: 'Its name, or all' }),
})

export function queueRoutes(app: App, setting: AdministrationSetting): void {
  addResources(app, setting)
  addStatus(app, setting)
  addMaintenance(app, setting)
}

function addResources(app: App, setting: AdministrationSetting): void {
  const { operate, read, visible, mayUse, pageBytesMax } = setting
  const { overview, removal } = setting.administration
  addQueueList(app, setting, '/api/v1/resources/queues', 'Queues and how much is in them, newest first')

  app.get<{ Params: Queue; Querystring: Page }>(
    '/api/v1/resources/queues/:queue',
    {
      schema: {
        tags,
        summary: 'One queue and its partitions',
        querystring: ListEntriesQuery,
        response: answers(QueueDetails),
      },
      config: read,
    },
    async (request, reply) => {
      const { queue } = request.params
      const asked = pageOf(request.query, listDefault)
      const found = mayUse(request, queue) ? await overview.get(queue, asked, pageBytesMax) : null
      return found ?? notFound(reply, 'queue')
    },
  )

  app.delete<{ Params: Queue }>(
    '/api/v1/resources/queues/:queue',
    {
      schema: { tags, summary: 'Delete a queue with its messages; dead letters stay', response: answers(Deleted) },
      config: operate,
    },
    async (request, reply) => {
      const { queue } = request.params
      if (!mayUse(request, queue)) return notFound(reply, 'queue')
      return { deleted: true, queue, existed: await removal.drop(queue) }
    },
  )

  app.delete<{ Params: Queue; Querystring: Static<typeof ClearQueueQuery> }>(
    '/api/v1/queues/:queue/clear',
    {
      schema: {
        tags,
        summary: 'Delete the messages of a queue, or of one partition',
        querystring: ClearQueueQuery,
        response: answers(Cleared),
      },
      config: operate,
    },
    async (request, reply) => {
      const { queue } = request.params
      const { partition } = request.query
      const count = mayUse(request, queue) ? await removal.clear(queue, partition ?? null) : null
      if (count === null) return notFound(reply, partition === undefined ? 'queue' : 'partition')
      return { cleared: true, count, queue, partition: partition ?? 'all' }
    },
  )

  app.get(
    '/api/v1/resources/overview',
    { schema: { tags, summary: 'All queues together', response: answers(ResourceOverview) }, config: read },
    (request) => overview.resources(visible(request)),
  )
  const shares = async (column: 'namespace' | 'task', request: Request) => {
    const asked = pageOf(request.query as Page, listDefault)
    const found = await overview.by(column, visible(request), asked.limit + 1, asked.offset)
    return offsetPage(found, asked, pageBytesMax)
  }
  app.get(
    '/api/v1/resources/namespaces',
    {
      schema: {
        tags,
        summary: 'Queues by namespace',
        querystring: ListEntriesQuery,
        response: answers(NamespaceList),
      },
      config: read,
    },
    async (request) => {
      const { items, pagination } = await shares('namespace', request)
      return { namespaces: items.map(({ name, ...rest }) => ({ namespace: name, ...rest })), pagination }
    },
  )
  app.get(
    '/api/v1/resources/tasks',
    {
      schema: { tags, summary: 'Queues by task', querystring: ListEntriesQuery, response: answers(TaskList) },
      config: read,
    },
    async (request) => {
      const { items, pagination } = await shares('task', request)
      return { tasks: items.map(({ name, ...rest }) => ({ task: name, ...rest })), pagination }
    },
  )
}

function addStatus(app: App, setting: AdministrationSetting): void {
  const { read, visible, mayUse, pageBytesMax } = setting
  const { status } = setting.administration
  app.get<{ Querystring: Static<typeof StatusQuery> }>(
    '/api/v1/status',
    {
      schema: {
        tags,
        summary: 'Depth, leases, dead letters and throughput',
        querystring: StatusQuery,
        response: answers(SystemStatus),
      },
      config: read,
    },
    (request) => {
      const { queue = null, namespace = null, task = null } = request.query
      return status.all({ ...anyQueue, queue, namespace, task, visible: visible(request) })
    },
  )
  addQueueList(app, setting, '/api/v1/status/queues', 'Queues and their depth, newest first')
  app.get<{ Params: Queue; Querystring: Page }>(
    '/api/v1/status/queues/:queue',
    {
      schema: {
        tags,
        summary: 'One queue: depth, lag and throughput, by partition and group',
        querystring: ListEntriesQuery,
        response: answers(QueueStatus),
      },
      config: read,
    },
    async (request, reply) => {
      const { queue } = request.params
      const asked = pageOf(request.query, partitionsDefault)
      const found = mayUse(request, queue) ? await status.queue(queue, asked, pageBytesMax) : null
      return found ?? notFound(reply, 'queue')
    },
  )
}

function addQueueList(app: App, setting: AdministrationSetting, url: string, summary: string): void {
  app.get<{ Querystring: QueuesQuery }>(
    url,
    {
      schema: { tags, summary, querystring: ListQueuesQuery, response: answers(QueuePage) },
      config: setting.read,
    },
    async (request) => {
      const { search = null, namespace = null, task = null } = request.query
      const { limit, offset } = pageOf(request.query, listDefault)
      const filter = { queue: null, search, namespace, task, visible: setting.visible(request) }
      const found = await setting.administration.overview.list(filter, limit + 1, offset)
      const { items: queues, pagination } = offsetPage(found, { limit, offset }, setting.pageBytesMax)
      return { queues, pagination }
    },
  )
}

function addMaintenance(app: App, { operate, view, hooks: { maintenance } }: AdministrationSetting): void {
  const wholeServer = { wholeServer: true } as const
  const url = '/api/v1/system/maintenance'
  const state = (): Promise<Static<typeof MaintenanceState>> => maintenance.state()
  app.get(
    url,
    {
      schema: { tags, summary: 'Are pushes held back?', response: answers(MaintenanceState) },
      config: { ...view, ...wholeServer },
    },
    () => state(),
  )
  app.post<{ Body: Static<typeof SetMaintenance> }>(
    url,
    {
      schema: {
        tags,
        summary: 'Hold pushes back (they are accepted and wait), or let them go, in order',
        body: SetMaintenance,
        response: answers(MaintenanceState),
      },
      config: { ...operate, ...wholeServer },
    },
    async (request) => {
      const { enabled } = request.body
      await (enabled ? maintenance.on() : maintenance.off())
      const message = enabled ? 'Pushes are accepted and held.' : 'Held pushes are stored, in order.'
      return { ...(await state()), message }
    },
  )
}
