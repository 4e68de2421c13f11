/** Builds the parts of the generation workload from the settings. */
import { limits } from '@spillway/protocol/wire'
import type { Config } from '../../config/index.js'
import { SseHub } from '../../traffic/sse.js'
import type { WorkloadContext } from '../../workload.js'
import { demoModel } from './demo-model.js'
import { createGenerationMetrics } from './metrics.js'
import { streamLogs } from './stream-logs.js'
import { openAiUpstream } from './upstream-openai.js'

export type GenerationDeps = ReturnType<typeof generationParts>

export function generationParts(context: WorkloadContext) {
  const { config, intake, log, version } = context
  const { upstreamUrl: url, upstreamKey: key, concurrency, ...own } = config.generation
  const metrics = createGenerationMetrics(context.registry)
  return {
    ...{ intake, log, metrics, settings: settingsOf(config) },
    ...streamLogs(context),
    sse: new SseHub({
      heartbeatMs: own.heartbeatSeconds * 1_000,
      stallMs: own.stallSeconds * 1_000,
      onStalled: () => metrics.slowReadersClosed.inc(),
    }),
    upstream:
      url === null
        ? demoModel({ tokensPerSecond: own.demoTokensPerSecond })
        : openAiUpstream({ url, key, version, connectionsMax: concurrency }),
  }
}

function settingsOf({ generation: own, server }: Config) {
  return {
    /** Maximum generations running in this process. */
    concurrency: own.concurrency,
    pool: { perIdentity: own.poolPerUser, total: own.poolGlobal },
    failover: {
      enabled: own.failoverEnabled,
      /** From acceptance to the first token, for queued generations. */
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
    /** How long a native generation continues without a reader. */
    detachGraceMs: own.detachGraceSeconds * 1_000,
    chatBodyBytes: Math.max(limits.chatBodyBytes, server.bodyLimitBytes),
    /** How long running generations may continue after the process is asked to stop. */
    drainMs: server.drainSeconds * 1_000,
  }
}
