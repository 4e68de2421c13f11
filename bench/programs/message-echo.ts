/**
 * The bare echo of a push: Fastify parses and validates the body by the schema of the real route, and answers with the same
 * status, headers and size. Nothing is stored.
 */
import { randomUUID } from 'node:crypto'
import { PushRequest } from '@spillway/protocol/schema'
import type { Static } from 'typebox'
import { bareApp, listen } from './handler-app.js'
import { pushPath } from './message-body.js'

const partitionId = randomUUID()

const app = bareApp()
app.route<{ Body: Static<typeof PushRequest> }>({
  method: 'POST',
  url: pushPath,
  schema: { body: PushRequest },
  // As the server does it: what is sent is small.
  serializerCompiler: () => JSON.stringify,
  handler: (request, reply) =>
    reply
      .code(201)
      .header('x-request-id', request.id)
      .header('x-content-type-options', 'nosniff')
      .header('content-type', 'application/json; charset=utf-8')
      .send(
        request.body.items.map(({ queue, transactionId, traceId }, index) => {
          const id = randomUUID()
          return {
            index,
            message_id: id,
            transaction_id: transactionId ?? id,
            partition_id: partitionId,
            trace_id: traceId ?? null,
            queueName: queue,
            status: 'queued',
          }
        }),
      ),
})
await listen(app)
