/** The ready server, assembled from the configuration: a loop over the workloads, with one order of starting and closing. */
import { resolve } from 'node:path'
import { startEmbedded } from '@spillway/embedded-postgres'
import { Intake, intakeDefaults, postgresStore, ticketRoutes, withDeadline } from 'spillway/workload'
import { type BuiltApp, buildApp } from './app.js'
import { type Authenticator, createAuthenticator } from './auth/auth.js'
import { type Config, isLoopbackHost } from './config/index.js'
import { addDemoEcho } from './demo/echo.js'
import { addDemoPage } from './demo/page.js'
import { addHealth, type CheckState } from './health.js'
import { addLanding } from './landing.js'
import type { Logger } from './logs.js'
import { addOpenApi } from './openapi.js'
import { createMetrics, type Metrics } from './prometheus/metrics.js'
import { version } from './version.js'
import type { DefinedWorkload, Offers, WorkloadContext } from './workload.js'
import { workloadSql, workloads } from './workload-list.js'

export interface RunningServer {
  /** Origin, e.g. http://127.0.0.1:7745; empty when it does not listen. */
  address: string
  /** Rejects when the start can never succeed. The message says why. */
  started: Promise<void>
  close(): Promise<void>
}

const closeGraceMs = 2_000
const notReached = 'the database cannot be reached yet'
const allRoutes = ['/api/v1/*', '/v1/*']

export async function runServer(config: Config, log: Logger): Promise<RunningServer> {
  const metrics = createMetrics()
  const isLoopback = isLoopbackHost(config.server.host)
  let intake: Intake | undefined
  let origin = ''
  const authenticator = createAuthenticator({
    ...config.auth,
    trustedProxies: config.server.trustedProxies,
    onFault: (fault) => log.error({ err: fault }, 'authentication is impaired'),
  })
  const built = appOf(config, log, authenticator, metrics, () => intake?.isDraining ?? false)
  const embedded =
    config.store.url === null ? await startEmbedded({ dataDir: resolve(config.store.dataDir), log }) : null
  const store = storeOf(config, embedded?.url ?? config.store.url ?? '', log)
  intake = new Intake({ store, settings: settingsOf(config), log, metrics, door: built.door })
  const defined = defineAll({
    ...{ config, intake, schema: `"${config.store.schema}"`, log, registry: metrics.registry },
    ...{ buffers: built.buffers, version, isAuthenticated: authenticator.enabled, isLoopback, origin: () => origin },
  })
  await addRoutes(built, config, intake, metrics, defined)
  const close = async (): Promise<void> => {
    await closeAll(intake, built.app, defined.all)
    await embedded?.stop()
  }
  try {
    if (config.listen) {
      origin = await built.app.listen({ host: config.server.host, port: config.server.port, backlog: 4_096 })
    }
  } catch (fault) {
    await embedded?.stop()
    throw listenFault(fault, config)
  }
  for (const one of defined.all) one.start?.()
  const started = intake.start()
  started.catch((fault: unknown) => log.fatal({ err: fault }, 'the database cannot be used; this process ends'))
  // The embedded store runs already: wait for it, so that the first request after the greeting succeeds.
  if (embedded !== null) {
    await started.catch(async (fault: unknown) => {
      await close()
      throw fault
    })
  }
  return { address: origin, started, close }
}

function appOf(
  { server }: Config,
  log: Logger,
  authenticator: Authenticator,
  metrics: Metrics,
  draining: () => boolean,
): BuiltApp {
  const built = buildApp({
    ...server,
    ...{ log, authenticator, draining },
    onAnswer: (route, method, status, durationMs) => {
      metrics.httpRequests.labels(route, method, String(status)).inc()
      metrics.httpDuration.labels(route).observe(durationMs / 1_000)
    },
    onBufferRefused: (kind) => metrics.bufferRefusals.labels(kind).inc(),
    onUnreadClosed: () => metrics.unreadAnswers.inc(),
  })
  metrics.readBuffers(built.buffers.budget)
  return built
}

function storeOf({ store }: Config, url: string, log: Logger) {
  const { dataDir: _, listenUrl, ...settings } = store
  return postgresStore({ ...settings, url, ...(listenUrl !== null && { listenUrl }), sql: workloadSql, log })
}

interface Defined {
  all: readonly DefinedWorkload[]
  offers: Partial<Offers>
}

