/**
 * resumable-stream as its documentation has it, in two processes over one Redis. The `producer` calls the model and keeps what
 * it says in its memory; the `gateway` has the readers, and asks for streams by Redis's publish and subscribe.
 */
import { randomUUID } from 'node:crypto'
import type { Readable } from 'node:stream'
import type { FastifyReply } from 'fastify'
import { Redis } from 'ioredis'
import { createResumableStreamContext } from 'resumable-stream/ioredis'
import { Pool } from 'undici'
import { env } from './env.js'
import { bareApp, listen } from './handler-app.js'

const publisher = new Redis(env('REDIS'))
const subscriber = new Redis(env('REDIS'))
// ioredis 6 has the calls of 5, which the package was made for; its types are of 5.
const clients = { publisher, subscriber } as unknown as Pick<
  Parameters<typeof createResumableStreamContext>[0],
  'publisher' | 'subscriber'
>
const context = createResumableStreamContext({ waitUntil: null, ...clients })
const app = bareApp()
const pool = new Pool(env('NEXT'), { connections: 10_000, pipelining: 1, headersTimeout: 0, bodyTimeout: 0 })

function post(path: string, body: unknown, signal?: AbortSignal) {
  const headers = { 'content-type': 'application/json' }
  return pool.request({ method: 'POST', path, headers, body: JSON.stringify(body), signal: signal ?? null })
}

async function* textsOf(body: Readable): AsyncGenerator<string> {
  for await (const came of body.setEncoding('utf8')) yield String(came)
}

function produce(): void {
  const running = new Set<AbortController>()
  app.post<{ Body: { id: string; chat: unknown } }>('/start', async (request) => {
    const { id, chat } = request.body
    const stop = new AbortController()
    running.add(stop)
    const { body } = await post('/v1/chat/completions', chat, stop.signal)
    const stream = await context.createNewResumableStream(id, () => ReadableStream.from(textsOf(body)))
    // Nobody reads it here; read on all the same, or its memory would hold it twice.
    void (async () => {
      for await (const _ of stream ?? []);
    })()
      // It was stopped.
      .catch(() => undefined)
      .finally(() => running.delete(stop))
    return {}
  })
  app.post('/stop', async () => {
    for (const stop of running) stop.abort()
    return {}
  })
}

async function send(reply: FastifyReply, id: string, skip: number): Promise<FastifyReply> {
  const stream = await context.resumeExistingStream(id, skip)
  if (!stream) return reply.code(stream === null ? 204 : 404).send()
  reply.headers({ 'content-type': 'text/event-stream; charset=utf-8', 'x-stream-id': id })
  return reply.send(stream)
}

function relay(): void {
  app.post('/v1/chat/completions', async (request, reply) => {
    const id = randomUUID()
    const { body } = await post('/start', { id, chat: request.body })
    await body.dump()
    return send(reply, id, 0)
  })
  app.get<{ Params: { id: string }; Querystring: { skip?: string } }>('/streams/:id', (request, reply) =>
    send(reply, request.params.id, Number(request.query.skip ?? 0)),
  )
}

if (env('PART') === 'producer') produce()
else relay()
// Streams that are stopped break in the package's own promises.
process.on('unhandledRejection', (fault) => app.log.debug(fault))
await listen(app, async () => {
  publisher.disconnect()
  subscriber.disconnect()
  await pool.destroy()
})
