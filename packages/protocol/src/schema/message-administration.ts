import Type, { type TSchema } from 'typebox'
import { limits } from '../wire/limits.js'
import { Name, Timestamp } from './names.js'

const open = { additionalProperties: true } as const
/** Null means absent. */
const Maybe = <Schema extends TSchema>(schema: Schema) => Type.Optional(Type.Union([schema, Type.Null()]))
const OrNull = <Schema extends TSchema>(schema: Schema) => Type.Union([schema, Type.Null()])
const Count = Type.Integer({ minimum: 0 })
const Uuid = Type.String({ format: 'uuid' })
const Label = Type.String({ maxLength: limits.nameCodePoints })
/** More is not a 400, because Queen's clients treat an error as an empty list. The answer says how many it was. */
const Limit = (most: number) =>
  Type.Optional(Type.Integer({ minimum: 1, description: `${most} at most; more is as many` }))
const Offset = Type.Optional(Type.Integer({ minimum: 0, maximum: 100_000 }))

export const ListDeadMessagesQuery = Type.Object(
  {
    queue: Type.Optional(Name),
    consumerGroup: Type.Optional(Name),
    partition: Type.Optional(Name),
    from: Type.Optional(Timestamp),
    to: Type.Optional(Timestamp),
    skipped: Type.Optional(
      Type.Boolean({ description: 'Also those that were skipped because their queue has no dead letters' }),
    ),
    limit: Limit(limits.listItemsMax),
    offset: Offset,
  },
  open,
)

export const PurgeDeadMessagesQuery = Type.Object(
  {
    queue: Name,
    consumerGroup: Type.Optional(Name),
    partition: Type.Optional(Name),
    to: Type.Optional(Timestamp),
  },
  open,
)
export const Purged = Type.Object({ purged: Type.Integer({ minimum: 0 }) })

export const messageStatuses = ['pending', 'processing', 'completed', 'dead_letter', 'failed'] as const

export const ListMessagesQuery = Type.Object(
  {
    queue: Type.Optional(Name),
    partition: Type.Optional(Name),
    ns: Type.Optional(Label),
    namespace: Type.Optional(Label),
    task: Type.Optional(Label),
    status: Type.Optional(Type.Enum([...messageStatuses])),
    from: Type.Optional(Timestamp),
    to: Type.Optional(Timestamp),
    limit: Limit(limits.listItemsMax),
    offset: Offset,
  },
  open,
)

export const ListQueuesQuery = Type.Object(
  {
    search: Type.Optional(Label),
    namespace: Type.Optional(Label),
    task: Type.Optional(Label),
    limit: Limit(limits.listEntriesMax),
    offset: Offset,
  },
  open,
)

export const ListEntriesQuery = Type.Object({ limit: Limit(limits.listEntriesMax), offset: Offset }, open)

export const StatusQuery = Type.Object(
  { queue: Type.Optional(Name), namespace: Type.Optional(Label), task: Type.Optional(Label) },
  open,
)

export const ClearQueueQuery = Type.Object({ partition: Type.Optional(Name) }, open)

export const ListTracesQuery = Type.Object(
  {
    limit: Limit(limits.listEntriesMax),
    cursor: Type.Optional(Type.String({ pattern: '^\\d{1,18}$', description: 'next_cursor of the page before' })),
  },
  open,
)

export const EndGroupQuery = Type.Object({ deleteMetadata: Type.Optional(Type.Boolean()) }, open)

export const MoveSubscription = Type.Object({ subscriptionTimestamp: Timestamp }, open)

export const SeekGroup = Type.Object(
  { timestamp: Maybe(Timestamp), toEnd: Maybe(Type.Boolean()), toBeginning: Maybe(Type.Boolean()) },
  { ...open, description: 'One of them' },
)

