/** The operators' routes: reading, configuring, moving, deleting. Pushing and consuming are in push-mount.ts and consume/. */
import {
  AddTrace,
  ClearQueueQuery,
  ConfigureQueue,
  ConsumerGroupDetails,
  ConsumerGroupList,
  DeadMessagePage,
  EndGroupQuery,
  LaggingGroupsQuery,
  LaggingPartitions,
  ListDeadMessagesQuery,
  ListEntriesQuery,
  ListMessagesQuery,
  ListQueuesQuery,
  ListTracesQuery,
  LoggedMessagePage,
  MaintenanceState,
  MessageDetails,
  MoveSubscription,
  NamespaceList,
  PurgeDeadMessagesQuery,
  Purged,
  QueueDetails,
  QueuePage,
  QueueStatus,
  ReplayedMessage,
  ResourceOverview,
  SeekGroup,
  SetMaintenance,
  StatusQuery,
  SystemStatus,
  TaskList,
  TraceEvent,
  TraceEvents,
} from '@spillway/protocol/schema'
import type { FastifyLike as App } from 'spillway/workload'
import { jsonOf, refuseUntilReady } from 'spillway/workload'
import Type from 'typebox'
import type { MessagesOptions } from '../options.js'
import { configureQueue } from './configure.js'
import {
  endGroup,
  endGroupOfQueue,
  getGroup,
  groupsUrl,
  listGroups,
  listLaggingPartitions,
  moveSubscription,
  seekGroup,
} from './consumer-groups.js'
import { listDeadLetters, purgeDeadLetters, replayDeadLetter } from './dead-letters.js'
import { getMaintenance, setMaintenance } from './maintenance.js'
import { buryMessage, getMessage, removeMessage, retryMessage } from './message.js'
import { listMessages } from './message-list.js'
import { patientReads } from './patient.js'
import { clearQueue, deleteQueue } from './queue-removal.js'
import { getOverview, getQueue, listNamespaces, listQueues, listTasks } from './queues.js'
import { type Admin, addRoutes, type Route, route } from './route.js'
import { getQueueStatus, getStatus } from './status.js'
import { Throughput } from './throughput.js'
import { addTrace, getTrace, listTraces } from './traces.js'

const readers = ['consume', 'view'] as const
const queueUrl = '/api/v1/resources/queues/:queue'
const messageUrl = '/api/v1/messages/:partitionId/:transactionId'
const tracesUrl = '/api/v1/traces/:partitionId/:transactionId'
const maintenanceUrl = '/api/v1/system/maintenance'

const messageName = { partitionId: Type.String(), transactionId: Type.String() }
const Ended = Type.Object({
  success: Type.Boolean(),
  consumerGroup: Type.String(),
  queueName: Type.Optional(Type.String()),
  deletedPartitions: Type.Integer(),
  metadataDeleted: Type.Boolean(),
})

const queueRoutes = [
  route('POST', '/api/v1/configure', ['submit', 'consume'], configureQueue, {
    summary: 'Create a queue, or change its options',
    description:
      'Creating one needs submit or consume, changing one needs operate. Repeating the current options changes nothing and gets the same answer as the first time.',
    body: ConfigureQueue,
    status: 201,
  }),
  ...['/api/v1/resources/queues', '/api/v1/status/queues'].map((url) =>
    route('GET', url, readers, listQueues, {
      summary: 'Queues and their depth, newest first',
      query: ListQueuesQuery,
      answer: QueuePage,
    }),
  ),
  route('GET', queueUrl, readers, getQueue, {
    summary: 'One queue and its partitions',
    query: ListEntriesQuery,
    answer: QueueDetails,
    missing: 'queue',
  }),
  route('DELETE', queueUrl, 'operate', deleteQueue, {
    summary: 'Delete a queue with its messages; dead letters stay',
    answer: Type.Object({ deleted: Type.Boolean(), queue: Type.String(), existed: Type.Boolean() }),
    missing: 'queue',
  }),
  route('DELETE', '/api/v1/queues/:queue/clear', 'operate', clearQueue, {
    summary: 'Delete the messages of a queue, or of one partition',
    query: ClearQueueQuery,
    answer: Type.Object({
      cleared: Type.Boolean(),
      count: Type.Integer(),
      queue: Type.String(),
      partition: Type.String({ description: 'Its name, or all' }),
    }),
    missing: 'queue',
  }),
  route('GET', '/api/v1/resources/overview', readers, getOverview, {
    summary: 'All queues together',
    answer: ResourceOverview,
  }),
  route('GET', '/api/v1/resources/namespaces', readers, listNamespaces, {
    summary: 'Queues by namespace',
    query: ListEntriesQuery,
    answer: NamespaceList,
  }),
  route('GET', '/api/v1/resources/tasks', readers, listTasks, {
    summary: 'Queues by task',
    query: ListEntriesQuery,
    answer: TaskList,
  }),
  route('GET', '/api/v1/status', readers, getStatus, {
    summary: 'Depth, leases, dead letters and throughput',
    query: StatusQuery,
    answer: SystemStatus,
  }),
  route('GET', '/api/v1/status/queues/:queue', readers, getQueueStatus, {
    summary: 'One queue: depth, lag and throughput, by partition and group',
    query: ListEntriesQuery,
    answer: QueueStatus,
    missing: 'queue',
  }),
  route('GET', maintenanceUrl, 'view', getMaintenance, {
    wholeServer: true,
    summary: 'Whether pushes are held',
    answer: MaintenanceState,
  }),
  route('POST', maintenanceUrl, 'operate', setMaintenance, {
    wholeServer: true,
    summary: 'Hold pushes (they are accepted and wait), or store the held ones, in order',
    body: SetMaintenance,
    answer: MaintenanceState,
  }),
]