function defineAll(context: Omit<WorkloadContext, 'offers'>): Defined {
  const offers: Partial<Offers> = {}
  const all = workloads.map((workload) => {
    const one = workload.define({ ...context, offers })
    Object.assign(offers, one.offers)
    return one
  })
  return { all, offers }
}

async function addRoutes(
  { app, mounted, readBody }: BuiltApp,
  config: Config,
  intake: Intake,
  metrics: Metrics,
  { all, offers }: Defined,
): Promise<void> {
  addOpenApi(app, version)
  addHealth(app, {
    version,
    checks: Object.assign(intakeChecks(intake), ...all.map(({ checks }) => checks)),
    metrics: { contentType: metrics.contentType, render: () => metrics.scrape() },
    protectMetrics: config.auth.protectMetrics,
  })
  // A process without the gateway role has health and metrics only, and accepts no work.
  if (config.process.roles.includes('gateway')) {
    const plugin = async (routes: unknown): Promise<void> => void (await app.register(routes as never))
    const { pageBytesMax } = config.server
    const namedTypes = all.flatMap((one) => one.namedTypes ?? [])
    const { outputOf } = offers
    await plugin(ticketRoutes(intake, { ...(outputOf && { outputOf }), namedTypes, pageBytesMax }))
    for (const one of all) await one.routes?.({ mounted, plugin })
  }
  if (isLoopbackHost(config.server.host)) addDemoEcho(app, readBody)
  addDemoPage(app)
  addLanding(app, version)
}

function intakeChecks(intake: Intake): Record<string, () => CheckState> {
  return {
    store: () => {
      const fault = intake.presence.isReady ? intake.store.acceptFault() : new Error(notReached)
      return fault === null ? { ok: true } : { ok: false, detail: fault.message, routes: allRoutes }
    },
    accepting: () =>
      intake.isDraining ? { ok: false, detail: 'this instance is shutting down', routes: allRoutes } : { ok: true },
  }
}

/**
 * Refuses new work first. Requests in progress get their answers before the connections close, and workloads write their last
 * data before the store closes.
 */
async function closeAll(intake: Intake, app: BuiltApp['app'], defined: readonly DefinedWorkload[]): Promise<void> {
  intake.drain()
  await Promise.all([...defined.map((one) => one.drain?.()), intake.stop()])
  await withDeadline(app.close(), closeGraceMs, () => undefined)
  app.server.closeAllConnections()
  await Promise.all(defined.map((one) => one.close?.()))
  await intake.close()
}

function settingsOf(config: Config) {
  const { operations, admission } = config
  return {
    ...intakeDefaults,
    // A process without workers runs what it can run at once.
    role: config.process.roles.includes('worker') ? ('both' as const) : ('direct' as const),
    concurrency: operations.concurrency,
    leaseMs: operations.leaseSeconds * 1_000,
    directWaitMs: operations.directWaitMs,
    retryBaseMs: operations.retryBaseMs,
    retryMaxMs: operations.retryMaxMs,
    retentionMs: operations.retentionSeconds * 1_000,
    idempotencyTtlMs: operations.idempotencyTtlHours * 3_600_000,
    pendingMax: operations.pendingMax,
    acceptWaitBudgetMs: admission.acceptWaitBudgetMs,
    busyQueueAbove: admission.busyQueueAbove,
    storeTimeoutMs: config.store.timeoutMs,
    drainMs: config.server.drainSeconds * 1_000,
    pressureLoopDelayMs: admission.pressureLoopDelayMs,
    pressureInflightMax: admission.pressureInflightMax,
  }
}

class ListenError extends Error {
  override readonly name = 'ListenError'
  readonly code = 'listen_failed'
}

function listenFault(fault: unknown, config: Config): unknown {
  const code = typeof fault === 'object' && fault !== null && 'code' in fault ? fault.code : undefined
  const place = `${config.server.host}:${config.server.port}`
  if (code === 'EADDRINUSE') {
    return new ListenError(
      `Something listens on ${place} already, perhaps another Spillway. Stop it, or set SPILLWAY_PORT to another port (0 takes a free one).`,
      { cause: fault },
    )
  }
  if (code === 'EACCES' || code === 'EADDRNOTAVAIL') {
    return new ListenError(`This process may not listen on ${place}. Set SPILLWAY_HOST and SPILLWAY_PORT.`, {
      cause: fault,
    })
  }
  return fault
}
