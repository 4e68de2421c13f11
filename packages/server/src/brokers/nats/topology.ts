/**
 * The streams and the consumer that a router needs. Creates them if missing and updates them where the broker allows
 * it. Settings that cannot be changed are kept and logged. Several routers may run this at once.
 */
import {
  AckPolicy,
  type ConsumerConfig,
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
  /** Null: keep the broker's setting. */
  readonly ackPendingMax: number | null
  /** The server's maximum message size. */
  readonly payloadMax: number
}

export interface Topology {
  /** Maximum message size, headers included. */
  readonly messageBytesMax: number
  /** Acked messages leave the stream, so the remaining ones were not acked. */
  readonly isWorkQueue: boolean
}

/**
 * Reserved in each message, so that every stored message still fits with the headers that a dead letter adds. The
 * stream refuses longer messages from every publisher.
 */
export const deadLetterRoomBytes = 4_096

const duplicateWindowMs = 2 * 60_000
/** If a router dies between burying and acking, the same message is buried again, possibly much later. */
const deadDuplicateWindowMs = 60 * 60_000

export async function ensureTopology(jsm: JetStreamManager, wanted: Wanted, log: BrokerLog): Promise<Topology> {
  const { names } = wanted
  const room = Math.max(wanted.payloadMax - deadLetterRoomBytes, Math.ceil(wanted.payloadMax / 2))
  const intake = await ensureStream(jsm, log, {
    fixed: { name: names.stream, retention: RetentionPolicy.Workqueue, storage: StorageType.File },
    changeable: { subjects: [names.subject], max_msg_size: room, duplicate_window: nanos(duplicateWindowMs) },
  })
  await ensureStream(jsm, log, {
    fixed: { name: names.deadStream, retention: RetentionPolicy.Limits, storage: StorageType.File },
    changeable: { subjects: [names.deadSubject], duplicate_window: nanos(deadDuplicateWindowMs) },
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
  return adjust(found, plan.changeable, () => jsm.streams.update(name, plan.changeable), log, { stream: name })
}

async function ensureConsumer(jsm: JetStreamManager, wanted: Wanted, log: BrokerLog): Promise<void> {
  const { stream, consumer } = wanted.names
  const fixed = { ack_policy: AckPolicy.Explicit }
  const changeable: Partial<ConsumerConfig> = {
    ack_wait: nanos(wanted.ackWaitMs),
    max_deliver: wanted.maxDeliver,
    // A backoff list would override the ack wait.
    backoff: [],
    ...(wanted.ackPendingMax !== null && { max_ack_pending: wanted.ackPendingMax }),
  }
  const found = await have(
    () => jsm.consumers.info(stream, consumer),
    () => jsm.consumers.add(stream, { durable_name: consumer, ...fixed, ...changeable }),
  )
  if (differences(found.config, fixed).length > 0 || found.config.deliver_subject !== undefined) {
    log.error({ stream, consumer }, 'the consumer has another type: delete it, and it is created again')
  }
  const update = () => jsm.consumers.update(stream, consumer, changeable)
  await adjust(found, changeable, update, log, { stream, consumer })
}

/** Returns what the broker has after the change, which it may refuse in whole or in part. */
async function adjust<Config extends object, Info extends { config: Config }>(
  found: Info,
  changeable: Partial<Config>,
  update: () => Promise<Info>,
  log: BrokerLog,
  what: { stream: string; consumer?: string },
): Promise<Info> {
  if (differences(found.config, changeable).length === 0) return found
  const now = (await unlessRefused(update, log, what)) ?? found
  const differs = differences(now.config, changeable)
  const noun = what.consumer === undefined ? 'stream' : 'consumer'
  if (differs.length > 0) log.warn({ ...what, differs }, `the settings of a ${noun} could not be changed`)
  return now
}

/** Another router may create it between our look and our create. */
async function have<T>(look: () => Promise<T>, make: () => Promise<T>): Promise<T> {
  try {
    return await look()
  } catch (error) {
    if (!isApiFault(error, apiCodes.streamNotFound, apiCodes.consumerNotFound)) throw error
  }
  try {
    return await make()
  } catch (error) {
    // A stream that is being created elsewhere can appear as a subject overlap for a moment; a foreign stream does so
    // permanently.
    if (isApiFault(error, apiCodes.streamSubjectsOverlap)) return await look().catch(() => Promise.reject(error))
    const { streamNameInUse, consumerNameInUse, consumerExists, consumerReplacedMeanwhile } = apiCodes
    if (!isApiFault(error, streamNameInUse, consumerNameInUse, consumerExists, consumerReplacedMeanwhile)) throw error
    return await look()
  }
}

/** Null if the broker refuses the change; throws if it does not answer. */
async function unlessRefused<T>(change: () => Promise<T>, log: BrokerLog, what: object): Promise<T | null> {
  try {
    return await change()
  } catch (error) {
    if (!(error instanceof JetStreamApiError) || error.status >= 500) throw error
    log.warn({ ...what, err: error }, 'the broker refuses to change the settings')
    return null
  }
}

/** A missing list is an empty one. */
function differences<T extends object>(is: T, wanted: Partial<T>): string[] {
  return (Object.keys(wanted) as (keyof T & string)[]).filter(
    (key) => JSON.stringify(is[key] ?? []) !== JSON.stringify(wanted[key]),
  )
}
