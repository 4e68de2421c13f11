/**
 * The bare echo of a submission: Fastify parses and validates the body by the schema of the real route, and answers with
 * the same status, headers and size. Nothing is hashed, counted or kept.
 */
import { randomUUID } from 'node:crypto'
import { PetitionReceipt, SubmitPetition } from '@spillway/protocol/schema'
import type { Static } from 'typebox'
import { bareApp, listen } from './handler-app.js'

const path = '/api/v1/petition-submissions'
const contentHash = '0'.repeat(64)
/** A window has that long to go when a submitter's first petition of an hour is answered. */
const resetSeconds = 3_600

const app = bareApp()
app.route<{ Body: Static<typeof SubmitPetition> }>({
  method: 'POST',
  url: path,
  schema: { body: SubmitPetition, response: { 201: PetitionReceipt } },
  // As the server does it: what is sent is small.
  serializerCompiler: () => JSON.stringify,
  handler: (request, reply) => {
    const { type, realm = null } = request.body
    const id = randomUUID()
    return reply
      .code(201)
      .header('x-request-id', request.id)
      .header('x-content-type-options', 'nosniff')
      .header('ratelimit-policy', '"petitions";q=10;w=3600')
      .header('ratelimit', `"petitions";r=9;t=${resetSeconds}`)
      .header('x-ratelimit-limit', '10')
      .header('x-ratelimit-remaining', '9')
      .header('x-ratelimit-reset', String(Math.ceil(Date.now() / 1_000) + resetSeconds))
      .header('location', `${path}/${id}`)
      .header('content-type', 'application/json; charset=utf-8')
      .send({
        petition_id: id,
        state: 'RECEIVED',
        type,
        content_hash: contentHash,
        realm,
        created_at: new Date().toISOString(),
      })
  },
})
await listen(app)