const messageRoutes = [
  route('GET', '/api/v1/dlq', readers, listDeadLetters, {
    summary: 'Dead letters, newest first',
    query: ListDeadMessagesQuery,
    answer: DeadMessagePage,
  }),
  route('DELETE', '/api/v1/dlq', 'operate', purgeDeadLetters, {
    summary: 'Delete dead letters of a queue, and the records of skipped messages',
    query: PurgeDeadMessagesQuery,
    answer: Purged,
  }),
  route('POST', '/api/v1/dlq/:id/replay', 'operate', replayDeadLetter, {
    summary: 'Put a dead letter at the end of its partition, for its group only',
    answer: Type.Object({ ...ReplayedMessage.properties, replayed: Type.Boolean(), id: Type.String() }),
    missing: 'dead letter',
  }),
  route('GET', '/api/v1/messages', readers, listMessages, {
    summary: 'Messages, newest first; without a partition: of the 200 partitions with the latest pushes',
    query: ListMessagesQuery,
    answer: LoggedMessagePage,
  }),
  route('GET', messageUrl, readers, getMessage, {
    summary: 'One message',
    answer: MessageDetails,
    missing: 'message',
  }),
  route('DELETE', messageUrl, 'operate', removeMessage, {
    summary: 'Remove a message from the log',
    answer: Type.Object({ success: Type.Boolean(), ...messageName, message: Type.String() }),
    missing: 'message',
  }),
  route('POST', `${messageUrl}/retry`, 'operate', retryMessage, {
    summary: 'Replay an abandoned message: its newest dead letter, or record of being skipped',
    answer: Type.Object({ ...ReplayedMessage.properties, retried: Type.Boolean() }),
    missing: 'abandoned message',
  }),
  route('POST', `${messageUrl}/dlq`, 'operate', buryMessage, {
    summary: 'Make it a dead letter for every group that has neither settled nor leased it',
    answer: Type.Object({
      movedToDLQ: Type.Boolean(),
      ...messageName,
      consumerGroups: Type.Array(Type.String()),
    }),
    missing: 'message',
  }),
  route('POST', '/api/v1/traces', 'consume', addTrace, {
    summary: 'Attach an event to a message',
    body: AddTrace,
    answer: Type.Object({ success: Type.Boolean(), traceId: Type.String() }),
    status: 201,
    missing: 'message',
  }),
  route('GET', tracesUrl, readers, listTraces, {
    summary: 'Events of a message, oldest first',
    query: ListTracesQuery,
    answer: TraceEvents,
    missing: 'message',
  }),
  route('GET', `${tracesUrl}/:traceId`, readers, getTrace, {
    summary: 'One event of a message, in full',
    answer: TraceEvent,
    missing: 'event',
  }),
]

const groupRoutes = [
  route('GET', groupsUrl, 'view', listGroups, {
    summary: 'Consumer groups, one for each of their queues',
    query: ListEntriesQuery,
    answer: ConsumerGroupList,
  }),
  route('GET', `${groupsUrl}/lagging`, 'view', listLaggingPartitions, {
    summary: 'Partitions in which a group is behind, longest first',
    query: LaggingGroupsQuery,
    answer: LaggingPartitions,
  }),
  route('GET', `${groupsUrl}/:group`, 'view', getGroup, {
    summary: 'The position of a group, by queue and partition',
    query: ListEntriesQuery,
    answer: ConsumerGroupDetails,
    missing: 'group',
  }),
  route('DELETE', `${groupsUrl}/:group`, 'operate', endGroup, {
    summary: 'End a group in all queues; with deleteMetadata=false it starts again where it first started',
    query: EndGroupQuery,
    answer: Ended,
  }),
  route('DELETE', `${groupsUrl}/:group/queues/:queue`, 'operate', endGroupOfQueue, {
    summary: 'End a group in one queue',
    query: EndGroupQuery,
    answer: Ended,
    missing: 'queue',
  }),
  route('POST', `${groupsUrl}/:group/subscription`, 'operate', moveSubscription, {
    summary: 'Where a group starts when it is started again',
    body: MoveSubscription,
    answer: Type.Object({
      success: Type.Boolean(),
      consumerGroup: Type.String(),
      newTimestamp: Type.String(),
      rowsUpdated: Type.Integer(),
    }),
    missing: 'group',
  }),
  route('POST', `${groupsUrl}/:group/queues/:queue/seek`, 'operate', seekGroup, {
    summary: 'Move a group to another position in a queue; it loses its leases',
    body: SeekGroup,
    answer: Type.Object({
      success: Type.Boolean(),
      consumerGroup: Type.String(),
      queueName: Type.String(),
      seekToEnd: Type.Boolean(),
      targetTimestamp: Type.Union([Type.String(), Type.Null()]),
      partitionsUpdated: Type.Integer(),
    }),
    missing: 'group',
  }),
]

const routes: readonly Route[] = [...queueRoutes, ...messageRoutes, ...groupRoutes]

export function messageAdministrationRoutes({
  options: { schema, pageBytesMax },
  ...workload
}: Pick<Admin, 'intake' | 'seal' | 'queues' | 'maintenance' | 'wake'> & {
  options: Pick<MessagesOptions, 'schema' | 'pageBytesMax'>
}): (app: App) => Promise<void> {
  const { intake } = workload
  const admin: Admin = { ...workload, schema, pageBytesMax, query: patientReads(intake), throughput: new Throughput() }
  return async (app) => {
    app.setSerializerCompiler(() => jsonOf)
    refuseUntilReady(app, intake)
    addRoutes(app, admin, routes)
  }
}
