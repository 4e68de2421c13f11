/** The same requests over every binding, on real sockets: the answers must be the same. */
import { once } from 'node:events'
import { createServer, type IncomingHttpHeaders, type RequestListener, request as send } from 'node:http'
import type { AddressInfo } from 'node:net'
import { getRequestListener } from '@hono/node-server'
import express from 'express'
import express4 from 'express4'
import Fastify from 'fastify'
import { Hono } from 'hono'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { connections, type Definition, rate } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Bench, bench, eventually, signal } from '../pipeline-fixture.js'

type Serve = (intake: Intake, definition: Definition) => RequestListener | Promise<RequestListener>

/** Each one serves the definition at POST /orders. The calls are also a test of the types. */
const bindings: Record<string, Serve> = {
  'node:http': (intake, definition) => intake.node(definition),
  'Express 4': (intake, definition) => express4().post('/orders', intake.express(definition)),
  'Express 4 with express.json()': (intake, definition) =>
    express4()
      .use(express4.json({ limit: '2mb' }))
      .post('/orders', intake.express(definition)),
  'Express 5': (intake, definition) => express().post('/orders', intake.express(definition)),
  'Express 5 with express.json()': (intake, definition) =>
    express()
      .use(express.json({ limit: '2mb' }))
      .post('/orders', intake.express(definition)),
  Hono: (intake, definition) => {
    const handle = intake.fetch(definition)
    const app = new Hono().post('/orders', (c) => handle(c.req.raw, { clientAddress: '127.0.0.1' }))
    return getRequestListener(app.fetch) as RequestListener
  },
  Fastify: async (intake, definition) => {
    const app = Fastify()
    app.route({ method: 'POST', url: '/orders', ...intake.route(definition) })
    await app.ready()
    return (request, response) => app.routing(request, response)
  },
}
/** Their own parser answers a body that it cannot read, in its own form. */
const ownParser = new Set(['Fastify', 'Express 4 with express.json()', 'Express 5 with express.json()'])

interface Got {
  status: number
  headers: IncomingHttpHeaders
  body: Record<string, unknown>
}

let b: Bench
const closing: (() => void)[] = []
beforeEach(async () => {
  b = await bench()
})
afterEach(async () => {
  for (const close of closing.splice(0)) close()
  await b.close()
})

async function listen(listener: RequestListener): Promise<number> {
  const server = createServer(listener).listen(0, '127.0.0.1')
  closing.push(() => {
    server.closeAllConnections()
    server.close()
  })
  await once(server, 'listening')
  return (server.address() as AddressInfo).port
}

function post(port: number, body: string | string[], headers: Record<string, string> = {}) {
  const text = typeof body === 'string' ? { 'content-length': String(Buffer.byteLength(body)) } : {}
  const outgoing = send({
    ...{ host: '127.0.0.1', port, path: '/orders?x=1', method: 'POST', agent: false },
    headers: { 'content-type': 'application/json', ...text, ...headers },
  })
  const answer = new Promise<Got>((resolve, reject) => {
    outgoing.once('error', reject)
    outgoing.once('response', async (incoming) => {
      let received = ''
      for await (const chunk of incoming.setEncoding('utf8')) received += chunk
      let parsed: Record<string, unknown> = {}
      // Express's own errors are HTML.
      if (incoming.headers['content-type']?.includes('json')) parsed = JSON.parse(received)
      resolve({ status: incoming.statusCode ?? 0, headers: incoming.headers, body: parsed })
    })
  })
  for (const piece of typeof body === 'string' ? [] : body) outgoing.write(piece)
  outgoing.end(typeof body === 'string' ? body : undefined)
  return { answer, outgoing }
}

const Order = Type.Object({ item: Type.String() })
const tea = '{"item":"tea"}'

