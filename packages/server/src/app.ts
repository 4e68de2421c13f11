import type { IncomingMessage, RequestListener, ServerResponse } from 'node:http'
import type { TypeBoxTypeProvider } from '@fastify/type-provider-typebox'
import Fastify, {
  type FastifyBaseLogger,
  type FastifyContextConfig,
  type FastifyInstance,
  type FastifyReply,
  type FastifyRequest,
  LogController,
  type RawServerDefault,
} from 'fastify'
import {
  answerClientFault,
  answerFault,
  bodyFormFault,
  type ConnectionCap,
  capConnections,
  Door,
  guardRequests,
  headerProblem,
  mountedRoute,
  type Problem,
  ProblemError,
  refuseTunnels,
  sendProblem,
  urlProblem,
} from 'spillway/workload'
import { trackAllowedMethods } from './allowed-methods.js'
import { type Authenticator, type AuthResult, isRefused } from './auth/auth.js'
import { allowOrigins, variesByOrigin } from './auth/cors.js'
import { hasRole, type Principal } from './auth/identity.js'
import { hasTwoHosts, type OwnSites, ownSites } from './auth/own-sites.js'
import type { Config } from './config/index.js'
import { isProbe } from './health.js'
import type { BufferKind } from './traffic/buffer-budget.js'
import { Buffers } from './traffic/buffers.js'
import { readBody } from './traffic/read-body.js'
import type { MountedRoute } from './workload.js'
import './request-state.js'
import { parseStrictJson, traceFor, traceIdOf, validatorCompiler } from 'spillway/workload'
import { type ShortPath, shortPath } from './short-path.js'
import { closeUnread, unreadMsDefault } from './traffic/unread-answers.js'

type ServerSettings = Config['server']

export interface AppDeps
  extends Pick<
      ServerSettings,
      'bodyLimitBytes' | 'requestTimeoutMs' | 'headersTimeoutMs' | 'connectionsMax' | 'corsOrigins'
    >,
    Partial<Pick<ServerSettings, 'bufferBytesMax' | 'host' | 'allowedHosts'>> {
  log: FastifyBaseLogger
  authenticator: Authenticator
  /** An answer is closed when the client reads nothing for this time. Default 30 s. */
  unreadMs?: number
  /** True once shutdown has begun: everything except health is then refused. */
  draining?: () => boolean
  onAnswer?: (route: string, method: string, status: number, durationMs: number) => void
  /** A body or an answer was refused for lack of space. */
  onBufferRefused?: (kind: BufferKind) => void
  onUnreadClosed?: () => void
}

export interface BuiltApp {
  app: App
  /** Where requests wait until they are handled. */
  door: Door
  /** Registers a route once for the framework and the short path. */
  mounted(route: MountedRoute): void
  buffers: Buffers
  /** For content types that a route accepts besides JSON. */
  readBody: BodyParser
}

/** The body of a request, within its limit and the budget. */
export type BodyParser = (request: FastifyRequest, done: (fault: Error | null, body?: Buffer) => void) => void

export type App = FastifyInstance<
  RawServerDefault,
  IncomingMessage,
  ServerResponse,
  FastifyBaseLogger,
  TypeBoxTypeProvider
>

/** For the workloads, which do not depend on a framework. */
export type AppRequest = FastifyRequest
export type AppReply = FastifyReply
export type AppRouteConfig = FastifyContextConfig

/** Longer than the idle time of common proxies (60 s), so that we never close a connection under a request. */
const keepAliveTimeoutMs = 72_000
/** A name has up to 255 code points of 4 bytes, each byte %XX in a path. */
const pathParameterCharacters = 255 * 4 * 3
const everyAnswer = ['x-content-type-options', 'nosniff'] as const
const bufferBytesDefault = 256 * 1_048_576
const retryAfterMs = 5_000
const draining: Problem = { code: 'draining', detail: 'This instance is shutting down.', retryAfterMs }
const tooManyConnections: Problem = { code: 'overloaded', detail: 'Too many connections are open.', retryAfterMs }

/** How often Node checks for late requests; its default of 30 s would let a slow sender live four times as long. */
function timeoutCheckMs(headersTimeoutMs: number): number {
  return Math.min(5_000, Math.max(50, Math.floor(headersTimeoutMs / 5)))
}

/**
 * The server without its routes: strict bodies, problems, traces, identity, CORS and bounded connections. Routes are
 * added by their owners, with `config: { role }`, `{ public: true }` or neither (any principal).
 */
