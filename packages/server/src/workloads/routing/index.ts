/** Routing: policies decide tasks, behind a broker, with backpressure that sheds at the gateway (docs/guides/routing.md). */
import type { CheckState } from '../../health.js'
import type { Workload } from '../../workload.js'
import { Burials, ticketOf } from './burials.js'
import { DecisionStore } from './decision-store.js'
import { Gateway } from './gateway.js'
import { routingSql } from './generated/sql.js'
import { type RoutingDeps, routingParts } from './parts.js'
import { Policies } from './policies.js'
import { Processing } from './processing.js'
import { Registry } from './registry.js'
import { Router } from './router.js'
import { RouterWatch } from './router-watch.js'
import { routingRoutes, taskRoutes } from './routes.js'
import { Signals } from './signals.js'

const brokerRoutes = ['/api/v1/routes/decide', '/api/v1/routes/dead-letters']

export const routing: Workload = {
  name: 'routing',
  sql: routingSql,
  define: (context) => {
    const deps = routingParts(context)
    const workload = defineRouting(deps)
    return {
      checks: checksOf(deps, context.config.process.roles),
      routes: async (add) => {
        for (const route of taskRoutes(workload)) add.mounted(route)
        await add.plugin(routingRoutes(workload))
      },
      start: () => workload.start(),
      drain: () => workload.stop(),
      close: () => workload.close(),
    }
  },
}

function checksOf({ broker }: RoutingDeps, roles: readonly string[]): Record<string, () => CheckState> {
  if (broker === null) return {}
  const nats = (): CheckState => {
    if (broker.isConnected) return { ok: true }
    return {
      ok: false,
      detail: `${broker.trouble ?? 'NATS does not answer'}; decide is refused`,
      routes: brokerRoutes,
      // Only a router is useless without the broker. Other roles accept work and do it here, or when the broker is back.
      optional: roles.some((role) => role !== 'router'),
    }
  }
  return { nats }
}

export interface RoutingWorkload {
  deps: RoutingDeps
  gateway: Gateway
  policies: Policies
  registry: Registry
  decisions: DecisionStore
  start(): void
  /** Takes no more messages, and finishes those it has. */
  stop(): Promise<void>
  /** Call it while the store is still open. */
  close(): Promise<void>
}

const levelCheckMs = 250

function defineRouting(deps: RoutingDeps): RoutingWorkload {
  const { intake, schema, settings, log, broker } = deps
  const policies = new Policies({ intake, schema, log })
  const registry = new Registry({ intake, schema })
  const decisions = new DecisionStore({ intake, schema, keyTtlMs: settings.keyTtlMs })
  const signals = new Signals(deps)
  const processing = new Processing({
    book: () => policies.loaded,
    decisions,
    simulateDelayMs: settings.simulateDelayMs,
    onLost: (fault) =>
      log.warn({ err: fault }, 'a decision was sent but could not be stored; later reads will not find it'),
  })
  const burials = new Burials({ intake, schema })
  const gateway = new Gateway(deps, { processing, signals, decisions, burials, canDecide: () => policies.isLoaded })
  const router = new Router(deps, { processing, signals, burials })
  noteExhausted(deps, burials, signals)
  const isHere = settings.isRouter || broker === null
  const watch = isHere ? null : routerWatch(deps, gateway)
  let timer: NodeJS.Timeout | undefined
  let isStopped = false
  /** Not earlier: every delivery counts as an attempt, and without policies none can succeed. */
  const take = (): void => {
    if (isStopped) return
    if (broker === null) intake.wakeAll()
    else if (settings.isRouter) router.start()
  }
  return {
    ...{ deps, gateway, policies, registry, decisions },
    start() {
      gateway.showLevel()
      void policies.start()
      decisions.start()
      watch?.start()
      if (!isHere) return
      intake.fleet.report('router', () => settings.concurrency)
      signals.start()
      // The level is local: the gateway polls it, nobody notifies.
      timer = setInterval(() => gateway.showLevel(), levelCheckMs)
      timer.unref()
      void policies.loaded.then(take)
    },
    async stop() {
      isStopped = true
      clearInterval(timer)
      watch?.stop()
      await router.stop()
      signals.stop()
    },
    async close() {
      await decisions.close()
      await policies.close()
      await broker?.close()
    },
  }
}

/** Messages that the broker stopped delivering: their tickets fail, and they are counted. */
function noteExhausted({ broker, metrics }: RoutingDeps, burials: Burials, signals: Signals): void {
  broker?.onExhausted({
    keep: async (message) => {
      const ticket = ticketOf(message)
      const { letter, detail } = message
      if (ticket !== null) await burials.keep({ ticket, letter, error: `internal_error: It was ${detail}.` })
    },
    buried: ({ reason, storedAtMs }) => {
      metrics.buried(reason).inc()
      signals.diedUnheld(Math.max(0, Date.now() - storedAtMs))
    },
  })
}

/** Null: no addresses of routers are configured. */
function routerWatch({ settings, log }: RoutingDeps, gateway: Gateway): RouterWatch | null {
  const { bounds, metricsUrls: urls, checkIntervalMs: intervalMs, checkTimeoutMs: timeoutMs } = settings
  if (urls.length === 0) return null
  return new RouterWatch({
    ...{ urls, intervalMs, timeoutMs, log },
    critical: { backlog: bounds.backlog[1], latencyMs: bounds.latencyMs[1], inFlight: bounds.inFlight[1] },
    onStatus: (status) => gateway.heard(status),
  })
}
