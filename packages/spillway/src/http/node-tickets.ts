/** The ticket routes for node:http and for Express 4 and 5. */
import type { IncomingMessage, ServerResponse } from 'node:http'
import type { Intake } from '../intake/intake.js'
import { goneSignal } from './connections.js'
import { encodeTicket, problemAnswer } from './encode.js'
import { internalFault } from './faults.js'
import { bodyOf, type NodeHandler, NodeIntakeRequest, writeAnswer } from './node-binding.js'
import { sendEvents } from './operation-stream.js'
import { type Problem, pathOf } from './problem.js'
import { loadTickets, mountedAt, pathWithin } from './ticket-loading.js'
import type { TicketAnswer } from './ticket-table.js'
import type { TicketRoutesOptions } from './tickets.js'

/**
 * For Express, as a middleware: requests that are not for a ticket route go to `next`, and so do errors that are not ours.
 * Express takes the path it is mounted at off `url`.
 */
export function expressTickets(intake: Intake, options?: TicketRoutesOptions & { prefix?: string }): NodeHandler {
  mountedAt(intake, options?.prefix)
  const serve = ticketServer(intake, options, '')
  return (request, response, next) => {
    serve(request, response, next).catch((fault: unknown) =>
      next === undefined ? answerDefect(intake, request, response, fault) : next(fault),
    )
  }
}

/** For node:http. `otherwise` gets the requests that are not for a ticket route; without it they are answered with 404. */
export type NodeTickets = (request: IncomingMessage, response: ServerResponse, otherwise?: () => void) => void

export function nodeTickets(intake: Intake, options?: TicketRoutesOptions & { prefix?: string }): NodeTickets {
  mountedAt(intake, options?.prefix)
  const serve = ticketServer(intake, options, options?.prefix ?? '')
  return (request, response, otherwise) => {
    serve(request, response, otherwise).catch((fault: unknown) => answerDefect(intake, request, response, fault))
  }
}

type Serve = (request: IncomingMessage, response: ServerResponse, otherwise?: () => void) => Promise<void>

function ticketServer(intake: Intake, options: TicketRoutesOptions | undefined, prefix: string): Serve {
  const load = loadTickets(intake, options)
  return async (request, response, otherwise) => {
    const { tickets, find, noTicketPath, queryOf } = await load()
    const path = pathWithin(prefix, pathOf(request.url ?? '/'))
    const found = path === null ? null : find(request.method ?? 'GET', path)
    if (found === null && otherwise !== undefined) return otherwise()
    const asked = new NodeIntakeRequest(request)
    if (found === null) return sendProblem(response, noTicketPath, asked)
    const answer = await tickets.answer(found.route, {
      request: asked,
      id: found.id,
      query: queryOf(asked.query),
      body: () => bodyOf(request),
      gone: () => goneSignal(response, 'wait'),
    })
    return send(response, answer, asked)
  }
}

function sendProblem(response: ServerResponse, problem: Problem, { path: instance, traceId }: NodeIntakeRequest): void {
  writeAnswer(response, problemAnswer(problem, { instance, traceId }), traceId)
}

async function send(response: ServerResponse, answer: TicketAnswer, asked: NodeIntakeRequest): Promise<void> {
  const { path: instance, traceId } = asked
  if (answer.kind === 'events') return sendEvents(response, { 'x-request-id': traceId }, answer.send)
  writeAnswer(response, encodeTicket(answer, { instance, traceId }), traceId)
}

function answerDefect(intake: Intake, request: IncomingMessage, response: ServerResponse, fault: unknown): void {
  const asked = new NodeIntakeRequest(request)
  intake.log.error({ err: fault, trace_id: asked.traceId, path: asked.path }, 'request failed')
  sendProblem(response, internalFault, asked)
}