export function buildApp(deps: AppDeps): BuiltApp {
  const app = Fastify({
    loggerInstance: deps.log,
    // A child logger per request costs more than the rest of the hooks; log lines name their trace id themselves.
    childLoggerFactory: (logger) => logger,
    logController: new LogController({ disableRequestLogging: true }),
    genReqId: (request) => traceIdOf(request.headers.traceparent),
    requestIdHeader: false,
    bodyLimit: deps.bodyLimitBytes,
    requestTimeout: deps.requestTimeoutMs,
    keepAliveTimeout: keepAliveTimeoutMs,
    // Unlimited: beyond a limit Node answers a pipelined request with a bare 503.
    maxRequestsPerSocket: 0,
    forceCloseConnections: 'idle',
    // Draining is answered below, as a problem.
    return503OnClosing: false,
    routerOptions: { maxParamLength: pathParameterCharacters },
    http: {
      connectionsCheckingInterval: timeoutCheckMs(deps.headersTimeoutMs),
      headersTimeout: deps.headersTimeoutMs,
      // Checked below: Node's own answer has no body.
      requireHostHeader: false,
    },
    clientErrorHandler: answerClientFault,
    frameworkErrors: (fault, request, reply) => answerFault(fault, request as FastifyRequest, reply as FastifyReply),
  }).withTypeProvider<TypeBoxTypeProvider>()

  const answerUnknown = unknownAnswers(app)
  app.setValidatorCompiler(validatorCompiler)
  app.setErrorHandler(answerFault)
  const buffers = new Buffers({
    bytesMax: deps.bufferBytesMax ?? bufferBytesDefault,
    ...(deps.onBufferRefused !== undefined && { onRefused: deps.onBufferRefused }),
  })
  const read = bodyParser(buffers)
  parseBodies(app, read)
  decorateRequests(app, deps.authenticator)
  // A client that half-closes after its request still reads the answer. Requests that only wait end: see whenGone.
  Reflect.set(app.server, 'httpAllowHalfOpen', true)
  const cap = capConnections(app.server, deps.connectionsMax)
  const sites = sitesOf(deps)
  refuseStrangers(app, sites)
  admitRequests(app, deps, cap)
  allowOrigins(app as unknown as FastifyInstance, deps.corsOrigins)
  identifyRequests(app, deps.authenticator, answerUnknown)
  app.setNotFoundHandler(answerUnknown)
  countAnswers(app, deps)
  holdAnswers(app, buffers)
  closeUnread(app.server, {
    unreadMs: deps.unreadMs ?? unreadMsDefault,
    onClosed: ({ remoteAddress }) => {
      deps.log.debug({ client: remoteAddress }, 'closed a connection: its answer was not read')
      deps.onUnreadClosed?.()
    },
  })
  const path = beforeFramework(app, deps, cap, sites, buffers)
  const door = new Door()
  guardRequests(app.server, door, isProbe)
  refuseTunnels(app.server)
  // Node's own 417 has no body, so these requests are refused like all others.
  app.server.on('checkExpectation', (request, response) => app.server.emit('request', request, response))
  return { app, door, mounted: (route) => addMounted(app, path, route), buffers, readBody: read }
}

function addMounted(app: App, path: ShortPath, route: MountedRoute): void {
  const { url, mount, schema, bodyLimitBytes, errorForm } = route
  app.route({
    method: 'POST',
    url,
    ...mountedRoute(mount, schema.body),
    schema,
    ...(bodyLimitBytes !== undefined && { bodyLimit: bodyLimitBytes }),
    serializerCompiler: () => JSON.stringify,
    config: { role: 'submit', ...(errorForm !== undefined && { errorForm }) },
  })
  path.add(route)
}

function countAnswers(app: App, deps: AppDeps): void {
  app.addHook('onResponse', (request, reply, done) => {
    deps.onAnswer?.(request.routeOptions.url ?? 'none', request.method, reply.statusCode, reply.elapsedTime)
    done()
  })
}

/**
 * Applies to every answer except those of the short path. An answer to a read is refused if there is no space. An answer
 * to a request that may have changed something is always sent.
 */
function holdAnswers(app: App, buffers: Buffers): void {
  app.addHook('onSend', (request, reply, payload, done) => {
    const { method, raw } = request
    const isOwed = (method !== 'GET' && method !== 'HEAD') || request.routeOptions.config.neverShed === true
    const identity = (): string => request.principal?.identity ?? request.clientAddress
    if (buffers.holdAnswer(raw, reply.raw, identity, payload, isOwed)) done()
    else done(new ProblemError(buffers.noRoom))
  })
}