export const AddTrace = Type.Object(
  {
    transactionId: Type.String({ minLength: 1, maxLength: limits.nameCodePoints }),
    partitionId: Type.String({ minLength: 1, maxLength: limits.nameCodePoints }),
    consumerGroup: Maybe(Name),
    traceNames: Maybe(Type.Union([Name, Type.Array(Name, { maxItems: 100 })])),
    eventType: Maybe(Name),
    data: Type.Unknown({ description: 'Any JSON value' }),
  },
  open,
)

export const SetMaintenance = Type.Object({ enabled: Type.Boolean() }, open)

export const MessageCounts = Type.Object({
  total: Type.Integer({ minimum: 0, description: 'In the log' }),
  pending: Type.Integer({ minimum: 0, description: 'Not read by the slowest group, those being processed left out' }),
  processing: Count,
  completed: Type.Integer({ minimum: 0, description: 'Settled by every group' }),
  failed: Type.Integer({ minimum: 0, description: 'Skipped; counted up to 100,000' }),
  deadLetter: Type.Integer({ minimum: 0, description: 'Counted up to 100,000' }),
})

/** `error`: why there is no data. */
const payload = { data: Type.Unknown(), error: Type.Optional(Type.String()) }
/** How a list describes the values that it leaves out. */
const listed = {
  data_bytes: Type.Optional(
    Type.Integer({
      description: `Bytes of data of more than ${limits.listPayloadBytes}, which is left out (null); of an encrypted payload up to 2 more`,
    }),
  ),
  truncated: Type.Optional(Type.Literal(true, { description: 'Something is left out; the single item has it whole' })),
}
const Pagination = Type.Object(
  {
    limit: Count,
    offset: Count,
    nextOffset: OrNull(
      Type.Integer({
        description: 'offset of the next page: offset and the items of this one; null: there is no more',
      }),
    ),
  },
  { description: 'A page ends at `limit` or at SPILLWAY_PAGE_BYTES_MAX, whichever is first' },
)

export const DeadMessage = Type.Object({
  id: Uuid,
  messageId: Uuid,
  partitionId: Uuid,
  transactionId: Type.String(),
  traceId: OrNull(Type.String()),
  consumerGroup: Type.String(),
  errorMessage: OrNull(Type.String()),
  retryCount: Count,
  skipped: Type.Boolean({ description: 'Its queue has no dead letters: this is the record that it was skipped' }),
  queue: Type.String(),
  queueName: Type.String(),
  partition: Type.String(),
  partitionName: Type.String(),
  namespace: OrNull(Type.String()),
  task: OrNull(Type.String()),
  createdAt: Timestamp,
  originalCreatedAt: Timestamp,
  failedAt: Timestamp,
  movedToDlqAt: Timestamp,
  ...payload,
  ...listed,
  error_message_bytes: Type.Optional(
    Type.Integer({
      description: `Bytes of an errorMessage of more than ${limits.listPayloadBytes}: its beginning is given`,
    }),
  ),
})

export const DeadMessagePage = Type.Object({
  messages: Type.Array(DeadMessage),
  total: Type.Integer({ minimum: 0, description: 'Counted up to 100,000' }),
  limit: Count,
  offset: Count,
  pagination: Pagination,
})

export const ReplayedMessage = Type.Object({
  queue: Type.String(),
  partitionId: Uuid,
  messageId: Uuid,
  transactionId: Type.String(),
})

export const LoggedMessage = Type.Object({
  id: Uuid,
  transactionId: Type.String(),
  traceId: OrNull(Type.String()),
  partitionId: Uuid,
  queuePath: Type.String(),
  queue: Type.String(),
  partition: Type.String(),
  namespace: OrNull(Type.String()),
  task: OrNull(Type.String()),
  queuePriority: Type.Integer(),
  status: Type.Enum([...messageStatuses]),
  busStatus: Type.Object({ consumedBy: Count, totalGroups: Count }),
  createdAt: Timestamp,
  leaseExpiresAt: OrNull(Timestamp),
})

