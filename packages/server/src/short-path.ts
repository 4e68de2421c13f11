/**
 * The short path of a request to an intake route: from Node's HTTP server to the mount and back, past the framework.
 *
 * Routing, hooks and the reply object of the framework cost about as much as accepting an operation (a bare Fastify echo
 * takes 77 µs of a core, the same on node:http 55), so the busiest routes skip them. Only ordinary requests take this
 * path: a POST to exactly a known path, with a JSON body of a stated, allowed length and an identity that is known at
 * once. Anything unusual (another method, a query, an Origin, an encoding, a refused token, draining) is declined
 * *before anything was done* and goes through the framework, where the same mount serves the same route. So the answers
 * are the same, and only one of the two decides.
 */
import type { IncomingMessage, ServerResponse } from 'node:http'
import type { Entered, Entry, IntakeRequest, IntakeUser, Wire } from 'spillway/workload'
import {
  discardRest,
  encodeProblem,
  faultProblem,
  goneSignal,
  internalFault,
  type Problem,
  parseStrictJson,
  traceFor,
  traceIdOf,
} from 'spillway/workload'
import { type Authenticator, type AuthResult, isRefused } from './auth/auth.js'
import { hasRole, type Principal } from './auth/identity.js'
import type { Buffers } from './traffic/buffers.js'
import { readBody } from './traffic/read-body.js'
import type { MountedRoute } from './workload.js'

export interface ShortPathDeps {
  authenticator: Authenticator
  buffers: Buffers
  bodyLimitBytes: number
  /** Whether the framework must answer this request: draining, too many connections, a Host that is not this server. */
  declines(request: IncomingMessage): boolean
  /** Names and values that every answer carries, alternating. */
  headers: readonly string[]
  onFault(fault: unknown, traceId: string, route: string): void
  onAnswer(route: string, status: number, durationMs: number): void
}

export interface ShortPath {
  add(route: ShortRoute): void
  /** Calls `otherwise` for requests that do not qualify; nothing has been read or done then. */
  take(request: IncomingMessage, response: ServerResponse, otherwise: () => void): void
}

type ShortRoute = Omit<MountedRoute, 'schema'>

const noParams = {}

class ShortRequest implements IntakeRequest {
  readonly method = 'POST'
  readonly params = noParams
  readonly path: string
  readonly headers: Record<string, string | undefined>
  readonly clientAddress: string
  readonly user: IntakeUser
  readonly traceId: string
  readonly #traceparent: string | undefined

  constructor(request: IncomingMessage, { identity, roles, queues }: Principal, clientAddress: string) {
    this.path = request.url ?? '/'
    this.headers = request.headers as Record<string, string | undefined>
    this.clientAddress = clientAddress
    this.user = queues === undefined ? { id: identity, roles } : { id: identity, roles, queues }
    this.#traceparent = request.headers.traceparent as string | undefined
    this.traceId = traceIdOf(this.#traceparent)
  }

  get query(): URLSearchParams {
    return new URLSearchParams()
  }

  get traceparent(): string {
    return traceFor(this.traceId, this.#traceparent).traceparent
  }
}

export function shortPath(deps: ShortPathDeps): ShortPath {
  const routes = new Map<string, ShortRoute>()
  return {
    add: (route) => void routes.set(route.url, route),
    take(request, response, otherwise) {
      const route = request.method === 'POST' ? routes.get(request.url ?? '') : undefined
      if (route === undefined || deps.declines(request)) return otherwise()
      if (!isOrdinary(request, route.bodyLimitBytes ?? deps.bodyLimitBytes)) return otherwise()
      const peer = request.socket.remoteAddress ?? ''
      const go = (principal: AuthResult): void => {
        if (isRefused(principal) || !hasRole(principal, 'submit')) return void otherwise()
        const address = deps.authenticator.clientAddress(request.headers, peer)
        pass(deps, request, response, new ShortRequest(request, principal, address), route)
      }
      const principal = deps.authenticator.authenticate(request.headers, peer)
      // The framework verifies a failed token again and answers.
      if (principal instanceof Promise) principal.then(go, otherwise)
      else go(principal)
    },
  }
}

const plainType = /^application\/json(?:; ?charset=utf-8)?$/i

function isOrdinary({ headers }: IncomingMessage, bodyLimitBytes: number): boolean {
  const length = Number(headers['content-length'])
  return (
    length > 0 &&
    length <= bodyLimitBytes &&
    headers['content-type'] !== undefined &&
    plainType.test(headers['content-type']) &&
    headers['content-encoding'] === undefined &&
    headers.origin === undefined &&
    headers['sec-fetch-site'] === undefined &&
    headers.expect === undefined &&
    headers.host !== undefined
  )
}

/** One request, from the gates that need no body to its answer. */
function pass(
  deps: ShortPathDeps,
  request: IncomingMessage,
  response: ServerResponse,
  asked: ShortRequest,
  { mount, errorForm, bodyLimitBytes: limitBytes = deps.bodyLimitBytes }: ShortRoute,
): void {
  const startedAt = performance.now()
  const identity = asked.user.id

  const write = (status: number, headers: Record<string, string>, body: string): void => {
    const list = [...deps.headers, 'x-request-id', asked.traceId]
    for (const name in headers) list.push(name, headers[name] ?? '')
    list.push('content-length', String(Buffer.byteLength(body)))
    deps.buffers.holdAnswer(request, response, () => identity, body, true)
    response.writeHead(status, list)
    response.end(body)
    deps.onAnswer(asked.path, status, performance.now() - startedAt)
  }
  const send = (wire: Wire): void => {
    if (wire.ok) {
      const { status, headers, body } = wire.answer
      headers['content-type'] = 'application/json; charset=utf-8'
      write(status, headers, JSON.stringify(body))
      return
    }
    const place = { instance: asked.path, traceId: asked.traceId }
    const { status, headers, body } = encodeProblem(wire.problem, place, errorForm)
    write(status, { ...wire.headers, ...headers }, body)
  }
  const refuse = (problem: Problem): void => send({ ok: false, problem, headers: {} })
  const fail = (fault: unknown): void => {
    const known = faultProblem(fault)
    if (known === undefined) deps.onFault(fault, asked.traceId, asked.path)
    refuse(known ?? internalFault)
  }
  const submit = (entered: Entered): void => {
    // The client left while its permit was granted, and 'close' has already fired.
    if (response.destroyed) return void entered.leave()
    response.once('close', entered.leave)
    // If the client cuts the body off there is nobody to answer; the 'close' listener above releases the permit.
    readBody(deps.buffers, { request, response, limitBytes, identity, isAck: false }, (problem, bytes) => {
      if (problem !== null) {
        discardRest(request)
        return refuse(problem)
      }
      const body = parseStrictJson(bytes)
      if (!body.ok) return refuse({ code: 'invalid_request', detail: 'The body is not valid.', errors: [body.fault] })
      mount.submit(entered, body.value, (during) => goneSignal(response, during), body.text).then(send, fail)
    })
  }
  const proceed = (entry: Entry): void => {
    if (entry.ok) submit(entry.entered)
    // At the end of the turn, with the other refusals: see fastify-binding.ts.
    else setImmediate(send, entry.wire)
  }
  const entry = mount.enter(asked)
  if (entry instanceof Promise) entry.then(proceed, fail)
  else proceed(entry)
}
