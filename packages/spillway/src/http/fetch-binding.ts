import { limits } from '@spillway/protocol/wire'
import type { Definition, IntakeRequest, IntakeUser } from '../intake/define.js'
import type { Intake } from '../intake/intake.js'
import { continueTrace, formatTraceparent } from '../metrics/trace.js'
import { type Body, bodyCutOff, bodyTooLarge, parseBody } from './body-form.js'
import { type EncodedAnswer, encodeWire, methodRefused, safeMethods } from './encode.js'
import { faultProblem } from './faults.js'
import type { Wire } from './mount.js'
import { mountOf, userFrom } from './mount.js'

type Params = Readonly<Record<string, string | readonly string[] | undefined>>

/** What is not in a Request. Next passes `params`, Deno `remoteAddr`, Bun its server. */
export interface FetchInfo {
  /** The client's address: the identity of callers without a user. */
  clientAddress?: string
  user?: IntakeUser
  params?: Params | Promise<Params>
  remoteAddr?: { hostname?: string }
  requestIP?: (request: Request) => { address: string } | null
}

export type FetchHandler = (request: Request, info?: FetchInfo) => Promise<Response>

/** The plain form: takes a Request, returns a Response. Errors that are not ours reject, for the framework's own handler. */
export function fetchHandler(intake: Intake, definition: Definition): FetchHandler {
  const mounted = mountOf(intake, definition)
  return async (request, info = {}) => {
    const asked = new FetchIntakeRequest(request, info, await info.params)
    const { traceId, path: instance } = asked
    const respond = (wire: Wire): Response => responseOf(encodeWire(wire, { instance, traceId }), traceId)
    if (safeMethods.has(request.method)) return respond(methodRefused)
    try {
      const entry = await mounted.enter(asked)
      if (!entry.ok) return respond(entry.wire)
      // The permit of a client that leaves is free at once, even while its operation still runs.
      request.signal.addEventListener('abort', entry.entered.leave, { once: true })
      try {
        // The client left while its permit was taken.
        if (request.signal.aborted) return new Response(null, { status: 499 })
        const body = await readBody(request)
        if (!body.ok) return respond({ ok: false, problem: body.problem, headers: {} })
        return respond(await mounted.submit(entry.entered, body.value, () => request.signal, body.text))
      } finally {
        request.signal.removeEventListener('abort', entry.entered.leave)
        entry.entered.leave()
      }
    } catch (fault) {
      const problem = faultProblem(fault)
      if (problem === undefined) throw fault
      return respond({ ok: false, problem, headers: {} })
    }
  }
}

export function responseOf({ status, headers, body }: EncodedAnswer, traceId: string): Response {
  return new Response(body ?? null, { status, headers: { ...headers, 'x-request-id': traceId } })
}

/** A body over the limit is refused without being read to its end: leaving the loop cancels it. */
export async function readBody({ body, headers }: Request): Promise<Body> {
  const tooLarge: Body = { ok: false, problem: bodyTooLarge }
  if (Number(headers.get('content-length') ?? 0) > limits.bodyBytes) return tooLarge
  const chunks: Uint8Array[] = []
  let size = 0
  try {
    for await (const chunk of body ?? []) {
      size += chunk.byteLength
      if (size > limits.bodyBytes) return tooLarge
      chunks.push(chunk)
    }
  } catch {
    // The stream fails only when the client is gone: nobody reads this answer.
    return { ok: false, problem: bodyCutOff }
  }
  return parseBody(Buffer.concat(chunks), headers.get('content-type'), headers.get('content-encoding'))
}

/** Reads on demand. */
export class FetchIntakeRequest implements IntakeRequest {
  readonly #request: Request
  readonly #info: FetchInfo
  readonly #url: URL
  readonly params: Record<string, string>
  readonly traceId: string
  readonly traceparent: string

  constructor(request: Request, info: FetchInfo, params: Params = {}) {
    this.#request = request
    this.#info = info
    this.#url = new URL(request.url)
    this.params = joined(params)
    const trace = continueTrace(request.headers.get('traceparent') ?? undefined)
    this.traceId = trace.traceId
    this.traceparent = formatTraceparent(trace)
  }

  get method(): string {
    return this.#request.method
  }

  get path(): string {
    return this.#url.pathname
  }

  get query(): URLSearchParams {
    return this.#url.searchParams
  }

  get headers(): Record<string, string> {
    return Object.fromEntries(this.#request.headers)
  }

  get user(): IntakeUser | null {
    return userFrom(this.#info.user)
  }

  /** A stand-in would make one identity of all callers, with one rate and one another's tickets. */
  get clientAddress(): string {
    const { clientAddress, remoteAddr, requestIP } = this.#info
    const address = clientAddress ?? remoteAddr?.hostname ?? requestIP?.call(this.#info, this.#request)?.address
    if (address !== undefined) return address
    throw new TypeError(
      'intake.fetch does not know who asks: a Request has no client address. Give the definition an identity function ' +
        '(identity: (request) => …; for ticket routes the option viewer), or call the handler with ' +
        '{ clientAddress } or { user: { id, roles } } as its second argument.',
    )
  }
}

/** A catch-all segment is a list of path segments. */
function joined(params: Params): Record<string, string> {
  const named: Record<string, string> = {}
  for (const [name, value] of Object.entries(params)) {
    if (value !== undefined) named[name] = typeof value === 'string' ? value : value.join('/')
  }
  return named
}
