/** What all parts of the routing workload use. */
import { RouterBroker } from '../../brokers/nats/broker.js'
import type { WorkloadContext } from '../../workload.js'
import type { DecisionStore } from './decision-store.js'
import { createRoutingMetrics } from './metrics.js'
import type { Policies } from './policies.js'
import type { Signals } from './signals.js'

/** The broker's names. Without a broker the operation queue uses the same names. */
const subjectDefault = 'beamline.router.v1.decide'
const queueConsumer = 'operation-queue'

export type RoutingContext = ReturnType<typeof routingContext>

export interface RoutingParts extends RoutingContext {
  policies: Policies
  decisions: DecisionStore
  signals: Signals
}

export function routingContext(context: WorkloadContext) {
  const { config, registry, offers } = context
  const { alerts, objectives } = offers
  if (alerts === undefined || objectives === undefined) throw new Error('routing needs alerts and objectives')
  const { routing: settings, process: own } = config
  const { natsUrls, maxDeliver } = settings
  const broker = natsUrls === null ? null : new RouterBroker({ url: natsUrls.join(','), maxDeliver, log: context.log })
  const subject = broker?.subject ?? subjectDefault
  const isRouter = own.roles.includes('router')
  return {
    ...context,
    ...{ alerts, objectives, settings, broker, subject, isRouter },
    /** The routers are in this process: their level is known without asking. */
    isRoutedHere: isRouter || broker === null,
    /** Of each signal: warn, critical, overload. */
    bounds: {
      backlog: [settings.queueWarn, settings.queueCrit, settings.queueOverload],
      latencyMs: [settings.latencyWarnMs, settings.latencyCritMs, settings.latencyOverloadMs],
      inFlight: [settings.inflightWarn, settings.inflightCrit, settings.inflightOverload],
    } as const,
    metrics: createRoutingMetrics(registry, { subject, consumer: broker?.consumer ?? queueConsumer }),
  }
}
