import { type ProblemCode, type ProblemDocument, problems, routingCodes } from '@spillway/protocol/wire'
import type { FastifyReply } from 'fastify'
import type { RequestFault } from './json-pointer.js'
import { retryAfterSeconds } from './retry-after.js'

/** An answer that is not a success, as a value: handlers and gates return it, `sendProblem` puts it on the wire. */
export interface Problem {
  code: ProblemCode
  /** For people; never a stack, SQL or a driver's message. */
  detail: string
  /** The base of Retry-After on 429 and 503; jittered upward when it is sent. Default 1,000. */
  retryAfterMs?: number
  /** What is wrong and where, on 400. */
  errors?: readonly RequestFault[]
  /** Members of its own, beside the standard ones, which they cannot replace. */
  extensions?: Readonly<Record<string, unknown>>
  /** Default `urn:spillway:error:<code>`. */
  type?: string
  /** Default: the title of the code. */
  title?: string
}

const problemContentType = 'application/problem+json'

const retryAfterMsDefault = 1_000

export interface ProblemPlace {
  instance: string
  traceId: string
  random?: () => number
}

export function problemDocument(problem: Problem, place: ProblemPlace): ProblemDocument {
  const { status, title } = problems[problem.code]
  const document: ProblemDocument = {
    ...problem.extensions,
    type: problem.type ?? `urn:spillway:error:${problem.code}`,
    title: problem.title ?? title,
    status,
    detail: problem.detail,
    instance: place.instance,
    code: problem.code,
    trace_id: place.traceId,
  }
  if (problem.errors !== undefined) document.errors = [...problem.errors]
  if (status === 429 || status === 503) {
    const baseSeconds = (problem.retryAfterMs ?? retryAfterMsDefault) / 1000
    document.retry_after_seconds = retryAfterSeconds(baseSeconds, place.random)
  }
  return document
}

/** The headers that a problem brings with it, whatever sends it. */
export function problemHeaders(document: ProblemDocument): Record<string, string> {
  const headers: Record<string, string> = { 'content-type': problemContentType, 'cache-control': 'no-store' }
  if (document.retry_after_seconds !== undefined) headers['retry-after'] = String(document.retry_after_seconds)
  return headers
}

/** The path of a request target: no query, and no host when it came in absolute form. */
export function pathOf(target: string): string {
  const afterHost = target.startsWith('/') ? target : target.replace(/^[a-z][a-z0-9+.-]*:\/\/[^/?#]*/i, '')
  const end = afterHost.search(/[?#]/)
  const path = end === -1 ? afterHost : afterHost.slice(0, end)
  return path === '' ? '/' : path
}

/** Keeps Fastify from appending a charset parameter, which problem+json does not have. */
const asIs = (payload: unknown): string => payload as string

export function sendProblem(reply: FastifyReply, problem: Problem): FastifyReply {
  const { request } = reply
  const document = problemDocument(problem, { instance: pathOf(request.raw.url ?? '/'), traceId: request.id })
  tellError(document, request.routeOptions?.config?.tellsError)
  reply.code(document.status)
  reply.headers(problemHeaders(document))
  // Set here too: answers to a malformed URL come before the hooks.
  reply.header('x-request-id', request.id)
  return reply.serializer(asIs).send(JSON.stringify(document))
}

/** The clients of some routes read this member alone: a text, or `{code, message}` beside `ok: false`. */
export type TellsError = true | 'object'

export function tellError(document: ProblemDocument, how: TellsError | undefined): void {
  if (how === undefined) return
  if (how === 'object') document.ok = false
  document.error ??=
    how === 'object' ? { code: objectCodes[document.code] ?? document.code, message: document.detail } : document.detail
}

/** Where the code in the object is another than that of the problem. */
const objectCodes: Partial<Record<ProblemCode, string>> = {
  ...Object.fromEntries(Object.entries(routingCodes).map(([told, code]) => [code, told])),
  invalid_request: 'SCHEMA_VALIDATION_FAILED',
  body_too_large: 'PAYLOAD_TOO_LARGE',
  idempotency_mismatch: 'IDEMPOTENCY_VIOLATION',
}

/** A whole HTTP/1.1 answer for a connection that has no parsed request, closing it. */
export function rawProblemAnswer(problem: Problem, traceId: string): string {
  const document = problemDocument(problem, { instance: '/', traceId })
  const body = JSON.stringify(document)
  const lines = [
    `HTTP/1.1 ${document.status} ${document.title}`,
    `Content-Type: ${problemContentType}`,
    `Content-Length: ${Buffer.byteLength(body)}`,
    `X-Request-Id: ${traceId}`,
    'X-Content-Type-Options: nosniff',
    'Cache-Control: no-store',
    'Connection: close',
  ]
  if (document.retry_after_seconds !== undefined) lines.push(`Retry-After: ${document.retry_after_seconds}`)
  return `${lines.join('\r\n')}\r\n\r\n${body}`
}
