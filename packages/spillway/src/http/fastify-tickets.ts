/** Binds the ticket routes to Fastify, as a plugin. */
import type { FastifyInstance, FastifyReply, FastifyRequest, FastifySchema } from 'fastify'
import type { Intake } from '../intake/intake.js'
import { jsonOf } from './carried-json.js'
import { goneSignal } from './connections.js'
import { intakeRequestOf, takeEmptyBody } from './fastify-binding.js'
import { answerKnownFault } from './faults.js'
import { sendEvents } from './operation-stream.js'
import { sendProblem } from './problem.js'
import { refuseUntilReady } from './readiness.js'
import { mountedAt } from './ticket-loading.js'
import type { TicketAnswer, TicketRoute } from './ticket-table.js'
import { type TicketCall, type TicketRoutesOptions, Tickets, ticketTable } from './tickets.js'

/** Any Fastify application, with any type provider and logger. */
export type FastifyLike = Pick<
  FastifyInstance,
  'addHook' | 'setSerializerCompiler' | 'get' | 'post' | 'delete' | 'route' | 'prefix'
>

/** The routes under `/api/v1/operations`, `/api/v1/dead-letters` and `/api/v1/lanes`. */
export function ticketRoutes(intake: Intake, options: TicketRoutesOptions = {}): (app: FastifyLike) => Promise<void> {
  const tickets = new Tickets(intake, options)
  return async (app) => {
    mountedAt(intake, app.prefix.replace(/\/+$/, ''))
    app.setSerializerCompiler(() => jsonOf)
    refuseUntilReady(app, intake)
    for (const route of ticketTable) {
      app.route({
        method: route.method,
        url: route.path,
        schema: schemaOf(route),
        // The schemas are only for the API description: Tickets validates.
        validatorCompiler: () => () => true,
        ...(route.role && { config: { role: route.role } }),
        ...(route.streams && { exposeHeadRoute: false }),
        onRequest: takeEmptyBody,
        errorHandler: answerKnownFault,
        handler: async (request, reply) => send(reply, await tickets.answer(route, callOf(request, reply))),
      })
    }
  }
}

function schemaOf({ summary, description, query, body, response }: TicketRoute): FastifySchema {
  return {
    tags: ['operations'],
    summary,
    ...(description !== undefined && { description }),
    querystring: query,
    ...(body && { body }),
    ...(response && { response }),
  }
}

function callOf(request: FastifyRequest, reply: FastifyReply): TicketCall {
  const { id = '' } = request.params as { id?: string }
  return {
    request: intakeRequestOf(request, reply),
    id,
    query: request.query,
    body: () => ({ ok: true, value: request.body }),
    gone: () => goneSignal(reply.raw, 'wait'),
  }
}

async function send(reply: FastifyReply, answer: TicketAnswer): Promise<FastifyReply> {
  switch (answer.kind) {
    case 'json':
      return reply.code(answer.status).send(answer.body)
    case 'problem':
      return sendProblem(reply, answer.problem)
    case 'empty':
      return reply.code(204).send()
    case 'events':
      reply.hijack()
      await sendEvents(reply.raw, reply.getHeaders() as Record<string, string>, answer.send)
      return reply
  }
}
