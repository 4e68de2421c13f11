/** The ready server: store, intake, workloads and routes, assembled from the configuration. */
import { resolve } from 'node:path'
import { startEmbedded } from '@spillway/embedded-postgres'
import {
  Executed,
  PetitionReceipt,
  Problem,
  PushRequest,
  Queued,
  SubmitHeaders,
  SubmitPetition,
} from '@spillway/protocol/schema'
import { limits } from '@spillway/protocol/wire'
import type { FastifySchema } from 'fastify'
import { Intake, intakeApi, intakeDefaults, mount, mountedRoute, postgresStore, ticketRoutes } from 'spillway/workload'
import { connectNats } from '../brokers/nats/index.js'
import type { RouterBroker } from '../brokers/port.js'
import { type Config, isAuthenticationOn, isLoopbackHost } from '../config/index.js'
import {
  createAlertMetrics,
  createMessageMetrics,
  createMetrics,
  createObjectiveMetrics,
  createPetitionMetrics,
  type Logger,
} from '../telemetry/index.js'
import { version } from '../version.js'
import { alertRoutes, defineAlerts } from '../workloads/alerts/index.js'
import { defineGeneration, generationRoutes } from '../workloads/generation/index.js'
import { defineHttpRequest, httpRequestBody, httpRequestType } from '../workloads/http-request/index.js'
import { ownAddress, type TargetRules } from '../workloads/http-request/targets.js'
import {
  defineMessages,
  messageAdministrationRoutes,
  messageRoutes,
  pushMount,
  pushType,
} from '../workloads/messages/index.js'
import { defineObjectives, objectiveRoutes } from '../workloads/objectives/index.js'
import { definePetitions, petitionPrefixes, petitionRoutes } from '../workloads/petitions/index.js'
import { defineRouting, routingMounts, routingRoutes } from '../workloads/routing/index.js'
import { buildApp } from './app.js'
import { createAuthenticator } from './auth.js'
import { addDemoEcho } from './demo-echo.js'
import { addDemoPage } from './demo-page.js'
import { generationParts } from './generation-parts.js'
import { addHealth, type CheckState } from './health.js'
import { addLanding } from './landing.js'
import { addOpenApi } from './openapi.js'
import { routingDepsOf } from './routing-parts.js'
import { workloadSql } from './workload-sql.js'

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
const brokerRoutes = ['/api/v1/routes/decide', '/api/v1/routes/dead-letters']

/** A plain schema: the mount builds the answer, so the route does not type it. */
const submitSchema: FastifySchema = {
  tags: ['operations'],
  summary: 'Hand over work: done now, or queued with a ticket',
  description:
    'The target’s 2xx is done; 408, 429, 5xx and the network are retried; the rest is a failure. A redirect within the allowed origins is followed if it repeats the call: 307 and 308, and any of a GET or HEAD. 301, 302 and 303 of another method are a failure.',
  headers: SubmitHeaders,
  body: httpRequestBody,
  response: { 201: Executed, 202: Queued, '4xx': Problem, '5xx': Problem },
}

const petitionSchema: FastifySchema = {
  tags: ['petitions'],
  summary: 'Submit a petition',
  headers: SubmitHeaders,
  body: SubmitPetition,
  response: { 201: PetitionReceipt, 202: Queued, '4xx': Problem, '5xx': Problem },
}

const pushSchema: FastifySchema = {
  tags: ['messages'],
  summary: 'Push messages: 201 when all are stored, 202 when some have to wait their turn',
  headers: SubmitHeaders,
  body: PushRequest,
}

