/** The ticket routes as a function from Request to Response. */
import type { Intake } from '../intake/intake.js'
import { encodeTicket, problemAnswer } from './encode.js'
import { type FetchInfo, FetchIntakeRequest, readBody, responseOf } from './fetch-binding.js'
import { type EventSink, eventHeaders } from './operation-stream.js'
import { loadTickets, mountedAt, pathWithin } from './ticket-loading.js'
import type { TicketAnswer } from './ticket-table.js'
import type { TicketRoutesOptions } from './tickets.js'

/** `otherwise` answers the requests that are not for a ticket route; without it they are answered with 404. */
export type FetchTickets = <Other = never>(
  request: Request,
  info?: FetchInfo,
  otherwise?: () => Other | Promise<Other>,
) => Promise<Response | Other>

export function fetchTickets(intake: Intake, options?: TicketRoutesOptions & { prefix?: string }): FetchTickets {
  const load = loadTickets(intake, options)
  const prefix = mountedAt(intake, options?.prefix)
  return async (request, info = {}, otherwise) => {
    const { tickets, find, noTicketPath, queryOf } = await load()
    const asked = new FetchIntakeRequest(request, info)
    const path = pathWithin(prefix, asked.path)
    const found = path === null ? null : find(request.method, path)
    if (found === null) {
      if (otherwise !== undefined) return otherwise()
      const { path: instance, traceId } = asked
      return responseOf(problemAnswer(noTicketPath, { instance, traceId }), traceId)
    }
    const answer = await tickets.answer(found.route, {
      request: asked,
      id: found.id,
      query: queryOf(asked.query),
      body: () => readBody(request),
      gone: () => request.signal,
    })
    return send(answer, asked, request)
  }
}

function send(answer: TicketAnswer, { path: instance, traceId }: FetchIntakeRequest, request: Request): Response {
  if (answer.kind === 'events') {
    return new Response(eventStream(answer.send, request.signal), {
      headers: { ...eventHeaders, 'x-request-id': traceId },
    })
  }
  const encoded = encodeTicket(answer, { instance, traceId })
  return responseOf(request.method === 'HEAD' ? { ...encoded, body: undefined } : encoded, traceId)
}

/** What a slow reader has not taken yet is at most this and one event more. */
const unreadBytes = 16_384

/** Events as a body. The client has left when the body is cancelled or the request is aborted. */
function eventStream(send: (sink: EventSink) => Promise<void>, aborted: AbortSignal): ReadableStream<Uint8Array> {
  const gone = new AbortController()
  const encoder = new TextEncoder()
  const waiting: (() => void)[] = []
  const release = (): void => {
    for (const go of waiting.splice(0)) go()
  }
  const leave = (): void => {
    gone.abort()
    release()
  }
  if (aborted.aborted) leave()
  aborted.addEventListener('abort', leave, { once: true })
  const start = (controller: ReadableStreamDefaultController<Uint8Array>): void => {
    const write = async (text: string): Promise<void> => {
      if (gone.signal.aborted) return
      controller.enqueue(encoder.encode(text))
      if ((controller.desiredSize ?? 0) <= 0) await new Promise<void>((resolve) => waiting.push(resolve))
    }
    const end = (finish: () => void): void => {
      aborted.removeEventListener('abort', leave)
      if (!isClosed) finish()
    }
    const abandon = (): void => {
      isClosed = true
      controller.error(new Error('The client did not read its events.'))
      leave()
    }
    send({ write, gone: gone.signal, abandon }).then(
      () => end(() => controller.close()),
      (fault: unknown) => end(() => controller.error(fault)),
    )
  }
  // By the client, or because it does not read.
  let isClosed = false
  const cancel = (): void => {
    isClosed = true
    leave()
  }
  return new ReadableStream(
    { start, pull: release, cancel },
    { highWaterMark: unreadBytes, size: (chunk) => chunk?.byteLength ?? 0 },
  )
}
