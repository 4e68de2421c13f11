import Type from 'typebox'
import { limits } from '../wire/limits.js'
import { operationStatuses } from '../wire/operations.js'
import { Name, OperationId, Timestamp } from './names.js'

/** The payload of `http.request`. */
export const ForwardPayload = Type.Object(
  {
    url: Type.String({ minLength: 1, maxLength: limits.forwardUrlCharacters }),
    method: Type.Optional(Type.Enum(['GET', 'POST', 'PUT', 'PATCH', 'DELETE', 'HEAD'], { default: 'POST' })),
    headers: Type.Optional(Type.Record(Type.String(), Type.String())),
    body: Type.Optional(
      Type.Unknown({ description: 'Any JSON value; a text is sent as it is if content-type is given' }),
    ),
  },
  { additionalProperties: false },
)

/** The body of `POST /api/v1/operations`. The named type checks the payload. */
export const SubmitOperation = Type.Object(
  {
    type: Name,
    queue: Name,
    partition: Type.Optional(Name),
    priority: Type.Optional(Type.Integer({ minimum: limits.priorityMin, maximum: limits.priorityMax })),
    delay_seconds: Type.Optional(Type.Number({ minimum: 0, maximum: limits.delaySecondsMax })),
    timeout_seconds: Type.Optional(Type.Number({ minimum: 0.001, maximum: limits.timeoutSecondsMax })),
    max_retries: Type.Optional(Type.Integer({ minimum: 0, maximum: limits.maxRetriesMax })),
    payload: Type.Unknown(),
  },
  { additionalProperties: false },
)

export const Queued = Type.Object({
  status: Type.Literal('queued'),
  operationId: OperationId,
  queuePosition: Type.Integer({ minimum: 0, description: 'Position in its lane; 0 = next' }),
  estimatedWaitSeconds: Type.Number({
    minimum: 0,
    description:
      'From the measured drain, the work ahead of it, and how long the head of its lane is delayed or waits for its next attempt. As if nothing were paused',
  }),
  estimatedWait: Type.String(),
  reason: Type.Enum(['maintaining_order', 'system_busy', 'requested', 'still_running', 'retrying']),
})

export const Operation = Type.Object({
  id: OperationId,
  operation_type: Type.String(),
  queue: Type.String(),
  partition: Type.String(),
  priority: Type.Integer(),
  status: Type.Enum([...operationStatuses]),
  created_at: Timestamp,
  processing_started_at: Type.Union([Timestamp, Type.Null()]),
  processed_at: Type.Union([Timestamp, Type.Null()]),
  attempt: Type.Integer(),
  max_attempts: Type.Integer(),
  retry_count: Type.Integer(),
  error_message: Type.Union([Type.String(), Type.Null()]),
  latency_seconds: Type.Union([Type.Number(), Type.Null()]),
  queuePosition: Type.Union([Type.Integer(), Type.Null()]),
  result: Type.Unknown(),
  progress: Type.Optional(
    Type.Object(
      {
        value: Type.Number({ minimum: 0, maximum: 1 }),
        note: Type.Union([Type.String(), Type.Null()]),
        at: Timestamp,
      },
      { description: 'What its handler said last, while that attempt runs; not in lists' },
    ),
  ),
  code: Type.Optional(
    Type.String({ description: 'Why it failed: `expired`, or (not in lists) what its handler said' }),
  ),
  error_stack: Type.Optional(
    Type.String({ description: 'The last error with its stack; for operators only, and not in lists' }),
  ),
})

/** How a list describes the values that it leaves out. */
const leftOut = (what: string) => Type.Optional(Type.Integer({ description: `Bytes of ${what}` }))
const listed = {
  result_bytes: leftOut(`a result of more than ${limits.listPayloadBytes}, which is left out (null)`),
  error_message_bytes: leftOut(`an error message of more than ${limits.listPayloadBytes}: its beginning is given`),
  truncated: Type.Optional(Type.Literal(true, { description: 'Something is left out; the single item has it whole' })),
}

const ListedOperation = Type.Object({ ...Operation.properties, ...listed })

export const DeadLetter = Type.Object({
  ...Operation.properties,
  identity: Type.String(),
  payload: Type.Unknown(),
})

const ListedDeadLetter = Type.Object({
  ...DeadLetter.properties,
  payload_bytes: leftOut(`a payload of more than ${limits.listPayloadBytes}, which is left out (null)`),
  ...listed,
})

