/**
 * The handler that all variants of accepting share: Fastify with the body's schema of `POST /api/v1/operations`, and an
 * answer that has the status, the headers and the size of Spillway's own. What it does with the body differs: nothing
 * (the bare echo), one commit, or a peer's call.
 */
import { randomUUID } from 'node:crypto'
import { ForwardPayload, Queued, SubmitOperation } from '@spillway/protocol/schema'
import Fastify, { type FastifyBaseLogger, type FastifyInstance, type FastifyReply, LogController } from 'fastify'
import { pino } from 'pino'
import Type from 'typebox'

export interface Submitted {
  readonly queue: string
  readonly partition: string
  readonly payload: unknown
}

/** Keeps what was submitted, and gives its id. */
export type Keep = (submitted: Submitted) => Promise<string>

export const operationBody = Type.Object(
  { ...SubmitOperation.properties, type: Type.Literal('http.request'), payload: ForwardPayload },
  { additionalProperties: false },
)

/** As Spillway logs: JSON lines at level info, and nothing about a request that went well. */
export const log: FastifyBaseLogger = pino({ level: 'info' }, pino.destination({ dest: 1, sync: true }))

export function bareApp(): FastifyInstance {
  return Fastify({
    loggerInstance: log,
    logController: new LogController({ disableRequestLogging: true }),
    childLoggerFactory: (logger) => logger,
    genReqId: () => randomUUID().replaceAll('-', ''),
    requestIdHeader: false,
    keepAliveTimeout: 72_000,
  })
}

export function handlerApp(keep: Keep | null): FastifyInstance {
  const app = bareApp()
  app.route<{ Body: Submitted }>({
    method: 'POST',
    url: '/api/v1/operations',
    schema: { body: operationBody, response: { 202: Queued } },
    handler:
      keep === null
        ? (_, reply) => answer(reply, randomUUID())
        : async (request, reply) => answer(reply, await keep(request.body)),
  })
  return app
}

function answer(reply: FastifyReply, operationId: string): FastifyReply {
  return reply
    .code(202)
    .header('x-request-id', reply.request.id)
    .header('x-content-type-options', 'nosniff')
    .header('preference-applied', 'respond-async')
    .header('location', `/api/v1/operations/${operationId}`)
    .header('content-type', 'application/json; charset=utf-8')
    .send({
      status: 'queued',
      operationId,
      queuePosition: 0,
      estimatedWaitSeconds: 0,
      estimatedWait: '0s',
      reason: 'requested',
    })
}

/** Listens on a free port, says where, and ends politely. */
export async function listen(app: FastifyInstance, close: () => Promise<void> = async () => undefined): Promise<void> {
  const origin = await app.listen({ host: '127.0.0.1', port: 0, backlog: 4_096 })
  console.log(`LISTENS ${origin}`)
  process.once('SIGTERM', () => {
    app.server.closeAllConnections()
    void app.close().then(close)
  })
}
