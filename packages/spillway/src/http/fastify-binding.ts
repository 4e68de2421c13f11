import { createHash, type Hash } from 'node:crypto'
import { Transform } from 'node:stream'
import type { FastifyReply, FastifyRequest, RequestPayload, RouteShorthandOptions } from 'fastify'
import type { TSchema } from 'typebox'
import { uuidOfDigest } from '../core/ids.js'
import type { Definition, IntakeRequest, IntakeUser } from '../intake/define.js'
import type { Intake } from '../intake/intake.js'
import { continueTrace, formatTraceparent } from '../metrics/trace.js'
import { goneSignal } from './connections.js'
import { answerKnownFault } from './faults.js'
import type { Wire } from './mount.js'
import { type Entered, type Mount, mountOf, userFrom } from './mount.js'
import { pathOf, sendProblem } from './problem.js'
import { isStandardSchema } from './standard-schema.js'

/** Spread it into `app.route({ method, url, ...route })`. */
export interface FastifyRoute extends Pick<RouteShorthandOptions, 'schema' | 'validatorCompiler' | 'attachValidation'> {
  /** Gates that need no body run here, before Fastify reads it. */
  onRequest(request: FastifyRequest, reply: FastifyReply, done: () => void): void
  /** Hashes the body of a request with a key as it arrives: after parsing, two different numbers may be equal. */
  preParsing(
    request: FastifyRequest,
    reply: FastifyReply,
    payload: RequestPayload,
    done: (fault: null, payload: RequestPayload) => void,
  ): void
  handler(request: FastifyRequest, reply: FastifyReply): Promise<unknown>
  /** Answers bodies that Fastify refuses (413, 415, malformed JSON) as problems. Errors of your own go to your error handler. */
  errorHandler?: (fault: unknown, request: FastifyRequest, reply: FastifyReply) => void
}

/** No bytes are a request without a body, whatever its content type. Fastify's own parser would refuse it. */
export function takeEmptyBody(request: FastifyRequest, _reply: FastifyReply, done: () => void): void {
  const { headers } = request
  // Our own server has its own parser.
  if (headers['content-length'] === '0' && !('bodyText' in request)) delete headers['content-type']
  done()
}

/** Stores a request's entry between the hook and the handler. On the raw request, whose shape does not matter. */
const entryKey = Symbol('spillway.entry')
const hashKey = Symbol('spillway.hash')
type Carrier = { [entryKey]?: Entered; [hashKey]?: Hash }

export function fastifyRoute(intake: Intake, definition: Definition): FastifyRoute {
  const { body } = intake.bound(definition).options
  const route = mountedRoute(mountOf(intake, definition), isStandardSchema(body) ? undefined : body)
  return { ...route, errorHandler: answerKnownFault }
}

/** For mounts whose body differs from their definition's. */
export function mountedRoute(mounted: Mount, body: TSchema | undefined): FastifyRoute {
  return {
    schema: body === undefined ? {} : { body },
    // The schema is only for the API description; the mount validates, with its own messages.
    validatorCompiler: () => () => true,
    // Refusals are sent together at the end of the turn: a write wakes a sleeping client, which costs several times the
    // write, and a client that was woken a moment ago need not be woken again.
    onRequest(request, reply, done) {
      const proceed = (entry: Awaited<ReturnType<typeof mounted.enter>>): void => {
        if (!entry.ok) return void setImmediate(send, reply, entry.wire)
        // The client left while its permit was taken, and its close event has already fired.
        if (reply.raw.destroyed) return void entry.entered.leave()
        ;(request.raw as Carrier)[entryKey] = entry.entered
        reply.raw.once('close', entry.entered.leave)
        takeEmptyBody(request, reply, done)
      }
      const entry = mounted.enter(intakeRequestOf(request, reply))
      if (entry instanceof Promise) entry.then(proceed, (fault: unknown) => void reply.send(fault))
      else proceed(entry)
    },
    preParsing(request, _reply, payload, done) {
      // Our own server keeps the text.
      const isKeyed = request.headers['idempotency-key'] !== undefined && !('bodyText' in request)
      done(null, isKeyed ? hashed(request.raw as Carrier, payload) : payload)
    },
    async handler(request, reply) {
      const { [entryKey]: entered, [hashKey]: hash } = request.raw as Carrier
      if (entered === undefined) throw new Error('the route was mounted without its onRequest hook')
      if (hash !== undefined) entered.digest = uuidOfDigest(hash.digest('hex'))
      // An app's own hooks may have changed the body, so there is a text only in our own server.
      const { bodyText } = request as { bodyText?: string }
      return send(
        reply,
        await mounted.submit(entered, request.body, (during) => goneSignal(reply.raw, during), bodyText),
      )
    },
  }
}

