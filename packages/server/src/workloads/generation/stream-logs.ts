/** Where the output of streams is kept: PostgreSQL, and Redis if there is one. Writers, readers and the sweep of both. */
import type { LogName, OutputOf, StreamLog, SweptBatch } from 'spillway/workload'
import { LogWriter, Relay } from 'spillway/workload'
import { RedisStreams } from '../../brokers/redis/index.js'
import type { CheckState } from '../../health.js'
import type { WorkloadContext } from '../../workload.js'

/** Less than a lease: after that another process ends the stream. */
const storePatienceMs = 10_000
/** Short: without Redis its streams end and new ones are kept elsewhere. Long enough for a busy Redis to answer. */
const redisPatienceMs = 2_000
const sweepMs = 60_000

export function streamLogs({ config, intake, log }: WorkloadContext) {
  const { generation: own, store } = config
  const retentionMs = own.retentionSeconds * 1_000
  // From acceptance to the end: waiting, starting, streaming.
  const longestMs = (own.failoverTimeoutSeconds + own.firstTokenSeconds + own.totalSeconds) * 1_000
  const { log: storeLog, registry } = intake.store.streams({ retentionMs, longestMs })
  const redis =
    own.redisUrl === null
      ? null
      : new RedisStreams({ url: own.redisUrl, prefix: store.schema, retentionMs, longestMs, log })
  const warn = (fields: object, message: string): void => log.warn(fields, message)
  const relay: Relay = new Relay({
    logs: { postgres: storeLog, ...(redis && { redis }) },
    isLocal: (id) => postgresWriter.has(id) || redisWriter?.has(id) === true,
    warn,
  })
  const writerOf = (to: StreamLog, patienceMs: number): LogWriter =>
    new LogWriter({ log: to, patienceMs, warn, onWritten: (key, record) => relay.wrote(key, record) })
  const postgresWriter = writerOf(storeLog, storePatienceMs)
  const redisWriter = redis === null ? null : writerOf(redis, redisPatienceMs)
  for (const each of [storeLog, redis]) each?.onBell((ids) => relay.heard(ids))
  const outputOf: OutputOf = async (id, after) => {
    const entry = await registry.find(id)
    return entry === null ? null : relay.follow(entry.key, entry.log, after)
  }
  const batch = async (): Promise<SweptBatch> => {
    const { streams, partitions, isFull } = await registry.sweep(retentionMs, longestMs)
    return { removed: { streams, stream_partitions: partitions }, isFull }
  }
  return {
    ...{ registry, relay, outputOf },
    /** Null: this process has no such log. */
    logOf: (name: LogName): { log: StreamLog; writer: LogWriter } | null => {
      if (name === 'postgres') return { log: storeLog, writer: postgresWriter }
      return redis === null || redisWriter === null ? null : { log: redis, writer: redisWriter }
    },
    /** The log for new streams. */
    newLog: (): LogName => (redis?.isUp === true ? 'redis' : 'postgres'),
    /** Redis is not needed to accept work. */
    checks: redis === null ? {} : { redis: (): CheckState => ({ ...redis.check(), optional: true }) },
    /** Returns what ends it. */
    startSweep: () => intake.sweeps.add({ name: 'streams', everyMs: sweepMs, batch }),
    /** Call it when nothing is written or read any more. */
    async close() {
      await redis?.close()
      await storeLog.close()
    },
  }
}