describe.each(Object.entries(bindings))('%s', (name, serve) => {
  const parsesItself = ownParser.has(name)

  it('runs an order, and takes a chunked body and Expect: 100-continue', async () => {
    const intake = await b.intake()
    const place = intake.define('orders', { body: Order, run: ({ item }) => ({ shipped: item }) })
    const port = await listen(await serve(intake, place))
    const done = { status: 201, body: { status: 'executed', result: { shipped: 'tea' } } }
    expect(await post(port, tea).answer).toMatchObject(done)
    expect(await post(port, [...tea]).answer).toMatchObject(done)
    expect(await post(port, tea, { expect: '100-continue' }).answer).toMatchObject(done)
  })

  it('queues with Prefer: respond-async, and waits with wait=N', async () => {
    const intake = await b.intake()
    const place = intake.define('orders', { body: Order, run: ({ item }) => item })
    const port = await listen(await serve(intake, place))
    const queued = await post(port, tea, { prefer: 'respond-async' }).answer
    expect(queued).toMatchObject({ status: 202, headers: { 'preference-applied': 'respond-async' } })
    expect(queued.headers.location).toBe(`/api/v1/operations/${queued.body.operationId}`)
    const waited = await post(port, tea, { prefer: 'respond-async, wait=10' }).answer
    expect(waited).toMatchObject({ status: 201, body: { result: 'tea' } })
    expect(waited.headers['preference-applied']).toContain('wait=10')
  })

  it('answers 429 beyond a rate, with its headers on both answers', async () => {
    const intake = await b.intake()
    const place = intake.define('orders', { body: Order, gates: [rate({ limit: 1, per: '1h' })], run: () => 1 })
    const port = await listen(await serve(intake, place))
    const first = await post(port, tea).answer
    expect(first).toMatchObject({ status: 201, headers: { 'x-ratelimit-remaining': '0' } })
    const second = await post(port, tea).answer
    expect(second).toMatchObject({
      status: 429,
      headers: { 'content-type': 'application/problem+json', 'x-ratelimit-limit': '1' },
      body: { code: 'rate_limited', instance: '/orders', trace_id: expect.any(String) },
    })
    expect(second.headers['retry-after']).toBe(String(second.body.retry_after_seconds))
    expect(second.headers['x-request-id']).toBe(second.body.trace_id)
  })

  it('answers 503 with Retry-After while it drains', async () => {
    const intake = await b.intake()
    const place = intake.define('orders', { body: Order, run: () => 1 })
    const port = await listen(await serve(intake, place))
    intake.drain()
    const refused = await post(port, tea).answer
    expect(refused).toMatchObject({ status: 503, headers: { 'content-type': 'application/problem+json' } })
    expect(Number(refused.headers['retry-after'])).toBeGreaterThanOrEqual(1)
  })

  it('refuses a body that does not fit, is not JSON, or is too large', async () => {
    const intake = await b.intake()
    const place = intake.define('orders', { body: Order, run: () => 1 })
    const port = await listen(await serve(intake, place))
    expect(await post(port, '{"item":1}').answer).toMatchObject({
      status: 400,
      headers: { 'content-type': 'application/problem+json' },
      body: { code: 'invalid_request', errors: [{ path: '/item' }] },
    })
    const malformed = await post(port, '{"item":').answer
    expect(malformed.status).toBe(400)
    if (!parsesItself) expect(malformed.body).toMatchObject({ code: 'invalid_request', errors: [{ path: '' }] })
    const form = await post(port, 'item=tea', { 'content-type': 'application/x-www-form-urlencoded' }).answer
    expect(form.status).toBe(415)
    if (name !== 'Fastify') expect(form.body).toMatchObject({ code: 'unsupported_media_type' })
    const large = JSON.stringify({ item: 'x'.repeat(1_048_576) })
    if (name.includes('json()')) return
    for (const body of [large, [large]]) {
      const refused = await post(port, body).answer
      expect(refused.status).toBe(413)
      if (!parsesItself) expect(refused.body).toMatchObject({ code: 'body_too_large' })
    }
  })

  it('replays an Idempotency-Key: the same answer, 422 for another body, 409 while it runs', async () => {
    const intake = await b.intake()
    const begun = signal()
    const gate = signal()
    const place = intake.define('orders', {
      body: Order,
      run: async ({ item }) => {
        if (item !== 'slow') return item
        begun.fire()
        await gate.promise
        return item
      },
    })
    const port = await listen(await serve(intake, place))
    const key = { 'idempotency-key': 'k1' }
    const first = await post(port, tea, key).answer
    const again = await post(port, tea, key).answer
    expect(again).toMatchObject({ status: 201, headers: { 'idempotent-replayed': 'true' } })
    expect(again.body).toEqual(first.body)
    expect((await post(port, '{"item":"milk"}', key).answer).status).toBe(422)
    const slow = post(port, '{"item":"slow"}', { 'idempotency-key': 'k2' })
    await begun.promise
    expect((await post(port, '{"item":"slow"}', { 'idempotency-key': 'k2' }).answer).status).toBe(409)
    gate.fire()
    expect((await slow.answer).status).toBe(201)
  })

  it('returns the permit of a client that leaves while its order runs', async () => {
    // So long that only the client's leaving can free the permit.
    const intake = await b.intake({ directWaitMs: 60_000 })
    const begun = signal()
    const gate = signal()
    const place = intake.define('orders', {
      body: Order,
      gates: [connections({ perIdentity: 1, total: 1, pool: 'orders' })],
      run: async () => {
        begun.fire()
        await gate.promise
      },
    })
    const port = await listen(await serve(intake, place))
    const held = (): number => intake.permitsOf('orders').held
    const leaving = post(port, tea)
    leaving.answer.catch(() => undefined)
    await begun.promise
    expect((await post(port, tea).answer).status).toBeGreaterThanOrEqual(429)
    leaving.outgoing.destroy()
    const freed = await eventually(async () => {
      const other = await post(port, tea, { prefer: 'respond-async' }).answer
      return other.status === 202 ? other : undefined
    }, 'the permit to be free').finally(gate.fire)
    expect(freed.status).toBe(202)
    await eventually(() => held() === 0 || undefined, 'no permit to be held')
  })
})