function hashed(carrier: Carrier, payload: RequestPayload): RequestPayload {
  const hash = createHash('sha256')
  carrier[hashKey] = hash
  const through: Transform & { receivedEncodedLength?: number } = new Transform({
    transform(chunk: Buffer, _encoding, done) {
      hash.update(chunk)
      // Fastify compares it with the limit and with Content-Length.
      through.receivedEncodedLength = (through.receivedEncodedLength ?? 0) + chunk.length
      done(null, chunk)
    },
  })
  payload.on('error', (fault) => through.destroy(fault))
  return payload.pipe(through)
}

function send(reply: FastifyReply, wire: Wire): FastifyReply {
  if (!wire.ok) {
    reply.headers(wire.headers)
    return sendProblem(reply, wire.problem)
  }
  const { status, headers, body } = wire.answer
  if (body === undefined) return reply.code(status).headers(headers).send()
  return reply
    .code(status)
    .headers(headers)
    .header('content-type', 'application/json; charset=utf-8')
    .send(JSON.stringify(body))
}

/** `request.principal` comes from our server, `request.user` from Fastify's authentication plugins. */
function userOf(request: FastifyRequest): IntakeUser | null {
  const { principal } = request as {
    principal?: { identity: string; roles: ReadonlySet<string>; queues?: readonly string[] } | null
  }
  if (principal !== undefined && principal !== null) {
    return { id: principal.identity, roles: principal.roles, ...(principal.queues && { queues: principal.queues }) }
  }
  return userFrom((request as { user?: unknown }).user)
}

/** The request as definitions and viewers see it. Names it in the answer; our own server has done so already. */
export function intakeRequestOf(request: FastifyRequest, reply: FastifyReply): IntakeRequest {
  const { trace } = request as { trace?: { traceparent: string } }
  if (trace !== undefined) return new FastifyIntakeRequest(request, trace.traceparent)
  const context = continueTrace(request.raw.headers.traceparent as string | undefined)
  reply.header('x-request-id', context.traceId)
  return new FastifyIntakeRequest(request, formatTraceparent(context))
}

/** Reads on demand: most definitions use little of a request. */
class FastifyIntakeRequest implements IntakeRequest {
  readonly #request: FastifyRequest
  readonly user: IntakeUser | null
  readonly clientAddress: string
  readonly traceparent: string

  constructor(request: FastifyRequest, traceparent: string) {
    this.#request = request
    this.traceparent = traceparent
    this.user = userOf(request)
    this.clientAddress = (request as { clientAddress?: string }).clientAddress ?? request.ip
  }

  get method(): string {
    return this.#request.method
  }

  get path(): string {
    return pathOf(this.#request.raw.url ?? '/')
  }

  get headers(): Record<string, string | undefined> {
    return this.#request.raw.headers as Record<string, string | undefined>
  }

  get query(): URLSearchParams {
    const url = this.#request.raw.url ?? ''
    const start = url.indexOf('?')
    return new URLSearchParams(start < 0 ? '' : url.slice(start + 1))
  }

  get params(): Record<string, string> {
    return this.#request.params as Record<string, string>
  }
}
