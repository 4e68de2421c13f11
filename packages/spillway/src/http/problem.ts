import {
  type OpenAiError,
  type OpenAiErrorBody,
  type ProblemCode,
  type ProblemDocument,
  problems,
  routingCodes,
} from '@spillway/protocol/wire'
import type { FastifyReply } from 'fastify'
import type { RequestFault } from './json-pointer.js'
import { openAiErrorOf } from './openai-error.js'
import { retryAfterSeconds } from './retry-after.js'

/** An error answer as a value: handlers and gates return it, `sendProblem` sends it. */
export interface Problem {
  code: ProblemCode
  /** A handler's own code, shown in place of `code`. */
  ownCode?: string
  /** For people; never a stack, SQL or a driver's message. */
  detail: string
  /** The base of Retry-After on 429 and 503; jittered upward when it is sent. Default 1,000. */
  retryAfterMs?: number
  /** The faults and their places, on 400. */
  errors?: readonly RequestFault[]
  /** Additional members. They cannot replace the standard ones. */
  extensions?: Readonly<Record<string, unknown>>
  /** Default `urn:spillway:error:<code>`. */
  type?: string
  /** Default: the title of the code. */
  title?: string
  /** Default: the status of the code. Set for an upstream's answer that is passed on. */
  status?: number
  /** Sent unchanged to clients of OpenAI's form: an upstream's own error. Default: made from the rest. */
  openai?: OpenAiError
}

export function headerProblem(name: string, detail: string, message: string): Problem {
  return { code: 'invalid_request', detail, errors: [{ path: `/headers/${name}`, message }] }
}

/** Nothing in an invalid URL has a name, so the whole of it is wrong. */
export function urlProblem(message: string): Problem {
  return { code: 'invalid_request', detail: 'The URL is not valid.', errors: [{ path: '', message }] }
}

const problemContentType = 'application/problem+json'

const retryAfterMsDefault = 1_000

export interface ProblemPlace {
  instance: string
  traceId: string
  random?: () => number
}

export function problemDocument(problem: Problem, place: ProblemPlace): ProblemDocument {
  const { title } = problems[problem.code]
  const status = problem.status ?? problems[problem.code].status
  const document: ProblemDocument = {
    ...problem.extensions,
    type: problem.type ?? `urn:spillway:error:${problem.code}`,
    title: problem.title ?? title,
    status,
    detail: problem.detail,
    instance: place.instance,
    code: (problem.ownCode as ProblemCode | undefined) ?? problem.code,
    trace_id: place.traceId,
  }
  if (problem.errors !== undefined) document.errors = [...problem.errors]
  if (status === 429 || status === 503) {
    const baseSeconds = (problem.retryAfterMs ?? retryAfterMsDefault) / 1000
    document.retry_after_seconds = retryAfterSeconds(baseSeconds, place.random)
  }
  return document
}

/** A problem's headers, for every sender. */
export function problemHeaders(document: ProblemDocument): Record<string, string> {
  const headers: Record<string, string> = { 'content-type': problemContentType, 'cache-control': 'no-store' }
  if (document.retry_after_seconds !== undefined) headers['retry-after'] = String(document.retry_after_seconds)
  return headers
}

/** The path of a request target: no query, and no host if it came in absolute form. */
export function pathOf(target: string): string {
  const afterHost = target.startsWith('/') ? target : target.replace(/^[a-z][a-z0-9+.-]*:\/\/[^/?#]*/i, '')
  const end = afterHost.search(/[?#]/)
  const path = end === -1 ? afterHost : afterHost.slice(0, end)
  return path === '' ? '/' : path
}

/** Keeps Fastify from adding a charset parameter, which problem+json does not have. */
const asIs = (payload: unknown): string => payload as string

export function sendProblem(reply: FastifyReply, problem: Problem): FastifyReply {
  const { request } = reply
  // In a user's own app the request's id is a counter, and the binding has named the trace already.
  const traceId = String(reply.getHeader('x-request-id') ?? request.id)
  const place = { instance: pathOf(request.raw.url ?? '/'), traceId }
  // A route declares its form; a user's own app may well have routes under /v1.
  const how = request.is404 ? formAt(place.instance) : request.routeOptions.config.errorForm
  const { status, headers, body } = encodeProblem(problem, place, how)
  reply.code(status)
  reply.headers(headers)
  // Set here too: answers to a malformed URL come before the hooks.
  reply.header('x-request-id', traceId)
  return reply.serializer(asIs).send(body)
}

/**
 * The form that some routes' clients read: in addition to the problem's members `error`, a text (true) or `{code, message}`
 * with `ok: false` (object); or only OpenAI's error object (openai).
 */
export type ErrorForm = true | 'object' | 'openai'

declare module 'fastify' {
  interface FastifyContextConfig {
    /** The error form of this route's clients, if it is not the plain problem document. */
    errorForm?: ErrorForm
  }

  /** As @fastify/swagger declares them, which a user's app may have. */
  interface FastifySchema {
    tags?: readonly string[]
    summary?: string
    description?: string
  }
}

/** OpenAI's clients call any path under `/v1`. The exception is petitions, whose alias is the only one without `/api`. */
const openAiPath = /^\/v1(?:$|\/(?!petition-submissions(?:\/|$)))/

/** For requests without a route, and for those that could not be read that far. */
function formAt(path: string): ErrorForm | undefined {
  return openAiPath.test(path) ? 'openai' : undefined
}

export interface EncodedProblem {
  status: number
  headers: Record<string, string>
  body: string
}

/** Encodes a problem for the wire. */
export function encodeProblem(problem: Problem, place: ProblemPlace, how: ErrorForm | undefined): EncodedProblem {
  const document = problemDocument(problem, place)
  const { status } = document
  const headers = problemHeaders(document)
  if (how === 'openai') {
    headers['content-type'] = 'application/json'
    const openai: OpenAiErrorBody = { error: problem.openai ?? openAiErrorOf(document) }
    return { status, headers, body: JSON.stringify(openai) }
  }
  if (how !== undefined) addError(document, how)
  return { status, headers, body: JSON.stringify(document) }
}

function addError(document: ProblemDocument, how: true | 'object'): void {
  if (how === 'object') document.ok = false
  document.error ??=
    how === 'object' ? { code: objectCodes[document.code] ?? document.code, message: document.detail } : document.detail
}

/** For codes that differ between the object and the problem. */
const objectCodes: Partial<Record<ProblemCode, string>> = {
  ...Object.fromEntries(Object.entries(routingCodes).map(([routingCode, code]) => [code, routingCode])),
  invalid_request: 'SCHEMA_VALIDATION_FAILED',
  body_too_large: 'PAYLOAD_TOO_LARGE',
  idempotency_mismatch: 'IDEMPOTENCY_VIOLATION',
}

/** A whole HTTP/1.1 answer that closes the connection. `target`: the request's, if it was parsed that far. */
export function rawProblemAnswer(
  problem: Problem,
  traceId: string,
  target = '/',
  more: Record<string, string> = {},
): string {
  const instance = pathOf(target)
  const { status, headers, body } = encodeProblem(problem, { instance, traceId }, formAt(instance))
  const all = {
    ...headers,
    ...more,
    'content-length': String(Buffer.byteLength(body)),
    'x-request-id': traceId,
    'x-content-type-options': 'nosniff',
    connection: 'close',
  }
  const lines = Object.entries(all).map(([name, value]) => `${name}: ${value}`)
  return `HTTP/1.1 ${status} ${problem.title ?? problems[problem.code].title}\r\n${lines.join('\r\n')}\r\n\r\n${body}`
}
