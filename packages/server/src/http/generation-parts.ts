/** Builds the generation workload's dependencies from the settings: modules that a workload does not import itself. */
import { limits } from '@spillway/protocol/wire'
import type { IntakeApi, OutputOf, StreamLog, SweptBatch } from 'spillway/workload'
import { LogWriter, Relay } from 'spillway/workload'
import { connectRedis } from '../brokers/redis/index.js'
import type { Config } from '../config/index.js'
import { createGenerationMetrics } from '../telemetry/generation-metrics.js'
import type { Logger } from '../telemetry/logs.js'
import type { Metrics } from '../telemetry/metrics.js'
import { version } from '../version.js'
import { demoModel, type GenerationDeps, openAiUpstream } from '../workloads/generation/index.js'
import type { CheckState } from './health.js'
import { SseHub } from './sse.js'

/** Less than a lease: after that another process ends the stream. */
const storePatienceMs = 10_000
/** Short: without Redis its streams end and new ones are kept elsewhere. Long enough for a busy Redis to answer. */
const redisPatienceMs = 2_000
const sweepMs = 60_000

export interface GenerationParts {
  deps: GenerationDeps
  /** The output of operations, for callers that follow one. */
  outputOf: OutputOf
  /** Null without Redis. It is not needed to accept work. */
  redis: (() => CheckState) | null
  start(): void
  /** Call when nothing is written any more. */
  close(): Promise<void>
}

export function generationParts(
  config: Config,
  parts: { api: IntakeApi; metrics: Metrics; log: Logger },
): GenerationParts {
  const { api, log } = parts
  const { generation: own, server, store: stored } = config
  const metrics = createGenerationMetrics(parts.metrics.registry)
  const retentionMs = own.retentionSeconds * 1_000
  // From acceptance to the end: waiting, starting, streaming.
  const longestMs = (own.failoverTimeoutSeconds + own.firstTokenSeconds + own.totalSeconds) * 1_000
  const { log: storeLog, registry } = api.core.store.streams({ retentionMs, longestMs })
  const redis =
    own.redisUrl === null
      ? null
      : connectRedis({ url: own.redisUrl, prefix: stored.schema, retentionMs, longestMs, log })
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
  const sse = new SseHub({
    heartbeatMs: own.heartbeatSeconds * 1_000,
    stallMs: own.stallSeconds * 1_000,
    onStalled: () => metrics.slowReadersClosed.inc(),
  })
  let stopSweep = async (): Promise<void> => undefined
  const batch = async (): Promise<SweptBatch> => {
    const { streams, partitions, isFull } = await registry.sweep(retentionMs, longestMs)
    return { removed: { streams, stream_partitions: partitions }, isFull }
  }
  return {
    deps: {
      ...{ intake: api, registry, relay, sse, metrics, log },
      settings: {
        concurrency: own.concurrency,
        pool: { perIdentity: own.poolPerUser, total: own.poolGlobal },
        failover: {
          enabled: own.failoverEnabled,
          timeoutMs: own.failoverTimeoutSeconds * 1_000,
          retriesMax: own.failoverRetriesMax,
          baseDelayMs: own.failoverBaseDelayMs,
          maxDelayMs: own.failoverMaxDelayMs,
          depthMax: own.failoverDepthMax,
        },
        limits: {
          firstTokenMs: own.firstTokenSeconds * 1_000,
          idleMs: own.idleSeconds * 1_000,
          totalMs: own.totalSeconds * 1_000,
        },
        detachGraceMs: own.detachGraceSeconds * 1_000,
        chatBodyBytes: Math.max(limits.chatBodyBytes, server.bodyLimitBytes),
        drainMs: server.drainSeconds * 1_000,
      },
      upstream:
        own.upstreamUrl === null
          ? demoModel({ tokensPerSecond: own.demoTokensPerSecond })
          : openAiUpstream({
              ...{ url: own.upstreamUrl, key: own.upstreamKey, version, connectionsMax: own.concurrency },
            }),
      logOf: (name) => {
        if (name === 'postgres') return { log: storeLog, writer: postgresWriter }
        return redis === null || redisWriter === null ? null : { log: redis, writer: redisWriter }
      },
      newLog: () => (redis?.isUp === true ? 'redis' : 'postgres'),
    },
    outputOf: async (id, after) => {
      const entry = await registry.find(id)
      return entry === null ? null : relay.follow(entry.key, entry.log, after)
    },
    redis: redis === null ? null : () => ({ ...redis.check(), optional: true }),
    start() {
      stopSweep = api.core.sweeps.add({ name: 'streams', everyMs: sweepMs, batch })
    },
    async close() {
      await stopSweep()
      sse.close()
      await redis?.close()
      await storeLog.close()
    },
  }
}
