/** Where the output of streams is kept: PostgreSQL, and Redis if there is one. Opens, ends and sweeps streams in both. */
import type { EndKind, LogName, OutputOf, StreamEntry, StreamLog, StreamRegistry } from 'spillway/workload'
import { type Intake, LogFault, LogWriter, Relay } from 'spillway/workload'
import { RedisStreams } from '../../brokers/redis/index.js'
import type { CheckState } from '../../health.js'
import type { WorkloadContext } from '../../workload.js'

/** Less than a lease: after that another process ends the stream. */
const storePatienceMs = 10_000
/** Short: without Redis its streams end and new ones are kept elsewhere. Long enough for a busy Redis to answer. */
const redisPatienceMs = 2_000
const sweepMs = 60_000

type OpenRequest = Parameters<StreamRegistry['open']>[0]
export type OpenedStream = StreamEntry & { created: boolean }
export type Written = 'written' | 'lost' | 'failed'

export class StreamLogs {
  readonly registry: StreamRegistry
  readonly relay: Relay
  readonly #intake: Intake
  readonly #storeLog: StreamLog
  readonly #redis: RedisStreams | null
  readonly #writers: Partial<Record<LogName, LogWriter>>
  readonly #times: { retentionMs: number; longestMs: number }
  readonly #opening = new Map<string, Promise<OpenedStream>>()

  constructor({ config, intake, log }: WorkloadContext) {
    const { generation: own, store } = config
    const retentionMs = own.retentionSeconds * 1_000
    // From acceptance to the end: waiting, starting, streaming.
    const longestMs = (own.failoverTimeoutSeconds + own.firstTokenSeconds + own.totalSeconds) * 1_000
    const times = { retentionMs, longestMs }
    const { log: storeLog, registry } = intake.store.streams(times)
    const redis =
      own.redisUrl === null ? null : new RedisStreams({ url: own.redisUrl, prefix: store.schema, log, ...times })
    const warn = (fields: object, message: string): void => log.warn(fields, message)
    const relay: Relay = new Relay({
      logs: { postgres: storeLog, ...(redis && { redis }) },
      isLocal: (id) => Object.values(this.#writers).some((writer) => writer.has(id)),
      warn,
    })
    const writerOf = (to: StreamLog, patienceMs: number): LogWriter =>
      new LogWriter({ log: to, patienceMs, warn, onWritten: (key, record) => relay.wrote(key, record) })
    for (const each of [storeLog, redis]) each?.onBell((ids) => relay.heard(ids))
    this.#intake = intake
    this.#times = times
    this.#storeLog = storeLog
    this.#redis = redis
    this.#writers = {
      postgres: writerOf(storeLog, storePatienceMs),
      ...(redis && { redis: writerOf(redis, redisPatienceMs) }),
    }
    this.registry = registry
    this.relay = relay
  }

  /** Redis is not needed to accept work. */
  get checks(): Record<string, () => CheckState> {
    const redis = this.#redis
    return redis === null ? {} : { redis: () => ({ ...redis.check(), optional: true }) }
  }

  readonly outputOf: OutputOf = async (id, after) => {
    const entry = await this.registry.find(id)
    return entry === null ? null : this.relay.follow(entry.key, entry.log, after)
  }

  /** Undefined: this process has no such log. */
  writerOf(entry: StreamEntry): LogWriter | undefined {
    return this.#writers[entry.log]
  }

  /**
   * Once per process: the generating side and the reading side ask for the same entry at the same time. `isNew`: nobody else
   * can have opened it.
   */
  open(request: Omit<OpenRequest, 'log'>, isNew: boolean): Promise<OpenedStream> {
    const known = this.#opening.get(request.id)
    if (known !== undefined) return known
    const entry = this.#open(request, isNew).finally(() => this.#opening.delete(request.id))
    this.#opening.set(request.id, entry)
    return entry
  }

  async #open(request: Omit<OpenRequest, 'log'>, isNew: boolean): Promise<OpenedStream> {
    // An existing stream keeps its mark, or stays without it.
    const known = isNew ? null : await this.registry.find(request.id)
    if (known !== null) return { ...known, created: false }
    return this.registry.open({ ...request, log: await this.#newLog(request.id) })
  }

  /** A log that does not take the mark would not take chunks either. */
  async #newLog(id: string): Promise<LogName> {
    if (this.#redis === null || !this.#redis.isUp) return 'postgres'
    try {
      await this.#redis.marks.begin(id)
      return 'redis'
    } catch (fault) {
      if (fault instanceof LogFault) return 'postgres'
      throw fault
    }
  }

  /** What the log has now; undefined: this process has no such log. Throws `LogFault`. */
  async currentHead({ key, log }: StreamEntry): Promise<{ last: number; end: EndKind | null } | undefined> {
    return (log === 'postgres' ? this.#storeLog : this.#redis)?.head(key)
  }

  /** As of the entry if the log is the store's own. */
  async headOf(entry: StreamEntry): Promise<{ last: number; end: EndKind | null } | 'lost' | 'unreachable'> {
    if (entry.log === 'postgres') return { last: entry.last, end: entry.ended }
    try {
      const head = await this.currentHead(entry)
      if (head === undefined) return 'unreachable'
      return head.last === 0 && (await this.#hasLost(entry)) ? 'lost' : head
    } catch (fault) {
      if (fault instanceof LogFault) return 'unreachable'
      throw fault
    }
  }

  /** Whether its log is lost or unreachable. */
  async isGone(entry: StreamEntry): Promise<boolean> {
    try {
      return await this.#hasLost(entry)
    } catch (fault) {
      if (fault instanceof LogFault) return true
      throw fault
    }
  }

  async #hasLost({ key, log }: StreamEntry): Promise<boolean> {
    return log === 'redis' && (await this.#redis?.marks.isLost(key.id)) === true
  }

  /** Writes an end after `last`, for a stream that is not generated here. */
  async endAt(entry: StreamEntry, last: number, kind: EndKind, text: string): Promise<Written> {
    const writer = this.writerOf(entry)
    if (writer === undefined) return 'failed'
    const written = await writer.open(entry.key, last, { ring: true }).end(kind, text)
    if (written === 'written' && entry.log !== 'postgres') await this.registry.ended(entry.key.id, kind)
    return written
  }

  /** Another process reads it: it is notified of what is written here from now on. */
  ring(id: string): void {
    for (const writer of Object.values(this.#writers)) writer.ring(id)
  }

  /** Returns what ends it. */
  startSweep(): () => Promise<void> {
    const { retentionMs, longestMs } = this.#times
    const batch = async () => {
      const { streams, partitions, isFull } = await this.registry.sweep(retentionMs, longestMs)
      return { removed: { streams, stream_partitions: partitions }, isFull }
    }
    return this.#intake.sweeps.add({ name: 'streams', everyMs: sweepMs, batch })
  }

  /** Nothing is generated any more. */
  async closeWriters(): Promise<void> {
    await Promise.all(Object.values(this.#writers).map((writer) => writer.close()))
    this.relay.close()
  }

  async close(): Promise<void> {
    await this.#redis?.close()
    await this.#storeLog.close()
  }
}
