import type { QueuedReason } from './operations.js'

/** The group of consumers that name none. */
export const queueModeGroup = '__QUEUE_MODE__'

/** Queue options and their defaults. */
export const queueOptionDefaults = {
  leaseTime: 300,
  retryLimit: 3,
  retryDelay: 1_000,
  maxSize: 0,
  priority: 0,
  delayedProcessing: 0,
  windowBuffer: 0,
  retentionSeconds: 0,
  completedRetentionSeconds: 0,
  retentionEnabled: false,
  maxWaitTimeSeconds: 0,
  deadLetterQueue: false,
  dlqAfterMaxRetries: false,
  encryptionEnabled: false,
} as const

export type QueueOptionName = keyof typeof queueOptionDefaults
export type QueueOptions = {
  [Name in QueueOptionName]: (typeof queueOptionDefaults)[Name] extends number ? number : boolean
}

/** The result of one pushed item. */
export interface PushResult {
  index: number
  message_id: string
  transaction_id: string
  partition_id: string
  trace_id: string | null
  queueName: string
  /** `queued` is Queen's word for stored; `pending` waits in the operation queue. */
  status: 'queued' | 'duplicate' | 'failed' | 'pending'
  error?: string
  code?: string
}

export const ackStatuses = ['completed', 'failed', 'retry', 'dlq'] as const
export type AckStatus = (typeof ackStatuses)[number]

export interface AckResult {
  index: number
  transactionId: string
  success: boolean
  error: string | null
  /** It failed for good and is a dead letter. */
  dlq: boolean
}

/** A message handed to a consumer. */
export interface PoppedMessage {
  id: string
  transactionId: string
  traceId: string | null
  queue: string
  partition: string
  partitionId: string
  /** Needed for the ack; empty when the pop acknowledged it. */
  leaseId: string
  consumerGroup: string
  data: unknown
  createdAt: string
  /** How often it was delivered before without success. */
  retryCount: number
  namespace: string | null
  task: string | null
}

/** A lane that waits, from a push that was answered 202. */
export interface QueuedLane {
  queue: string
  partition: string
  operationId: string
  queuePosition: number
  reason: QueuedReason
}