export const ConsumerMode = Type.Object({
  hasQueueMode: Type.Boolean(),
  busGroupsCount: Count,
  type: Type.Enum(['queue', 'bus', 'hybrid', 'none']),
})

export const LoggedMessagePage = Type.Object({
  messages: Type.Array(LoggedMessage),
  mode: ConsumerMode,
  pagination: Pagination,
})

export const MessageDetails = Type.Object({
  ...LoggedMessage.properties,
  payload: Type.Unknown(),
  ...payload,
  isEncrypted: Type.Boolean(),
  errorMessage: OrNull(Type.String()),
  retryCount: Count,
  inLog: Type.Boolean({ description: 'False: only its dead letter is left' }),
  queueConfig: Type.Record(Type.String(), Type.Unknown()),
  mode: Type.Object({ ...ConsumerMode.properties, consumedByGroups: Count }),
  consumerGroups: Type.Array(
    Type.Object({
      name: Type.String(),
      consumed: Type.Boolean(),
      processing: Type.Boolean(),
      retryCount: Count,
      leaseExpiresAt: OrNull(Timestamp),
    }),
  ),
  deadLetters: Type.Array(
    Type.Object({
      id: Uuid,
      consumerGroup: Type.String(),
      errorMessage: OrNull(Type.String()),
      retryCount: Count,
      skipped: Type.Boolean(),
      movedToDlqAt: Timestamp,
    }),
  ),
})

const Queue = {
  id: Type.String(),
  name: Type.String(),
  namespace: OrNull(Type.String()),
  task: OrNull(Type.String()),
  createdAt: Timestamp,
}

export const QueueSummary = Type.Object({
  ...Queue,
  partitions: Count,
  messages: Type.Object({ total: Count, pending: Count, processing: Count }),
})

export const QueuePage = Type.Object({
  queues: Type.Array(QueueSummary),
  pagination: Pagination,
})

export const PartitionState = Type.Object({
  id: Uuid,
  name: Type.String(),
  createdAt: Timestamp,
  lastActivity: Timestamp,
  stats: MessageCounts,
  messages: MessageCounts,
  oldestMessage: OrNull(Timestamp),
  newestMessage: OrNull(Timestamp),
})

export const QueueDetails = Type.Object({
  ...Queue,
  partitionCount: Count,
  partitions: Type.Array(PartitionState),
  totals: MessageCounts,
  pagination: Pagination,
})

export const GroupState = Type.Object({
  name: Type.String(),
  depth: Type.Integer({ minimum: 0, description: 'Messages that it has still to settle' }),
  processing: Count,
  consumed: Type.Integer({ minimum: 0, description: 'Settled as done since it began, or was last put elsewhere' }),
  partitionsWithLag: Count,
  partitionsLookedAt: Type.Integer({
    minimum: 0,
    description: 'Less than partitionsWithLag: maxTimeLag is that of the deepest ones',
  }),
  maxTimeLag: Type.Integer({ minimum: 0, description: 'Seconds since its oldest unsettled message came' }),
})

const Rates = Type.Object({
  timestamp: Timestamp,
  seconds: Type.Number({ description: 'How long it was looked at' }),
  ingested: Count,
  processed: Count,
  ingestedPerSecond: Type.Number(),
  processedPerSecond: Type.Number(),
})

export const QueueStatus = Type.Object({
  queue: Type.Object({ ...Queue, priority: Type.Integer(), config: Type.Record(Type.String(), Type.Unknown()) }),
  partitionCount: Count,
  partitions: Type.Array(
    Type.Object({
      ...PartitionState.properties,
      cursor: Type.Object({ totalConsumed: Count }),
      consumerGroups: Type.Array(
        Type.Object({ name: Type.String(), depth: Count, processing: Count, lastConsumedAt: OrNull(Timestamp) }),
      ),
      truncated: Type.Optional(Type.Literal(true, { description: 'It has more groups than a page has room for' })),
    }),
  ),
  totals: Type.Object({ messages: MessageCounts, ...MessageCounts.properties }),
  consumerGroups: Type.Array(GroupState),
  throughput: Type.Array(Rates, { description: 'Between two looks at this page, newest first; empty at the first' }),
  pagination: Pagination,
})