export async function runServer(config: Config, log: Logger): Promise<RunningServer> {
  const metrics = createMetrics()
  const embedded = config.store.url === null
  const url = config.store.url
  let intake: Intake | undefined
  let origin = ''
  const authenticator = createAuthenticator({
    apiKeysPath: config.auth.apiKeysFile ?? undefined,
    jwksUrl: config.auth.jwksUrl ?? undefined,
    jwtSecret: config.auth.jwtSecret ?? undefined,
    jwtIssuer: config.auth.jwtIssuer ?? undefined,
    jwtAudience: config.auth.jwtAudience ?? undefined,
    jwtMaxAgeSeconds: config.auth.jwtMaxAgeSeconds,
    trustedProxies: config.server.trustedProxies,
    onFault: (fault) => log.error({ err: fault }, 'authentication is impaired'),
  })
  const { app, door, shortPath, buffers, readBody } = buildApp({
    log,
    authenticator,
    bodyLimitBytes: config.server.bodyLimitBytes,
    requestTimeoutMs: config.server.requestTimeoutMs,
    headersTimeoutMs: config.server.headersTimeoutMs,
    connectionsMax: config.server.connectionsMax,
    bufferBytesMax: config.server.bufferBytesMax,
    corsOrigins: config.server.corsOrigins,
    boundHost: config.server.host,
    allowedHosts: config.server.allowedHosts,
    draining: () => intake?.isDraining ?? false,
    onAnswer: (route, method, status, durationMs) => {
      metrics.httpRequests.labels(route, method, String(status)).inc()
      metrics.httpDuration.labels(route).observe(durationMs / 1_000)
    },
    onBufferRefused: (kind) => metrics.bufferRefusals.labels(kind).inc(),
    onUnreadClosed: () => metrics.unreadAnswers.inc(),
  })
  metrics.readBuffers(buffers.budget)
  const store = (): CheckState => {
    const fault = intake?.presence.isReady === true ? intake.store.acceptFault() : new Error(notReached)
    return fault === null ? { ok: true } : { ok: false, detail: fault.message, routes: allRoutes }
  }
  let broker: RouterBroker | null = null
  const nats = (): CheckState =>
    broker?.isConnected === true
      ? { ok: true }
      : {
          ok: false,
          detail: `${broker?.trouble ?? 'NATS does not answer'}; decide is refused`,
          routes: brokerRoutes,
          // Only a router is useless without the broker. Other roles accept work and do it here, or when the broker is back.
          optional: config.process.roles.some((role) => role !== 'router'),
        }
  let redisCheck: (() => CheckState) | null = null
  const redis = (): CheckState =>
    redisCheck?.() ?? { ok: false, optional: true, detail: 'not connected yet; streams are kept in the store' }
  addOpenApi(app, version)
  const accepting = (): CheckState =>
    intake?.isDraining === true
      ? { ok: false, detail: 'this instance is shutting down', routes: allRoutes }
      : { ok: true }
  addHealth(app, {
    version,
    checks: {
      ...{ store, accepting },
      ...(config.routing.natsUrls !== null && { nats }),
      ...(config.generation.redisUrl !== null && { redis }),
    },
    metrics: { contentType: metrics.contentType, render: () => metrics.scrape() },
    protectMetrics: config.auth.protectMetrics,
  })

  const server = embedded ? await startEmbedded({ dataDir: resolve(config.store.dataDir), log }) : null
  const core = new Intake({
    store: postgresStore({
      url: server?.url ?? url ?? '',
      ...(config.store.listenUrl !== null && { listenUrl: config.store.listenUrl }),
      schema: config.store.schema,
      sql: workloadSql,
      poolMax: config.store.poolMax,
      timeoutMs: config.store.timeoutMs,
      delayMs: config.store.delayMs,
      log,
    }),
    settings: settingsOf(config),
    log,
    metrics,
    door,
  })
  intake = core
  const api = intakeApi(core)
  // Read after listening: a port of 0 is known only then.
  const targets = (): TargetRules => ({
    origins: config.operations.forwardAllow ?? (isLoopbackHost(config.server.host) ? ownOrigins(origin) : []),
    own: origin === '' ? null : ownAddress(config.server.host, Number(new URL(origin).port || 80)),
  })
  const httpRequest = defineHttpRequest(api, { version, targets })
  const schema = `"${config.store.schema}"`
  const petitions = definePetitions(api, {
    settings: petitionSettingsOf(config),
    schema,
    isAuthenticated: isAuthenticationOn(config.auth),
    log,
    metrics: createPetitionMetrics(metrics.registry),
  })
  const { encryptionKey, groupsMax, pushPendingMax } = config.messages
  const messages = defineMessages(api, {
    schema,
    pendingMax: pushPendingMax,
    groupsMax,
    encryptionKey: encryptionKey === null ? null : Buffer.from(encryptionKey, 'hex'),
    pageBytesMax: config.server.pageBytesMax,
    buffers,
    log,
    metrics: createMessageMetrics(metrics.registry),
  })
  broker =
    config.routing.natsUrls === null
      ? null
      : connectNats({ url: config.routing.natsUrls.join(','), maxDeliver: config.routing.maxDeliver, log })
  const { alertWebhookUrl, alertWebhookSecret } = config.routing
  const alerts = defineAlerts(api, {
    ...{ schema, log, metrics: createAlertMetrics(metrics.registry) },
    webhook: alertWebhookUrl === null ? null : { url: alertWebhookUrl, secret: alertWebhookSecret },
  })
  const objectives = defineObjectives(api, { schema, log, metrics: createObjectiveMetrics(metrics.registry) })
  const routing = defineRouting(routingDepsOf(config, { api, schema, broker, alerts, objectives, metrics, log }))
  const streams = generationParts(config, { api, metrics, log })
  redisCheck = streams.redis
  const generation = defineGeneration(streams.deps)
  // A process without the gateway role has health and metrics only, and accepts no work.
  if (config.process.roles.includes('gateway')) {
    app.route({
      method: 'POST',
      url: '/api/v1/operations',
      ...api.route(httpRequest.definition),
      schema: submitSchema,
      serializerCompiler: () => JSON.stringify,
      config: { role: 'submit' },
    })
    shortPath.add('/api/v1/operations', { mounted: mount(core, core.bound(httpRequest.definition)), role: 'submit' })
    const { pageBytesMax } = config.server
    const namedTypes = [httpRequestType, pushType]
    await app.register(ticketRoutes(core, { outputOf: streams.outputOf, namedTypes, pageBytesMax }) as never)
    for (const url of petitionPrefixes) {
      app.route({
        method: 'POST',
        url,
        ...api.route(petitions.definition),
        schema: petitionSchema,
        serializerCompiler: () => JSON.stringify,
        config: { role: 'submit' },
      })
      shortPath.add(url, { mounted: mount(core, core.bound(petitions.definition)), role: 'submit' })
    }
    await app.register(petitionRoutes(api, petitions, pageBytesMax) as never)
    const pushes = pushMount(api, messages.push)
    const pushBodyBytes = Math.max(limits.pushBodyBytes, config.server.bodyLimitBytes)
    app.route({
      method: 'POST',
      url: '/api/v1/push',
      ...mountedRoute(pushes, PushRequest),
      schema: pushSchema,
      bodyLimit: pushBodyBytes,
      serializerCompiler: () => JSON.stringify,
      config: { role: 'submit', errorForm: true },
    })
    shortPath.add('/api/v1/push', {
      mounted: pushes,
      role: 'submit',
      bodyLimitBytes: pushBodyBytes,
      errorForm: true,
    })
    await app.register(messageRoutes(messages) as never)
    await app.register(messageAdministrationRoutes(messages, messages) as never)
    await app.register(routingRoutes(routing) as never)
    for (const [url, mounted] of routingMounts(routing)) {
      shortPath.add(url, { mounted, role: 'submit', errorForm: 'object' })
    }
    await app.register(alertRoutes(alerts, pageBytesMax) as never)
    await app.register(objectiveRoutes(objectives) as never)
    await app.register(generationRoutes(generation) as never)
  }
  if (isLoopbackHost(config.server.host)) addDemoEcho(app, readBody)
  addDemoPage(app)
  addLanding(app, { version })

  const close = async (): Promise<void> => {
    // Refuse new work first. Requests in progress get their answers before the connections close, and workloads write
    // their last data before the store closes.
    core.drain()
    petitions.close()
    await messages.close()
    await routing.stop()
    await Promise.all([generation.drain(), core.stop()])
    await Promise.race([app.close(), new Promise((done) => setTimeout(done, closeGraceMs).unref())])
    app.server.closeAllConnections()
    await Promise.all([routing.close(), alerts.close(), objectives.close(), generation.close()])
    await streams.close()
    await core.close()
    await httpRequest.close()
    await server?.stop()
  }
  try {
    if (config.listen) {
      origin = await app.listen({ host: config.server.host, port: config.server.port, backlog: 4_096 })
    }
  } catch (fault) {
    await server?.stop()
    throw listenFault(fault, config)
  }
  routing.start()
  generation.start()
  streams.start()
  const started = core.start()
  started.catch((fault: unknown) => log.fatal({ err: fault }, 'the database cannot be used; this process ends'))
  // The embedded store runs already: wait for it, so that the first request after the greeting succeeds.
  if (server !== null) {
    await started.catch(async (fault: unknown) => {
      await close()
      throw fault
    })
  }
  return { address: origin, started, close }
}

function settingsOf(config: Config) {
  const { operations, admission } = config
  return {
    ...intakeDefaults,
    work: config.process.roles.includes('worker'),
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

function petitionSettingsOf({ petitions: p }: Config) {
  const { rateGeneralPerHour, rateCessationPerHour, rateGrievancePerHour, rateCollaborationPerHour, rateMetaPerHour } =
    p
  return {
    ...p,
    queueCacheTtlMs: p.queueCacheTtl * 1_000,
    typePerHour: {
      GENERAL: rateGeneralPerHour,
      CESSATION: rateCessationPerHour,
      GRIEVANCE: rateGrievancePerHour,
      COLLABORATION: rateCollaborationPerHour,
      META: rateMetaPerHour,
    },
  }
}

/** The server's own origin under both names: the landing page shows the one that the visitor used. */
function ownOrigins(origin: string): string[] {
  if (origin === '') return []
  const byName = new URL(origin)
  byName.hostname = 'localhost'
  return [origin, byName.origin]
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
