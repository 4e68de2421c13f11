/**
 * The bare way through JetStream: Fastify parses and validates the task by the schema of the real route and publishes it
 * with an inbox in a header; a pull consumer answers there and acks; the request is answered when both the broker's ack
 * and the answer have come. No limit, no policy, no metrics, nothing kept.
 *
 * PART: `both` in one process on one connection, or `gateway`, or `router`.
 */

import { AckPolicy, jetstream, jetstreamManager, RetentionPolicy, StorageType } from '@nats-io/jetstream'
import { connect, createInbox, headers, type NatsConnection } from '@nats-io/transport-node'
import { DecideAnswer, DecideRequest } from '@spillway/protocol/schema'
import type { Static } from 'typebox'
import { env } from './env.js'
import { bareApp, listen } from './handler-app.js'
import { decidePath, providerFigures } from './routing-body.js'

const subject = 'bare.decide'
const stream = 'BARE'
const consumer = 'bare-router'
const replyTo = 'Bare-Reply-To'
/** As many as the real router takes with its defaults. */
const atOnce = 600
const ackPendingMax = 2 * atOnce
const resetSeconds = 60
const limitPerMinute = 10_000_000

type Task = Static<typeof DecideRequest>
type Answer = Static<typeof DecideAnswer>

const nc = await connect({ servers: new URL(env('NATS_URL')).host, reconnect: false })
await ensureTopology(nc)
const part = env('PART')
if (part !== 'gateway') await takeTasks(nc)
if (part === 'router') {
  console.log('TAKES')
  process.once('SIGTERM', () => void nc.close())
} else {
  await serveTasks(nc)
}

/** With the storage and the retention of the real streams. */
async function ensureTopology(connection: NatsConnection): Promise<void> {
  const jsm = await jetstreamManager(connection)
  await jsm.streams.add({
    name: stream,
    subjects: [subject],
    retention: RetentionPolicy.Workqueue,
    storage: StorageType.File,
  })
  await jsm.consumers.add(stream, {
    durable_name: consumer,
    ack_policy: AckPolicy.Explicit,
    max_ack_pending: ackPendingMax,
  })
}

async function takeTasks(connection: NatsConnection): Promise<void> {
  const tasks = await jetstream(connection).consumers.get(stream, consumer)
  await tasks.consume({
    max_messages: ackPendingMax,
    callback: (message) => {
      const { request_id } = message.json<Task>()
      const answer: Answer = {
        ok: true,
        decision: { provider_id: 'north', ...providerFigures, reason: 'weighted' },
        context: { request_id, trace_id: message.headers?.get('traceparent') ?? '' },
      }
      connection.publish(message.headers?.get(replyTo) ?? '', JSON.stringify(answer))
      message.ack()
    },
  })
}

async function serveTasks(connection: NatsConnection): Promise<void> {
  const js = jetstream(connection)
  const inbox = `${createInbox()}.`
  const waiting = new Map<string, (answer: Uint8Array) => void>()
  connection.subscribe(`${inbox}*`, {
    callback: (fault, message) => {
      if (fault !== null) throw fault
      waiting.get(message.subject)?.(message.data)
      waiting.delete(message.subject)
    },
  })
  let asked = 0
  const ask = async (task: Task, traceId: string): Promise<Uint8Array> => {
    asked += 1
    const name = inbox + asked.toString(36)
    const answer = new Promise<Uint8Array>((resolve) => waiting.set(name, resolve))
    const own = headers()
    own.set(replyTo, name)
    own.set('traceparent', traceId)
    await js.publish(subject, JSON.stringify(task), { headers: own })
    return answer
  }
  const app = bareApp()
  app.route<{ Body: Task }>({
    method: 'POST',
    url: decidePath,
    schema: { body: DecideRequest, response: { 200: DecideAnswer } },
    serializerCompiler: () => JSON.stringify,
    handler: async (request, reply) => {
      const answer = await ask(request.body, request.id)
      return (
        reply
          .header('x-request-id', request.id)
          .header('x-content-type-options', 'nosniff')
          .header('ratelimit-policy', `"routes_decide";q=${limitPerMinute};w=${resetSeconds}`)
          .header('ratelimit', `"routes_decide";r=${limitPerMinute - 1};t=${resetSeconds}`)
          .header('x-ratelimit-limit', String(limitPerMinute))
          .header('x-ratelimit-remaining', String(limitPerMinute - 1))
          .header('x-ratelimit-reset', String(Math.ceil(Date.now() / 1_000) + resetSeconds))
          .header('content-type', 'application/json; charset=utf-8')
          // Unparsed: nothing here uses the content of the answer.
          .send(Buffer.from(answer.buffer, answer.byteOffset, answer.byteLength))
      )
    },
  })
  await listen(app, () => connection.close())
}
