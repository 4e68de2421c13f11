import type { IncomingMessage, ServerResponse } from 'node:http'
import { limits } from '@spillway/protocol/wire'
import type { Definition, IntakeRequest, IntakeUser } from '../intake/define.js'
import type { Intake } from '../intake/intake.js'
import { continueTrace, formatTraceparent } from '../metrics/trace.js'
import { type Body, bodyTooLarge, isJson, notJson, parseBody } from './body-form.js'
import { discardRest, goneSignal } from './connections.js'
import { type EncodedAnswer, encodeWire, methodRefused, safeMethods } from './encode.js'
import { faultProblem, internalFault } from './faults.js'
import type { Wire } from './mount.js'
import { mountOf, userFrom } from './mount.js'
import { type Problem, pathOf } from './problem.js'

/**
 * For node:http and for Express 4 and 5. With `next` (Express), errors that are not ours go there; without it they are logged
 * and answered with 500.
 */
export type NodeHandler = (request: IncomingMessage, response: ServerResponse, next?: (fault?: unknown) => void) => void

/** What Express and its middleware add to Node's request. */
interface ExpressMembers {
  body?: unknown
  ip?: string
  originalUrl?: string
  params?: Record<string, string | string[]>
  user?: unknown
}

export function nodeHandler(intake: Intake, definition: Definition): NodeHandler {
  const mounted = mountOf(intake, definition)
  return (request, response, next) => {
    const asked = new NodeIntakeRequest(request)
    const { traceId, path: instance } = asked
    const send = (wire: Wire): void => writeAnswer(response, encodeWire(wire, { instance, traceId }), traceId)
    const refuse = (problem: Problem): void => send({ ok: false, problem, headers: {} })
    const serve = async (): Promise<void> => {
      // With `next` there is a router, which knows the method.
      if (next === undefined && safeMethods.has(asked.method)) return send(methodRefused)
      const entry = await mounted.enter(asked)
      if (!entry.ok) return void setImmediate(send, entry.wire)
      const { entered } = entry
      // The client left while its permit was taken, and its close event has already fired.
      if (response.destroyed) return entered.leave()
      response.once('close', entered.leave)
      try {
        const body = await bodyOf(request)
        if (!body.ok) return refuse(body.problem)
        send(await mounted.submit(entered, body.value, (during) => goneSignal(response, during), body.text))
      } finally {
        // Node emits no 'close' on a pipelined answer whose connection ended before its turn.
        entered.leave()
      }
    }
    serve().catch((fault: unknown) => {
      const problem = faultProblem(fault)
      if (problem !== undefined) return refuse(problem)
      if (next !== undefined) return next(fault)
      intake.log.error({ err: fault, trace_id: traceId, path: instance }, 'request failed')
      refuse(internalFault)
    })
  }
}

/** Does nothing if the answer has begun or nobody can read it. */
export function writeAnswer(response: ServerResponse, { status, headers, body }: EncodedAnswer, traceId: string): void {
  if (response.headersSent || response.destroyed) return
  response.statusCode = status
  // One by one: what middleware has set stays.
  for (const [name, value] of Object.entries(headers)) response.setHeader(name, value)
  response.setHeader('x-request-id', traceId)
  if (body === undefined) return void response.end()
  response.setHeader('content-length', Buffer.byteLength(body))
  response.end(body)
}

/**
 * The body, read here, or as `express.json()` has parsed it. A parsed body has no text any more: an Idempotency-Key then
 * compares `JSON.stringify` of the value, so two requests that differ only in spaces count as the same.
 */
export async function bodyOf(request: IncomingMessage): Promise<Body> {
  const body = await bodyAsSent(request)
  if (!body.ok) discardRest(request)
  return body
}

async function bodyAsSent(request: IncomingMessage & ExpressMembers): Promise<Body> {
  const { headers, body } = request
  // No bytes came, and a parser before this one has seen their end: body-parser makes {} of them.
  if (request.readableEnded && !request.readableDidRead) return { ok: true, value: undefined }
  if (!request.readableDidRead) return readBody(request)
  if (body instanceof Uint8Array) return parseBody(body, headers['content-type'], headers['content-encoding'])
  if (body === undefined) throw new Error('The body was read before the intake, and is not in request.body.')
  // A form that express.urlencoded() has parsed is no JSON: browsers send forms across sites without asking.
  if (!isJson(headers['content-type'])) return { ok: false, problem: notJson }
  return { ok: true, value: body }
}

const firstBytes = 4_096

/** If the client cuts the body off it never resolves: there is nobody to answer, and 'close' of the response ends the request. */
function readBody(request: IncomingMessage): Promise<Body> {
  const { headers } = request
  const tooLarge: Body = { ok: false, problem: bodyTooLarge }
  const length = Number(headers['content-length'] ?? 0)
  if (length > limits.bodyBytes) return Promise.resolve(tooLarge)
  return new Promise((resolve) => {
    // Copied into one block: a list of one-byte pieces would take 200 times their size.
    let block = Buffer.allocUnsafe(length || firstBytes)
    let size = 0
    const end = (body: Body): void => {
      request.off('data', take)
      request.off('end', finish)
      resolve(body)
    }
    const take = (chunk: Buffer): void => {
      const filled = size + chunk.length
      if (filled > limits.bodyBytes) return void end(tooLarge)
      if (filled > block.length) {
        const larger = Buffer.allocUnsafe(Math.max(filled, block.length * 2))
        block.copy(larger, 0, 0, size)
        block = larger
      }
      chunk.copy(block, size)
      size = filled
    }
    const finish = (): void =>
      end(parseBody(block.subarray(0, size), headers['content-type'], headers['content-encoding']))
    request.on('data', take)
    request.on('end', finish)
  })
}

/** Reads on demand. */
export class NodeIntakeRequest implements IntakeRequest {
  readonly #request: IncomingMessage & ExpressMembers
  readonly user: IntakeUser | null
  readonly clientAddress: string
  readonly method: string
  readonly path: string
  readonly traceId: string
  readonly traceparent: string

  constructor(request: IncomingMessage & ExpressMembers) {
    this.#request = request
    this.user = userFrom(request.user)
    // Express's `ip` obeys its setting `trust proxy`.
    this.clientAddress = request.ip ?? request.socket.remoteAddress ?? 'unknown'
    this.method = request.method ?? 'GET'
    this.path = pathOf(this.#target)
    const trace = continueTrace(request.headers.traceparent as string | undefined)
    this.traceId = trace.traceId
    this.traceparent = formatTraceparent(trace)
  }

  /** A router of Express shortens `url`. */
  get #target(): string {
    return this.#request.originalUrl ?? this.#request.url ?? '/'
  }

  get headers(): Record<string, string | undefined> {
    return this.#request.headers as Record<string, string | undefined>
  }

  get query(): URLSearchParams {
    const start = this.#target.indexOf('?')
    return new URLSearchParams(start < 0 ? '' : this.#target.slice(start + 1))
  }

  /** A wildcard of Express 5 is a list of path segments. */
  get params(): Record<string, string> {
    const params = Object.entries(this.#request.params ?? {})
    return Object.fromEntries(params.map(([name, value]) => [name, Array.isArray(value) ? value.join('/') : value]))
  }
}
