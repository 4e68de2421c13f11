import type { AckResult, AckStatus, PoppedMessage, PushResult, QueueOptions } from '@spillway/protocol/wire'
import { segment } from '../checks.js'
import { type Call, type CallOptions, limitsOf } from '../http/call.js'
import { type KeyOptions, keyHeader } from '../idempotency.js'
import type { Parts } from '../resources.js'
import { type Address, placeOf } from './address.js'
import { type ConsumeOptions, type Consumer, consume, type Handler } from './consume.js'
import { itemsOf, type Pushed, type PushItem, type PushOptions, push } from './push.js'

export interface PopOptions extends CallOptions {
  /** Messages, at most. Default 1. */
  batch?: number
  /** How long to wait for a message, 120,000 at most. Default 0: look once. */
  waitMs?: number
  /** The consumer group. Default: the group of consumers that name none. */
  group?: string
  /** Acknowledged when taken: messages lost on the way back are lost. Such a pop is not repeated when its answer is lost. */
  autoAck?: boolean
  /** Takes from up to this many partitions at once, under one lease. Default 1. */
  partitions?: number
  /** Where a new group starts. Default `all`. */
  subscriptionMode?: 'all' | 'new'
  /** `now`, or an RFC 3339 time. */
  subscriptionFrom?: string
}

/** Any queue of a namespace or task. */
export interface AnyQueue {
  namespace?: string
  task?: string
}

export interface Ack extends Pick<PoppedMessage, 'transactionId' | 'partitionId'> {
  leaseId?: string
  consumerGroup?: string
  /** Default `completed`. `failed` is tried again up to the queue's limit, `retry` at once and uncounted. */
  status?: AckStatus
  error?: string
}

export interface Acked extends AckResult {
  /** Refused after an attempt whose answer was lost: that attempt may have counted. */
  isUnknown: boolean
}

export type TransactionStep = { type: 'push'; items: readonly PushItem[] } | ({ type: 'ack' } & Ack)

export interface Transacted {
  transactionId: string
  /** False: nothing was done. */
  success: boolean
  error?: string
  results: ((PushResult | AckResult) & { type: 'push' | 'ack'; success: boolean })[]
}

export interface TransactionOptions extends CallOptions, KeyOptions {
  /** All of these leases must still be held. */
  requiredLeases?: readonly string[]
}

export interface QueueConfiguration {
  namespace?: string
  task?: string
  options?: Partial<QueueOptions>
}

export interface Messages {
  /** Each message is a payload, or an envelope `{ payload, transactionId?, traceId? }`. */
  push(address: Address, messages: unknown, options?: PushOptions): Promise<Pushed>
  /** Any mix of queues and partitions. */
  pushAll(items: readonly PushItem[], options?: PushOptions): Promise<Pushed>
  /** Empty: there is none. */
  pop(from: Address | AnyQueue, options?: PopOptions): Promise<PoppedMessage[]>
  ack(acks: Ack | readonly Ack[], options?: CallOptions): Promise<Acked[]>
  /** Until when the lease is held; throws `not_found` when it is lost. */
  extend(leaseId: string, options?: CallOptions & { seconds?: number }): Promise<{ newExpiresAt: string }>
  /** Takes messages, calls `handler` and acknowledges, until it is stopped. */
  consume(from: Address, handler: Handler, options?: ConsumeOptions): Consumer
  /** All or nothing. */
  transaction(steps: readonly TransactionStep[], options?: TransactionOptions): Promise<Transacted>
  configure(queue: string, configuration?: QueueConfiguration, options?: CallOptions): Promise<QueueConfiguration>
}

const service = 'messages'

export function messages(parts: Parts): Messages {
  const ask = async <T>(call: Omit<Call, 'service'>, options: CallOptions = {}): Promise<T> =>
    (await parts.send({ ...limitsOf(options), ...call, service })).body as T

  const made: Messages = {
    push: async (address, given, options = {}) => push(parts, itemsOf(address, given), options),
    pushAll: (items, options = {}) => push(parts, items, options),
    pop: (from, options = {}) => pop(parts, from, options),
    async ack(acks, options = {}) {
      const acknowledgments = Array.isArray(acks) ? acks : [acks]
      // By lease: a message that is acknowledged already is refused, and nothing changes.
      const call = { method: 'POST', path: '/api/v1/ack/batch', isRepeatable: true } as const
      const sent = { ...call, body: { acknowledgments }, expects: ['[]'], service, ...limitsOf(options) } as const
      const { body, isRepeat } = await parts.send(sent)
      return (body as AckResult[]).map((result) => ({ ...result, isUnknown: isRepeat && !result.success }))
    },
    extend: async (leaseId, { seconds, ...options } = {}) => {
      const path = `/api/v1/lease/${segment(leaseId)}/extend`
      const body = { seconds: seconds ?? null }
      return ask({ method: 'POST', path, body, expects: ['newExpiresAt'], isRepeatable: true }, options)
    },
    consume: (from, handler, options = {}) => {
      // Throws for an invalid address here, once, not at every pop.
      source(from)
      return consume({ ...parts, messages: made }, { from, handler }, options)
    },
    transaction: (operations, { requiredLeases, ...options } = {}) => {
      const body = { operations, ...(requiredLeases && { requiredLeases }) }
      const call = { method: 'POST', path: '/api/v1/transaction', body, isRepeatable: true } as const
      return ask({ ...call, headers: keyHeader(options), expects: ['results'] }, options)
    },
    configure: (queue, configuration = {}, options) => {
      const body = { queue, ...configuration }
      return ask(
        { method: 'POST', path: '/api/v1/configure', body, expects: ['configured'], isRepeatable: true },
        options,
      )
    },
  }
  return made
}

async function pop(parts: Parts, from: Address | AnyQueue, options: PopOptions): Promise<PoppedMessage[]> {
  const { batch, waitMs = 0, group, autoAck, partitions, subscriptionMode, subscriptionFrom } = options
  const { path, query } = source(from)
  const { body } = await parts.send({
    method: 'GET',
    path,
    query: {
      ...query,
      ...{ batch, autoAck, partitions, subscriptionMode, subscriptionFrom, consumerGroup: group },
      ...(waitMs > 0 && { wait: true, timeout: Math.round(waitMs) }),
    },
    service,
    expects: ['messages', ''],
    // A pop whose answer is lost has leased its messages, repeated or not. With autoAck they would be gone, and a repeat
    // would lose the next ones, too.
    isRepeatable: autoAck !== true,
    waitMs,
    signal: options.signal,
    deadlineMs: options.deadlineMs ?? parts.settings.deadlineMs + waitMs,
  })
  return body === undefined ? [] : (body as { messages: PoppedMessage[] }).messages
}

function source(from: Address | AnyQueue): { path: string; query: Record<string, string | undefined> } {
  if (typeof from !== 'string' && !('queue' in from)) return { path: '/api/v1/pop', query: { ...from } }
  const { queue, partition } = placeOf(from)
  const path = `/api/v1/pop/queue/${segment(queue)}`
  return { path: partition === undefined ? path : `${path}/partition/${segment(partition)}`, query: {} }
}
