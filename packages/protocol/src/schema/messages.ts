import Type, { type TSchema } from 'typebox'
import { limits } from '../wire/limits.js'
import { Name, Timestamp } from './names.js'

const open = { additionalProperties: true } as const
/** Null means absent. */
const Maybe = <Schema extends TSchema>(schema: Schema) => Type.Optional(Type.Union([schema, Type.Null()]))
const Key = Type.String({ minLength: 1, maxLength: limits.nameCodePoints })
const Seconds = Type.Integer({ minimum: 0, maximum: 2_147_483_647 })
const Count = Type.Integer({ minimum: 0, maximum: 2_147_483_647 })

export const PushItem = Type.Object(
  {
    queue: Name,
    partition: Maybe(Name),
    payload: Type.Unknown({ description: 'Any JSON value, null included' }),
    transactionId: Maybe(Key),
    traceId: Maybe(Key),
  },
  open,
)

export const PushRequest = Type.Object(
  { items: Type.Array(PushItem, { minItems: 1, maxItems: limits.pushItemsMax }) },
  open,
)

export const ConfigureQueue = Type.Object(
  {
    queue: Name,
    namespace: Maybe(Type.String({ maxLength: limits.nameCodePoints })),
    task: Maybe(Type.String({ maxLength: limits.nameCodePoints })),
    options: Maybe(
      Type.Object(
        {
          leaseTime: Maybe(Type.Integer({ minimum: 1, maximum: limits.leaseSecondsMax })),
          retryLimit: Maybe(Type.Integer({ minimum: 0, maximum: 1_000 })),
          retryDelay: Maybe(Type.Integer({ minimum: 0, maximum: 86_400_000 })),
          maxSize: Maybe(Count),
          priority: Maybe(Type.Integer({ minimum: -1_000_000, maximum: 1_000_000 })),
          delayedProcessing: Maybe(Seconds),
          windowBuffer: Maybe(Seconds),
          retentionSeconds: Maybe(Seconds),
          completedRetentionSeconds: Maybe(Seconds),
          retentionEnabled: Maybe(Type.Boolean()),
          maxWaitTimeSeconds: Maybe(Seconds),
          deadLetterQueue: Maybe(Type.Boolean()),
          dlqAfterMaxRetries: Maybe(Type.Boolean()),
          encryptionEnabled: Maybe(Type.Boolean()),
        },
        open,
      ),
    ),
  },
  open,
)

export const PopPlace = Type.Object({ queue: Name, partition: Type.Optional(Name) })

export const PopQuery = Type.Object(
  {
    batch: Type.Optional(Type.Integer({ minimum: 1, maximum: limits.popMessagesMax })),
    wait: Type.Optional(Type.Boolean()),
    timeout: Type.Optional(Type.Integer({ minimum: 0, maximum: limits.popWaitMsMax })),
    consumerGroup: Type.Optional(Name),
    autoAck: Type.Optional(Type.Boolean()),
    partitions: Type.Optional(Type.Integer({ minimum: 1, maximum: limits.popPartitionsMax })),
    subscriptionMode: Type.Optional(Type.Enum(['all', 'new', 'new-only'])),
    subscriptionFrom: Type.Optional(Type.Union([Type.Literal('now'), Timestamp])),
    namespace: Type.Optional(Type.String({ maxLength: limits.nameCodePoints })),
    task: Type.Optional(Type.String({ maxLength: limits.nameCodePoints })),
  },
  open,
)

const acknowledgment = {
  transactionId: Key,
  partitionId: Type.String({ minLength: 1, maxLength: limits.nameCodePoints }),
  status: Maybe(Type.Enum(['completed', 'success', 'failed', 'retry', 'dlq'])),
  error: Maybe(Type.String({ maxLength: limits.ackErrorCharacters })),
  consumerGroup: Maybe(Name),
  leaseId: Maybe(Type.String({ maxLength: limits.nameCodePoints })),
}

export const AckRequest = Type.Object(acknowledgment, open)

export const AckBatchRequest = Type.Object(
  {
    consumerGroup: Maybe(Name),
    acknowledgments: Type.Array(AckRequest, { minItems: 1, maxItems: limits.ackItemsMax }),
  },
  open,
)

export const TransactionRequest = Type.Object(
  {
    operations: Type.Array(
      Type.Union([
        Type.Object({ type: Type.Literal('push'), items: PushRequest.properties.items }, open),
        Type.Object({ type: Type.Literal('ack'), ...acknowledgment }, open),
      ]),
      { minItems: 1, maxItems: limits.transactionOperationsMax },
    ),
    requiredLeases: Maybe(
      Type.Array(Type.String({ maxLength: limits.nameCodePoints }), { maxItems: limits.ackItemsMax }),
    ),
  },
  open,
)

export const ExtendLease = Type.Object(
  { seconds: Maybe(Type.Integer({ minimum: 1, maximum: limits.leaseSecondsMax })) },
  open,
)