export const ListOperationsQuery = Type.Object(
  {
    status: Type.Optional(Type.Enum([...operationStatuses])),
    type: Type.Optional(Name),
    queue: Type.Optional(Name),
    partition: Type.Optional(Name),
    identity: Type.Optional(Type.String({ minLength: 1, maxLength: limits.identityCharacters })),
    from: Type.Optional(Timestamp),
    to: Type.Optional(Timestamp),
    limit: Type.Optional(Type.Integer({ minimum: 1, maximum: limits.listItemsMax })),
    cursor: Type.Optional(Type.String({ minLength: 1, maxLength: 1_024 })),
  },
  { additionalProperties: false },
)

export const WaitQuery = Type.Object(
  {
    wait: Type.Optional(Type.Number({ minimum: 0, maximum: limits.preferWaitSecondsMax })),
  },
  { additionalProperties: false },
)

export const LaneBody = Type.Object({ queue: Name, partition: Type.Optional(Name) }, { additionalProperties: false })

export const LaneState = Type.Object({
  queue: Name,
  partition: Type.Union([Name, Type.Null()]),
  paused: Type.Boolean({ description: 'As it is now' }),
  paused_by: Type.Union([Type.Literal('queue'), Type.Literal('partition'), Type.Null()], {
    description: 'What holds it: a pause of the whole queue, or of this partition alone',
  }),
})

export const ListLanesQuery = Type.Object(
  {
    queue: Type.Optional(Name),
    limit: ListOperationsQuery.properties.limit,
    cursor: ListOperationsQuery.properties.cursor,
  },
  { additionalProperties: false },
)

const Lane = Type.Object({
  queue: Name,
  partition: Name,
  depth: Type.Integer({ description: 'Unfinished operations' }),
  oldest_age_seconds: Type.Number({ description: 'Since its first operation was accepted' }),
  paused: Type.Boolean(),
  paused_by: Type.Union([Type.Literal('queue'), Type.Literal('partition'), Type.Literal('type'), Type.Null()], {
    description: 'A pause of the whole queue, of this lane, or of the type of its first operation',
  }),
  head: Type.Object(
    {
      id: OperationId,
      operation_type: Type.String(),
      status: Type.Enum(['pending', 'processing']),
      attempt: Type.Integer(),
      max_attempts: Type.Integer(),
      next_attempt_at: Type.Union([Timestamp, Type.Null()], {
        description: 'When a delayed one, or one that failed, runs next; null: it runs, waits for a slot, or is paused',
      }),
    },
    { description: 'Its first operation: the others wait for it' },
  ),
  waiting_because: Type.Union([Type.String(), Type.Null()], {
    description: 'In words, for people; null: its first operation runs, or is about to',
  }),
})

/** `POST /api/v1/operations`: ran now, or failed for good. */
export const Executed = Type.Union([
  Type.Object({ status: Type.Literal('executed'), operationId: OperationId, result: Type.Unknown() }),
  Type.Object({
    status: Type.Literal('failed'),
    operationId: OperationId,
    error_message: Type.String(),
    result: Type.Unknown(),
  }),
])

export const SubmitHeaders = Type.Object({
  'idempotency-key': Type.Optional(
    Type.String({
      minLength: 1,
      maxLength: limits.idempotencyKeyCharacters,
      description:
        'The same key and body give the stored answer again, for 24 h; a ticket that it names is gone 1 h after its operation finished',
    }),
  ),
  prefer: Type.Optional(
    Type.String({
      description: 'respond-async: queue it. wait=N (seconds, 60 at most): wait so long for a queued one',
    }),
  ),
})

const NextCursor = Type.Union([Type.String(), Type.Null()], {
  description: 'A page ends at `limit` or at SPILLWAY_PAGE_BYTES_MAX; null: there is no more',
})

export const OperationPage = Type.Object({ items: Type.Array(ListedOperation), next_cursor: NextCursor })

export const DeadLetterPage = Type.Object({ items: Type.Array(ListedDeadLetter), next_cursor: NextCursor })

export const LanePage = Type.Object({ items: Type.Array(Lane), next_cursor: NextCursor })

export const OperationStats = Type.Object({
  stats: Type.Array(
    Type.Object({
      operation_type: Type.String(),
      priority: Type.Integer(),
      status: Type.Enum([...operationStatuses]),
      count: Type.Integer(),
      oldest: Timestamp,
      newest: Timestamp,
      avg_latency_seconds: Type.Union([Type.Number(), Type.Null()]),
    }),
  ),
  systemHealth: Type.Object({
    poolUtilization: Type.Number(),
    poolWaiting: Type.Integer(),
    queueDepth: Type.Integer(),
    oldestAgeSeconds: Type.Number(),
  }),
})
