import { limits } from '@spillway/protocol/wire'
import type { Definition, IntakeUser } from '../intake/define.js'
import type { Intake } from '../intake/intake.js'
import { continueTrace, formatTraceparent } from '../metrics/trace.js'
import { type Body, bodyTooLarge, parseBody } from './body-form.js'
import type { Wire } from './mount.js'
import { mountOf } from './mount.js'
import { type Problem, problemDocument, problemHeaders } from './problem.js'

export interface FetchInfo {
  /** The client's address, for unauthenticated callers. Default `unknown`: they all count as one. */
  clientAddress?: string
  user?: IntakeUser
  params?: Readonly<Record<string, string>>
}

export type FetchHandler = (request: Request, info?: FetchInfo) => Promise<Response>

/** The plain form: takes a Request, returns a Response. */
export function fetchHandler(intake: Intake, definition: Definition): FetchHandler {
  const mounted = mountOf(intake, definition)
  return async (request, info = {}) => {
    const url = new URL(request.url)
    const trace = continueTrace(request.headers.get('traceparent') ?? undefined)
    const respond = (wire: Wire): Response => {
      const headers = new Headers(wire.ok ? wire.answer.headers : wire.headers)
      headers.set('x-request-id', trace.traceId)
      if (!wire.ok) return problemResponse(wire.problem, headers, url.pathname, trace.traceId)
      headers.set('content-type', 'application/json; charset=utf-8')
      return new Response(JSON.stringify(wire.answer.body), { status: wire.answer.status, headers })
    }
    const refuse = (problem: Problem): Response => respond({ ok: false, problem, headers: {} })
    const entry = await mounted.enter({
      method: request.method,
      path: url.pathname,
      headers: Object.fromEntries(request.headers),
      query: url.searchParams,
      params: info.params ?? {},
      clientAddress: info.clientAddress ?? 'unknown',
      user: info.user ?? null,
      traceparent: formatTraceparent(trace),
    })
    if (!entry.ok) return respond(entry.wire)
    // The permit of a client that leaves is free at once, even while its operation still runs.
    request.signal.addEventListener('abort', entry.entered.leave, { once: true })
    try {
      // The client left while its permit was taken.
      if (request.signal.aborted) return new Response(null, { status: 499 })
      const body = await readBody(request, limits.bodyBytes)
      if (!body.ok) return refuse(body.problem)
      return respond(await mounted.submit(entry.entered, body.value, () => request.signal, body.text))
    } finally {
      entry.entered.leave()
    }
  }
}

function problemResponse(problem: Problem, headers: Headers, instance: string, traceId: string): Response {
  const document = problemDocument(problem, { instance, traceId })
  for (const [name, value] of Object.entries(problemHeaders(document))) headers.set(name, value)
  return new Response(JSON.stringify(document), { status: document.status, headers })
}

async function readBody({ body, headers }: Request, limit: number): Promise<Body> {
  const chunks: Uint8Array[] = []
  let size = 0
  for await (const chunk of body ?? []) {
    size += chunk.byteLength
    if (size > limit) return { ok: false, problem: bodyTooLarge }
    chunks.push(chunk)
  }
  return parseBody(Buffer.concat(chunks), headers.get('content-type'), headers.get('content-encoding'))
}
