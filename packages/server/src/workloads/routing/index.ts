/** Routing: policies decide tasks, behind a broker, with backpressure that sheds at the gateway (contract §5). */
import { Answers } from './answers.js'
import { Burials, ticketOf } from './burials.js'
import type { RoutingDeps } from './deps.js'
import { Gateway } from './gateway.js'
import { Policies } from './policies.js'
import { Processing } from './processing.js'
import { Registry } from './registry.js'
import { Router } from './router.js'
import { RouterWatch } from './router-watch.js'
import { Signals } from './signals.js'

export type { RoutingDeps } from './deps.js'
export { routingMounts, routingRoutes } from './routes.js'

export interface RoutingWorkload {
  deps: RoutingDeps
  gateway: Gateway
  policies: Policies
  registry: Registry
  answers: Answers
  start(): void
  /** Takes no more messages, and finishes those it has. */
  stop(): Promise<void>
  /** Call it while the store is still open. */
  close(): Promise<void>
}

const levelCheckMs = 250

export function defineRouting(deps: RoutingDeps): RoutingWorkload {
  const { intake, schema, settings, log, broker } = deps
  const policies = new Policies({ intake, schema, log })
  const registry = new Registry({ intake, schema })
  const answers = new Answers({ intake, schema, keyTtlMs: settings.keyTtlMs })
  const signals = new Signals(deps)
  const processing = new Processing({
    book: () => policies.loaded,
    answers,
    simulateDelayMs: settings.simulateDelayMs,
    onLost: (fault) => log.warn({ err: fault }, 'a decision was told, but could not be kept for those who ask later'),
  })
  const burials = new Burials({ intake, schema })
  const gateway = new Gateway(deps, { processing, signals, answers, burials, canDecide: () => policies.isLoaded })
  const router = new Router(deps, { processing, signals, burials })
  broker?.onExhausted({
    keep: async (message) => {
      const ticket = ticketOf(message)
      const { letter, detail } = message
      if (ticket !== null) await burials.keep({ ticket, letter, error: `internal_error: It was ${detail}.` })
    },
    buried: ({ reason, storedAtMs }) => {
      deps.metrics.buried(reason).inc()
      signals.diedUnheld(Math.max(0, Date.now() - storedAtMs))
    },
  })
  const isHere = settings.isRouter || broker === null
  const watch =
    isHere || settings.metricsUrls.length === 0
      ? null
      : new RouterWatch({
          ...{ urls: settings.metricsUrls, intervalMs: settings.checkIntervalMs, timeoutMs: settings.checkTimeoutMs },
          critical: {
            ...{ backlog: settings.bounds.backlog[1], latencyMs: settings.bounds.latencyMs[1] },
            inFlight: settings.bounds.inFlight[1],
          },
          onStatus: (status) => gateway.heard(status),
          log,
        })
  let timer: NodeJS.Timeout | undefined
  let isStopped = false
  /** Not earlier: every delivery counts as an attempt, and without policies none can succeed. */
  const take = (): void => {
    if (isStopped) return
    if (broker === null) intake.core.wakeAll()
    else if (settings.isRouter) router.start()
  }
  return {
    ...{ deps, gateway, policies, registry, answers },
    start() {
      gateway.showLevel()
      void policies.start()
      answers.start()
      watch?.start()
      if (!isHere) return
      intake.core.fleet.tells.set('router', () => settings.concurrency)
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
      await answers.close()
      await policies.close()
      await broker?.close()
    },
  }
}
