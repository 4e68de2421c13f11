/** Builds the routing workload's dependencies from the settings: modules that a workload does not import itself. */

import type { IntakeApi } from 'spillway/workload'
import { LatencyWindow, LevelHold, RouterPressure } from 'spillway/workload'
import type { RouterBroker } from '../brokers/port.js'
import { type Config, isAuthenticationOn } from '../config/index.js'
import type { Logger } from '../telemetry/logs.js'
import type { Metrics } from '../telemetry/metrics.js'
import { createRoutingMetrics } from '../telemetry/routing-metrics.js'
import type { RoutingDeps } from '../workloads/routing/index.js'

/** The broker's names. Without a broker the operation queue uses the same names. */
const subjectDefault = 'beamline.router.v1.decide'
const queueConsumer = 'operation-queue'
/** Like the levels: 3 s, less a margin for early samples. */
const alertHoldMs = 2_900

export interface RoutingParts {
  api: IntakeApi
  schema: string
  broker: RouterBroker | null
  alerts: RoutingDeps['alerts']
  objectives: RoutingDeps['objectives']
  metrics: Metrics
  log: Logger
}

export function routingDepsOf(config: Config, parts: RoutingParts): RoutingDeps {
  const { api, schema, broker, alerts, objectives, metrics, log } = parts
  const { routing, process: own, server, auth, operations } = config
  const bounds = {
    backlog: [routing.queueWarn, routing.queueCrit, routing.queueOverload],
    latencyMs: [routing.latencyWarnMs, routing.latencyCritMs, routing.latencyOverloadMs],
    inFlight: [routing.inflightWarn, routing.inflightCrit, routing.inflightOverload],
  } as const
  const subject = broker?.subject ?? subjectDefault
  return {
    ...{ intake: api, schema, broker, alerts, objectives, log, subject },
    settings: {
      isRouter: own.roles.includes('router'),
      isGateway: own.roles.includes('gateway'),
      maxDeliver: routing.maxDeliver,
      concurrency: routing.concurrency,
      simulateDelayMs: routing.simulateDelayMs,
      retryAfterSeconds: routing.retryAfterSeconds,
      bounds,
      metricsUrls: routing.metricsUrls ?? [],
      checkIntervalMs: routing.checkIntervalSeconds * 1_000,
      checkTimeoutMs: routing.checkTimeoutMs,
      perMinute: {
        decide: routing.decidePerMinute,
        messages: routing.messagesPerMinute,
        registry: routing.registryPerMinute,
      },
      rateReduction: routing.rateReduction,
      rateMin: routing.rateMin,
      bodyLimitBytes: server.bodyLimitBytes,
      pageBytesMax: server.pageBytesMax,
      keyTtlMs: operations.idempotencyTtlHours * 3_600_000,
      isAuthenticated: isAuthenticationOn(auth),
    },
    routersConcurrency: () => api.core.fleet.sumOf('router'),
    backlog: () => (broker === null ? queueBacklog(api) : broker.backlog()),
    pressure: new RouterPressure({ bounds, policy: routing.policy }),
    latency: new LatencyWindow(),
    makeHold: () => new LevelHold(alertHoldMs),
    metrics: createRoutingMetrics(metrics.registry, { subject, consumer: broker?.consumer ?? queueConsumer }),
  }
}

/** Without a broker: the operations waiting in the queue, and those that its workers hold. */
async function queueBacklog({ core }: IntakeApi): Promise<{ pending: number; ackPending: number }> {
  const all = [core.fleet.countsOf('routing.decide'), core.fleet.countsOf('routing.message')]
  return {
    pending: all.reduce((sum, { pending }) => sum + pending, 0),
    ackPending: all.reduce((sum, { running }) => sum + running, 0),
  }
}