function beforeFramework(
  app: App,
  deps: AppDeps,
  cap: ConnectionCap,
  sites: OwnSites | null,
  buffers: Buffers,
): ShortPath {
  const path = shortPath({
    authenticator: deps.authenticator,
    buffers,
    bodyLimitBytes: deps.bodyLimitBytes,
    declines: (request) =>
      deps.draining?.() === true ||
      cap.isBeyond(request) ||
      hasTwoHosts(request) ||
      (sites !== null && !sites.isForUs(request)),
    headers: [...everyAnswer, ...(variesByOrigin(deps.corsOrigins) ? ['vary', 'Origin'] : [])],
    onFault: (fault, traceId, route) => deps.log.error({ err: fault, trace_id: traceId, route }, 'request failed'),
    onAnswer: (route, status, durationMs) => deps.onAnswer?.(route, 'POST', status, durationMs),
  })
  const listeners = app.server.listeners('request') as RequestListener[]
  app.server.removeAllListeners('request')
  app.server.on('request', (request, response) => {
    path.take(request, response, () => {
      for (const listener of listeners) listener(request, response)
    })
  })
  return path
}

type Answer = (request: FastifyRequest, reply: FastifyReply) => FastifyReply

/** Call before the first route is added. */
function unknownAnswers(app: App): Answer {
  const allowedAt = trackAllowedMethods(app as unknown as FastifyInstance)
  return (request, reply) => {
    const methods = allowedAt(request.raw.url ?? '/')
    if (methods.length === 0 || methods.includes(request.method)) {
      return sendProblem(reply, { code: 'not_found', detail: 'There is nothing at this path.' })
    }
    reply.header('allow', methods.join(', '))
    return sendProblem(reply, { code: 'method_not_allowed', detail: `Use ${methods.join(', ')}.` })
  }
}

/** By now the gates that need no body have run, and the identity is known. */
function bodyParser(buffers: Buffers): BodyParser {
  return (request, done) => {
    const { bodyLimit, config } = request.routeOptions
    readBody(
      buffers,
      {
        request: request.raw,
        response: request.response,
        limitBytes: bodyLimit,
        identity: request.principal?.identity ?? request.clientAddress,
        isAck: config.isAck === true,
      },
      (problem, body) => (problem === null ? done(null, body) : done(new ProblemError(problem))),
      done,
    )
  }
}

function parseBodies(app: App, read: BodyParser): void {
  app.removeAllContentTypeParsers()
  app.addContentTypeParser('application/json', (request, _payload, done) => {
    read(request, (fault, body) => {
      if (fault !== null || body === undefined) return done(fault)
      const formFault = bodyFormFault(request.headers['content-type'], request.headers['content-encoding'])
      if (formFault !== undefined) return done(new ProblemError(formFault))
      if (body.length === 0) return done(null, undefined)
      const parsed = parseStrictJson(body)
      if (parsed.ok) {
        request.bodyText = parsed.text
        return done(null, parsed.value)
      }
      done(new ProblemError({ code: 'invalid_request', detail: 'The body is not valid.', errors: [parsed.fault] }))
    })
  })
}

function decorateRequests(app: App, authenticator: Authenticator): void {
  app.decorateRequest('traceMemo', null)
  app.decorateRequest('bodyText', undefined)
  app.decorateRequest('trace', {
    getter(this: FastifyRequest) {
      this.traceMemo ??= traceFor(this.id, this.headers.traceparent)
      return this.traceMemo
    },
  })
  app.decorateRequest('clientAddress', {
    getter(this: FastifyRequest) {
      return authenticator.clientAddress(this.headers, this.raw.socket.remoteAddress ?? '')
    },
  })
  app.decorateRequest('principal', null as unknown as Principal)
  app.decorateRequest('response', null as unknown as ServerResponse)
}

/** Not while a body is arriving: closing with unread bytes resets the connection, and the answer may be lost. */
function closeAfter({ headers }: FastifyRequest, reply: FastifyReply): void {
  const bodyless = headers['transfer-encoding'] === undefined && (headers['content-length'] ?? '0') === '0'
  if (bodyless) reply.header('connection', 'close')
}

/** Null: authentication is on, and pages of other sites have no key. */
function sitesOf({ authenticator, host = '127.0.0.1', allowedHosts = [], corsOrigins }: AppDeps): OwnSites | null {
  return authenticator.enabled ? null : ownSites({ host, allowedHosts, corsOrigins })
}

const readingMethods = new Set(['GET', 'HEAD', 'OPTIONS'])