export const SystemStatus = Type.Object({
  timestamp: Timestamp,
  throughput: Type.Array(Rates, { description: 'Between two looks at this page, newest first; empty at the first' }),
  queues: Type.Array(
    Type.Object(
      { ...QueueSummary.properties, totalConsumed: Count },
      { description: 'The deepest first, 100 at most' },
    ),
  ),
  messages: MessageCounts,
  leases: Type.Object({
    active: Count,
    partitionsWithLeases: Count,
    totalBatchSize: Count,
    totalAcked: Count,
  }),
  deadLetterQueue: Type.Object({
    totalMessages: Count,
    affectedPartitions: Count,
    topErrors: Type.Array(Type.Object({ error: OrNull(Type.String()), count: Count })),
  }),
})

const Spread = Type.Object({ avg: Type.Number(), median: Type.Number(), min: Type.Number(), max: Type.Number() })

export const ResourceOverview = Type.Object({
  queues: Count,
  partitions: Count,
  namespaces: Count,
  tasks: Count,
  messages: MessageCounts,
  lag: Type.Object({
    time: Spread,
    offset: Spread,
  }),
  throughput: Type.Optional(Type.Object({ ingestedPerSecond: Type.Number(), processedPerSecond: Type.Number() })),
  timestamp: Timestamp,
  statsAge: Type.Integer({ description: 'Seconds' }),
})

export const ConsumerGroup = Type.Object({
  name: Type.String(),
  topics: Type.Array(Type.String()),
  queueName: Type.String(),
  members: Type.Integer({ minimum: 0, description: 'Partitions' }),
  partitionsWithLag: Count,
  partitionsLookedAt: Type.Integer({
    minimum: 0,
    description: 'Less than partitionsWithLag: maxTimeLag is that of the deepest ones',
  }),
  totalLag: Count,
  maxTimeLag: Type.Integer({ minimum: 0, description: 'Seconds' }),
  state: Type.Enum(['Stable', 'Lagging']),
  subscriptionMode: Type.Enum(['all', 'new', 'timestamp']),
  subscriptionTimestamp: OrNull(Timestamp),
  subscriptionCreatedAt: Timestamp,
})
export const ConsumerGroupList = Type.Array(ConsumerGroup)

export const ConsumerGroupDetails = Type.Record(
  Type.String(),
  Type.Object({
    partitions: Type.Array(
      Type.Object({
        partition: Type.String(),
        partitionId: Uuid,
        workerId: OrNull(Type.String()),
        lastConsumedAt: OrNull(Timestamp),
        totalConsumed: Count,
        offsetLag: Count,
        timeLagSeconds: Count,
        leaseActive: Type.Boolean(),
        leaseExpiresAt: OrNull(Timestamp),
      }),
    ),
  }),
  { description: 'By queue' },
)

export const TraceEvent = Type.Object({
  id: Type.String(),
  event_type: Type.String(),
  eventType: Type.String(),
  data: Type.Unknown(),
  consumer_group: OrNull(Type.String()),
  consumerGroup: OrNull(Type.String()),
  worker_id: OrNull(Type.String()),
  created_at: Timestamp,
  createdAt: Timestamp,
  trace_names: Type.Array(Type.String()),
  traceNames: Type.Array(Type.String()),
  ...listed,
})
export const TraceEvents = Type.Object({ traces: Type.Array(TraceEvent), next_cursor: OrNull(Type.String()) })

export const MaintenanceState = Type.Object({
  maintenanceMode: Type.Boolean(),
  bufferedMessages: Count,
  message: Type.Optional(Type.String()),
})
