/** Binds the ticket routes to Fastify, as a plugin. */
import { limits } from '@spillway/protocol/wire'
import type { FastifyInstance, FastifyReply, FastifyRequest, FastifySchema } from 'fastify'
import type { Intake } from '../intake/intake.js'
import { jsonOf } from './carried-json.js'
import { goneSignal } from './connections.js'
import { deadLetterRoutes } from './dead-letter-routes.js'
import { laneRoutes } from './lane-routes.js'
import { operationRoutes } from './operation-routes.js'
import { type OutputOf, sendEvents } from './operation-stream.js'
import { sendProblem } from './problem.js'
import { refuseUntilReady } from './readiness.js'
import type { TicketAnswer, TicketContext, TicketRequest, TicketRoute } from './ticket-table.js'
import './typebox.js'
import { defaultViewer, ticketAccess, type Viewer } from './viewer.js'

/** Any Fastify application, with any type provider and logger. */
export type FastifyLike = Pick<
  FastifyInstance,
  'addHook' | 'setSerializerCompiler' | 'get' | 'post' | 'delete' | 'route'
>

export interface TicketRoutesOptions {
  /** Who asks. Default: our server's principal, or `request.user.id`, or the client's address. */
  viewer?: (request: FastifyRequest) => Viewer
  /** For operations with an output stream. */
  outputOf?: OutputOf
  /** A page of a list ends at this size. Default 4 MiB. */
  pageBytesMax?: number
  /** Types whose queue the caller names: a key bound to queues is limited to its queues for these. Default: none. */
  namedTypes?: readonly string[]
}

/** The routes under `/api/v1/operations`, `/api/v1/dead-letters` and `/api/v1/lanes`. */
export function ticketRoutes(intake: Intake, options: TicketRoutesOptions = {}): (app: FastifyLike) => Promise<void> {
  const viewerOf = options.viewer ?? defaultViewer
  const context: TicketContext = {
    intake,
    access: ticketAccess(intake.store, options.namedTypes ?? []),
    outputOf: options.outputOf,
    pageBytesMax: options.pageBytesMax ?? limits.pageBytes,
  }
  return async (app) => {
    app.setSerializerCompiler(() => jsonOf)
    refuseUntilReady(app, intake)
    for (const route of [...operationRoutes, ...deadLetterRoutes, ...laneRoutes]) {
      app.route({
        method: route.method,
        url: route.path,
        schema: schemaOf(route),
        ...(route.role && { config: { role: route.role } }),
        ...(route.streams && { exposeHeadRoute: false }),
        handler: async (request, reply) =>
          send(reply, await route.handle(context, ticketRequest(request, reply, viewerOf(request)))),
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

function ticketRequest(request: FastifyRequest, reply: FastifyReply, viewer: Viewer): TicketRequest {
  const { id = '' } = request.params as { id?: string }
  const lastEventId = request.headers['last-event-id']
  return {
    id,
    query: request.query,
    body: request.body,
    lastEventId: lastEventId === undefined ? undefined : String(lastEventId),
    viewer,
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
