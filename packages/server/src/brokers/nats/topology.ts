/**
 * The streams and the consumer that a router needs. Made when they are not there, brought in line where the broker
 * allows it; what cannot be changed is left, and said. Several routers may do this at once.
 */
import {
  AckPolicy,
  type ConsumerConfig,
  type ConsumerInfo,
  JetStreamApiError,
  type JetStreamManager,
  RetentionPolicy,
  StorageType,
  type StreamConfig,
  type StreamInfo,
} from '@nats-io/jetstream'
import { nanos } from '@nats-io/transport-node'
import { apiCodes, isApiFault } from './faults.js'
import type { BrokerLog } from './link.js'
import type { Names } from './names.js'

export interface Wanted {
  readonly names: Names
  readonly maxDeliver: number
  readonly ackWaitMs: number
  /** Null: as the broker has it. */
  readonly ackPendingMax: number | null
  /** Null: as the broker has it, one for new streams. */
  readonly replicas: number | null
  /** What the server takes in one message. */
  readonly payloadMax: number
}

export interface Topology {
  /** What a message may have, headers included. */
  readonly messageBytesMax: number
  /** What is acked leaves the stream: what is left there was not acked. */
  readonly isWorkQueue: boolean
}

/**
 * Kept free in each message, so that whatever the broker has stored also fits into it with what a dead letter adds. The
 * stream refuses what is longer, from strangers too.
 */
export const deadLetterRoomBytes = 4_096

const duplicateWindowMs = 2 * 60_000
/** A message may die a second time, of the same death, when its router falls between burying and acking; found late. */
const deadDuplicateWindowMs = 60 * 60_000

export async function ensureTopology(jsm: JetStreamManager, wanted: Wanted, log: BrokerLog): Promise<Topology> {
  const { names } = wanted
  const replicas = wanted.replicas === null ? {} : { num_replicas: wanted.replicas }
  const room = Math.max(wanted.payloadMax - deadLetterRoomBytes, Math.ceil(wanted.payloadMax / 2))
  const intake = await ensureStream(jsm, log, {
    fixed: { name: names.stream, retention: RetentionPolicy.Workqueue, storage: StorageType.File },
    changeable: {
      subjects: [names.subject],
      max_msg_size: room,
      duplicate_window: nanos(duplicateWindowMs),
      ...replicas,
    },
  })
  await ensureStream(jsm, log, {
    fixed: { name: names.deadStream, retention: RetentionPolicy.Limits, storage: StorageType.File },
    changeable: { subjects: [names.deadSubject], duplicate_window: nanos(deadDuplicateWindowMs), ...replicas },
  })
  await ensureConsumer(jsm, wanted, log)
  const stored = intake.config.max_msg_size
  return {
    messageBytesMax: stored > 0 ? Math.min(stored, room) : room,
    isWorkQueue: intake.config.retention === RetentionPolicy.Workqueue,
  }
}

interface StreamPlan {
  fixed: Pick<StreamConfig, 'name' | 'retention' | 'storage'>
  changeable: Partial<StreamConfig>
}

async function ensureStream(jsm: JetStreamManager, log: BrokerLog, plan: StreamPlan): Promise<StreamInfo> {
  const { name } = plan.fixed
  const found = await have(
    () => jsm.streams.info(name),
    () => jsm.streams.add({ ...plan.fixed, ...plan.changeable }),
  )
  const fixed = differences(found.config, plan.fixed)
  if (fixed.length > 0) log.warn({ stream: name, differs: fixed }, 'a stream has settings that cannot be changed')
  if (differences(found.config, plan.changeable).length === 0) return found
  const updated = await unlessRefused(() => jsm.streams.update(name, plan.changeable), log, { stream: name })
  const now = updated ?? found
  const left = differences(now.config, plan.changeable)
  if (left.length > 0) log.warn({ stream: name, differs: left }, 'a stream was left as it is')
  return now
}

async function ensureConsumer(jsm: JetStreamManager, wanted: Wanted, log: BrokerLog): Promise<ConsumerInfo> {
  const { stream, consumer } = wanted.names
  const fixed = { ack_policy: AckPolicy.Explicit }
  const changeable: Partial<ConsumerConfig> = {
    ack_wait: nanos(wanted.ackWaitMs),
    max_deliver: wanted.maxDeliver,
    ...(wanted.ackPendingMax !== null && { max_ack_pending: wanted.ackPendingMax }),
  }
  const found = await have(
    () => jsm.consumers.info(stream, consumer),
    () => jsm.consumers.add(stream, { durable_name: consumer, ...fixed, ...changeable }),
  )
  if (differences(found.config, fixed).length > 0 || found.config.deliver_subject !== undefined) {
    log.error({ stream, consumer }, 'the consumer is of another kind: delete it, and it is made anew')
  }
  // A list of back-offs would take the place of the ack wait.
  const hasBackoff = (found.config.backoff ?? []).length > 0
  if (differences(found.config, changeable).length === 0 && !hasBackoff) return found
  const change = hasBackoff ? { ...changeable, backoff: [] } : changeable
  const updated = await unlessRefused(() => jsm.consumers.update(stream, consumer, change), log, { stream, consumer })
  const now = updated ?? found
  const left = differences(now.config, changeable)
  if ((now.config.backoff ?? []).length > 0) left.push('backoff')
  if (left.length > 0) log.warn({ stream, consumer, differs: left }, 'a consumer was left as it is')
  return now
}

export async function setAckPendingMax(jsm: JetStreamManager, names: Names, count: number): Promise<void> {
  await jsm.consumers.update(names.stream, names.consumer, { max_ack_pending: count })
}

/** Another router may make it between our look and our making. */
async function have<T>(look: () => Promise<T>, make: () => Promise<T>): Promise<T> {
  try {
    return await look()
  } catch (error) {
    if (!isApiFault(error, apiCodes.streamNotFound, apiCodes.consumerNotFound)) throw error
  }
  try {
    return await make()
  } catch (error) {
    // The same stream being made elsewhere may show as an overlap of its subjects; another's stream does so for good.
    if (isApiFault(error, apiCodes.streamSubjectsOverlap)) return await look().catch(() => Promise.reject(error))
    const { streamNameInUse, consumerNameInUse, consumerExists, consumerReplacedMeanwhile } = apiCodes
    if (!isApiFault(error, streamNameInUse, consumerNameInUse, consumerExists, consumerReplacedMeanwhile)) throw error
    return await look()
  }
}

/** Null when the broker does not want the change; a broker that does not answer is another matter. */
async function unlessRefused<T>(change: () => Promise<T>, log: BrokerLog, what: object): Promise<T | null> {
  try {
    return await change()
  } catch (error) {
    if (!(error instanceof JetStreamApiError) || error.status >= 500) throw error
    log.warn({ ...what, err: error }, 'the broker refuses to change the settings')
    return null
  }
}

function differences<T extends object>(is: T, wanted: Partial<T>): string[] {
  return (Object.keys(wanted) as (keyof T & string)[]).filter(
    (key) => JSON.stringify(is[key]) !== JSON.stringify(wanted[key]),
  )
}
