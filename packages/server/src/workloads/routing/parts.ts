/** Builds the parts of the routing workload from the settings. */
import type { Intake } from 'spillway/workload'
import { LatencyWindow, LevelHold, RouterPressure } from 'spillway/workload'
import { connectNats } from '../../brokers/nats/index.js'
import type { RouterBroker } from '../../brokers/port.js'
import type { WorkloadContext } from '../../workload.js'
import { createRoutingMetrics } from './metrics.js'

/** The broker's names. Without a broker the operation queue uses the same names. */
const subjectDefault = 'beamline.router.v1.decide'
const queueConsumer = 'operation-queue'
/** Like the levels: 3 s, less a margin for early samples. */
const alertHoldMs = 2_900

export type RoutingDeps = ReturnType<typeof routingParts>

export function routingParts(context: WorkloadContext) {
  const { config, intake, schema, log, isAuthenticated, registry } = context
  const { alerts, objectives } = context.offers
  if (alerts === undefined || objectives === undefined) throw new Error('routing needs alerts and objectives')
  const { routing, process: own, server, operations } = config
  const broker: RouterBroker | null =
    routing.natsUrls === null
      ? null
      : connectNats({ url: routing.natsUrls.join(','), maxDeliver: routing.maxDeliver, log })
  const bounds = {
    backlog: [routing.queueWarn, routing.queueCrit, routing.queueOverload],
    latencyMs: [routing.latencyWarnMs, routing.latencyCritMs, routing.latencyOverloadMs],
    inFlight: [routing.inflightWarn, routing.inflightCrit, routing.inflightOverload],
  } as const
  const subject = broker?.subject ?? subjectDefault
  return {
    ...{ intake, schema, broker, alerts, objectives, log, subject },
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
      isAuthenticated,
    },
    /** The concurrency of all routers together, as far as this process knows. */
    routersConcurrency: () => intake.fleet.sumOf('router'),
    /** Null: unknown. */
    backlog: () => (broker === null ? queueBacklog(intake) : broker.backlog()),
    pressure: new RouterPressure({ bounds, policy: routing.policy }),
    latency: new LatencyWindow(),
    makeHold: () => new LevelHold(alertHoldMs),
    metrics: createRoutingMetrics(registry, { subject, consumer: broker?.consumer ?? queueConsumer }),
  }
}

/** Without a broker: the operations waiting in the queue, and those that its workers hold. */
async function queueBacklog({ fleet }: Intake): Promise<{ pending: number; ackPending: number }> {
  const all = [fleet.countsOf('routing.decide'), fleet.countsOf('routing.message')]
  return {
    pending: all.reduce((sum, { pending }) => sum + pending, 0),
    ackPending: all.reduce((sum, { running }) => sum + running, 0),
  }
}
