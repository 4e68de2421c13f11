import { limits } from '@spillway/protocol/wire'
import type { IntakeUser } from '../intake/define.js'
import type { Intake } from '../intake/intake.js'
import type { Bound } from '../intake/submission.js'
import { continueTrace, formatTraceparent } from '../metrics/trace.js'
import type { Wire } from './answer.js'
import { bodyFormFault, bodyTooLarge, notJson } from './body-form.js'
import { mount } from './mount.js'
import { type Problem, problemDocument, problemHeaders } from './problem.js'
import { parseStrictJson } from './strict-json.js'

export interface FetchInfo {
  /** The client's address, for unauthenticated callers. Default `unknown`: they all count as one. */
  clientAddress?: string
  user?: IntakeUser
  params?: Readonly<Record<string, string>>
}

export type FetchHandler = (request: Request, info?: FetchInfo) => Promise<Response>

/** The plain form: takes a Request, returns a Response. */
export function fetchHandler(intake: Intake, bound: Bound, options: { bodyLimitBytes?: number } = {}): FetchHandler {
  const mounted = mount(intake, bound)
  const bodyLimit = options.bodyLimitBytes ?? limits.bodyBytes
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
    try {
      const body = await readBody(request, bodyLimit)
      if ('code' in body) return refuse(body)
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

async function readBody(request: Request, limit: number): Promise<{ value: unknown; text?: string } | Problem> {
  const contentType = request.headers.get('content-type')?.split(';', 1)[0]?.trim().toLowerCase()
  const chunks: Uint8Array[] = []
  let size = 0
  for await (const chunk of request.body ?? []) {
    size += chunk.byteLength
    if (size > limit) return bodyTooLarge
    chunks.push(chunk)
  }
  if (size === 0) return { value: undefined }
  if (contentType !== 'application/json') return notJson
  const formFault = bodyFormFault(request.headers.get('content-type'), request.headers.get('content-encoding'))
  if (formFault !== undefined) return formFault
  const parsed = parseStrictJson(Buffer.concat(chunks))
  if (parsed.ok) return { value: parsed.value, text: parsed.text }
  return { code: 'invalid_request', detail: 'The body is not valid.', errors: [parsed.fault] }
}
