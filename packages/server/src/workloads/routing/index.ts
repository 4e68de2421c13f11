/** Routing: policies decide tasks, behind a broker, with backpressure that sheds at the gateway (docs/guides/routing.md). */
import { type Periodic, periodic } from 'spillway/workload'
import type { CheckState } from '../../health.js'
import type { Workload } from '../../workload.js'
import { keepBurial } from './burials.js'
import { type RoutingContext, type RoutingParts, routingContext } from './context.js'
import { DecisionStore } from './decision-store.js'
import { Gateway } from './gateway.js'
import { routingSql } from './generated/sql.js'
import { Policies } from './policies.js'
import { Router } from './router.js'
import { RouterWatch } from './router-watch.js'
import { routingRoutes, taskRoutes } from './routes.js'
import { Signals } from './signals.js'

const brokerRoutes = ['/api/v1/routes/decide', '/api/v1/routes/dead-letters']
const levelCheckMs = 250

export const routing: Workload = {
  name: 'routing',
  sql: routingSql,
  define: (workloadContext) => {
    const context = routingContext(workloadContext)
    const { config, intake, schema, settings, broker, isRoutedHere } = context
    const policies = new Policies(context)
    const keyTtlMs = config.operations.idempotencyTtlHours * 3_600_000
    const decisions = new DecisionStore({ intake, schema, keyTtlMs })
    const signals = new Signals(context)
    const parts = { ...context, policies, decisions, signals }
    const gateway = new Gateway(parts)
    const router = new Router(parts)
    const watch = routerWatch(context, gateway)
    noteExhausted(parts)
    let showing: Periodic | undefined
    return {
      checks: checksOf(context),
      routes: async (add) => {
        for (const route of taskRoutes(gateway)) add.mounted(route)
        await add.plugin(routingRoutes(parts, gateway))
      },
      start: () => {
        gateway.showLevel()
        void policies.start()
        decisions.start()
        watch?.start()
        if (!isRoutedHere) return
        intake.fleet.report('router', () => settings.concurrency)
        signals.start()
        // The level is local: the gateway polls it, nobody notifies.
        showing = periodic(levelCheckMs, () => gateway.showLevel())
        // Not earlier: every delivery counts as an attempt, and without policies none can succeed.
        void policies.loaded.then(() => router.start())
      },
      drain: async () => {
        void showing?.stop()
        watch?.stop()
        await router.stop()
        signals.stop()
      },
      close: async () => {
        await decisions.close()
        await policies.close()
        await broker?.close()
      },
    }
  },
}

function checksOf({ broker, config }: RoutingContext): Record<string, () => CheckState> {
  if (broker === null) return {}
  const nats = (): CheckState => {
    if (broker.isConnected) return { ok: true }
    return {
      ok: false,
      detail: `${broker.trouble ?? 'NATS does not answer'}; decide is refused`,
      routes: brokerRoutes,
      // Only a router is useless without the broker. Other roles accept work and do it here, or when the broker is back.
      optional: config.process.roles.some((role) => role !== 'router'),
    }
  }
  return { nats }
}

/** Messages that the broker stopped delivering: their tickets fail, and they are counted. */
function noteExhausted(parts: RoutingParts): void {
  const { broker, metrics, signals } = parts
  broker?.onExhausted({
    keep: (message) => keepBurial(parts, message, message.letter, `internal_error: It was ${message.detail}.`),
    buried: ({ reason, storedAtMs }) => {
      metrics.buried(reason).inc()
      signals.diedUnheld(Math.max(0, Date.now() - storedAtMs))
    },
  })
}

/** Null: the routers are here, or their addresses are not configured. */
function routerWatch({ settings, bounds, isRoutedHere, log }: RoutingContext, gateway: Gateway): RouterWatch | null {
  const { metricsUrls: urls, checkIntervalSeconds, checkTimeoutMs: timeoutMs } = settings
  if (isRoutedHere || urls === null) return null
  return new RouterWatch({
    ...{ urls, timeoutMs, log, intervalMs: checkIntervalSeconds * 1_000 },
    critical: { backlog: bounds.backlog[1], latencyMs: bounds.latencyMs[1], inFlight: bounds.inFlight[1] },
    onStatus: (status) => gateway.heard(status),
  })
}