/** First hook: headers of every answer. Refuses requests for other hosts and from pages of other sites. */
function refuseStrangers(app: App, sites: OwnSites | null): void {
  app.addHook('onRequest', (request, reply, done) => {
    request.response = reply.raw
    reply.header('x-request-id', request.id)
    reply.header(...everyAnswer)
    if (hasTwoHosts(request.raw)) {
      sendProblem(reply, headerProblem('host', 'There are several Host headers.', 'must be given once'))
      return
    }
    const { anyHost, consumes } = request.routeOptions.config
    if (sites === null || anyHost === true) return done()
    const problem = sites.refusal(request.raw, consumes === true || !readingMethods.has(request.method))
    if (problem === undefined) return done()
    sendProblem(reply, problem)
  })
}

/** Checks that do not depend on the identity. */
function admitRequests(app: App, deps: AppDeps, cap: ConnectionCap): void {
  app.addHook('onRequest', (request, reply, done) => {
    if (request.routeOptions.config.neverShed === true) return done()
    const overload = deps.draining?.() === true ? draining : cap.isBeyond(request.raw) ? tooManyConnections : undefined
    if (overload !== undefined) closeAfter(request, reply)
    const problem = overload ?? formProblem(request.raw, reply)
    if (problem === undefined) done()
    else sendProblem(reply, problem)
  })
}

/** What is wrong with the request line and the headers. */
function formProblem({ headers, httpVersionMinor, url = '' }: IncomingMessage, reply: FastifyReply) {
  if (headers.host === undefined && httpVersionMinor === 1) {
    return headerProblem('host', 'The Host header is missing.', 'is required')
  }
  if (headers['transfer-encoding'] !== undefined && httpVersionMinor === 0) {
    reply.header('connection', 'close')
    return headerProblem('transfer-encoding', 'HTTP/1.0 has no chunks.', 'needs HTTP/1.1')
  }
  // No server supports another expectation. HTTP/1.0 has none.
  if (headers.expect !== undefined && httpVersionMinor === 1 && !/100-continue/i.test(headers.expect)) {
    return headerProblem('expect', 'The expectation cannot be met.', 'must be 100-continue')
  }
  // PostgreSQL's text type has no NUL, so no valid name, filter or cursor has one.
  if (url.includes('%00')) return urlProblem('the URL must not contain a NUL character')
  return isDecodable(url) ? undefined : urlProblem('the query must be percent-encoded UTF-8')
}

/** The query parser keeps text that it cannot decode; in the path the router refuses it. */
function isDecodable(url: string): boolean {
  const start = url.indexOf('?')
  if (start < 0 || url.indexOf('%', start) < 0) return true
  try {
    decodeURIComponent(url.slice(start))
    return true
  } catch {
    return false
  }
}

function identifyRequests(app: App, authenticator: Authenticator, answerUnknown: Answer): void {
  app.addHook('onRequest', (request, reply, done) => {
    if (request.is404) {
      // Before the body is read, because nobody uses it.
      answerUnknown(request, reply)
      return
    }
    if (request.routeOptions.config.public === true) return done()
    const settle = (result: AuthResult) => {
      const problem = identify(request, reply, result)
      if (problem === undefined) done()
      else sendProblem(reply, problem)
    }
    const result = authenticator.authenticate(request.headers, request.raw.socket.remoteAddress ?? '')
    if (result instanceof Promise) result.then(settle, done)
    else settle(result)
  })
}

function identify(request: FastifyRequest, reply: FastifyReply, result: AuthResult): Problem | undefined {
  if (!isRefused(result)) {
    request.principal = result
    const { role, wholeServer } = request.routeOptions.config
    if (role !== undefined && !hasRole(result, role)) {
      return { code: 'forbidden', detail: `This needs the role ${[role].flat().join(' or ')}.` }
    }
    if (wholeServer === true && result.queues !== undefined) {
      return { code: 'forbidden', detail: 'This is about the whole server, and your key is bound to queues.' }
    }
    return undefined
  }
  switch (result.refused) {
    case 'missing':
      reply.header('www-authenticate', 'Bearer realm="spillway"')
      return { code: 'unauthenticated', detail: result.detail }
    case 'invalid':
      reply.header('www-authenticate', 'Bearer realm="spillway", error="invalid_token"')
      return { code: 'unauthenticated', detail: result.detail }
    case 'malformed':
      return headerProblem('x-user-id', result.detail, 'has no valid length')
    case 'unavailable':
      return { code: 'authentication_unavailable', detail: result.detail, retryAfterMs }
  }
}
