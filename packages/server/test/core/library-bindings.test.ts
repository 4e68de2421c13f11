import Fastify, { type FastifyInstance } from 'fastify'
import { pino } from 'pino'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { capacity, connections, FailOperation, type FetchHandler, halt, rate } from '../../../spillway/src/index.js'
import type { Intake } from '../../../spillway/src/intake/intake.js'
import { neverBusy } from '../../../spillway/test/bindings-fixture.js'
import { type Bench, bench, eventually, overriding, signal } from '../../../spillway/test/pipeline-fixture.js'
import { buildApp } from '../../src/app.js'
import { createAuthenticator } from '../../src/auth/auth.js'
import { rawConnection } from '../http-listening.js'

const Body = Type.Object({ n: Type.Integer(), lane: Type.Optional(Type.String()) }, { additionalProperties: false })
type BodyValue = { n: number; lane?: string }
const lane = (body: BodyValue) => ['q', body.lane ?? 'a'] as const
const trace = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'

let b: Bench
let apps: FastifyInstance[]
beforeEach(async () => {
  b = await bench()
  apps = []
})
afterEach(async () => {
  for (const app of apps) await app.close()
  await b.close()
})

interface Exchange {
  status: number
  headers: Record<string, string>
  body: Record<string, unknown>
}

/** Ids, times and chances differ from one request to the next; what they stand for must not. */
function normal({ status, headers, body }: Exchange): Exchange {
  const kept = [
    'content-type',
    'location',
    'retry-after',
    'idempotent-replayed',
    'preference-applied',
    'x-request-id',
    'ratelimit-policy',
    'ratelimit',
    'x-ratelimit-limit',
    'x-ratelimit-remaining',
    'cache-control',
    'x-own',
  ]
  const uuid = /[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}/g
  const text = JSON.stringify({
    status,
    headers: Object.fromEntries(kept.flatMap((name) => (headers[name] === undefined ? [] : [[name, headers[name]]]))),
    body,
  })
  return JSON.parse(text.replaceAll(uuid, '<id>').replaceAll(/;t=\d+/g, ';t=<seconds>'))
}

async function exchangeOf(response: Response): Promise<Exchange> {
  return {
    status: response.status,
    headers: Object.fromEntries(response.headers),
    body: (await response.json()) as Record<string, unknown>,
  }
}

function ourApp(): FastifyInstance {
  const log = pino({ level: 'silent' })
  const built = buildApp({
    log,
    authenticator: createAuthenticator({ onFault: () => undefined }),
    bodyLimitBytes: 1_048_576,
    requestTimeoutMs: 30_000,
    headersTimeoutMs: 10_000,
    connectionsMax: 1_000,
    corsOrigins: [],
  })
  const app = built.app as unknown as FastifyInstance
  apps.push(app)
  return app
}

/** The same request through both bindings, on definitions of one shape. */
async function both(make: (intake: Intake, type: string) => { type: string }, intake: Intake) {
  const app = ourApp()
  app.route({ method: 'POST', url: '/orders', ...intake.route(make(intake, 'one')) })
  const origin = await app.listen({ host: '127.0.0.1', port: 0 })
  const handler: FetchHandler = intake.fetch(make(intake, 'two'))
  const send = (init: RequestInit) => {
    const request: RequestInit = {
      method: 'POST',
      ...init,
      headers: { 'content-type': 'application/json', traceparent: trace, ...init.headers },
    }
    return Promise.all([
      fetch(`${origin}/orders?x=1`, request).then(exchangeOf),
      handler(new Request('http://localhost/orders?x=1', request), { clientAddress: '127.0.0.1' }).then(exchangeOf),
    ])
  }
  return { app, origin, handler, send }
}

const json = (value: unknown, headers: Record<string, string> = {}) => ({ body: JSON.stringify(value), headers })

describe('both bindings answer the same', () => {
  const plain = (intake: Intake, type: string) =>
    intake.define(type, {
      body: Body,
      lane: (body) => [type, body.lane ?? 'a'],
      maxRetries: 0,
      run: (body) => {
        if (body.n === 13) throw new FailOperation('unlucky', { result: { n: 13 } })
        return { twice: body.n * 2 }
      },
      check: (body) => (body.n === 99 ? { code: 'forbidden', detail: 'Not 99.' } : null),
    })

  it.each([
    ['done', json({ n: 1 }), 201],
    ['failed for good', json({ n: 13 }), 500],
    ['queued on request', json({ n: 1 }, { prefer: 'respond-async' }), 202],
    ['waited for', json({ n: 1 }, { prefer: 'respond-async, wait=10' }), 201],
    ['a body that is not valid', json({ n: 'one' }), 400],
    ['a member too many', json({ n: 1, more: 1 }), 400],
    ['rejected by its check', json({ n: 99 }), 403],
    ['no body', {}, 400],
    ['malformed JSON', { body: '{"n":' }, 400],
    ['a dangerous member', { body: '{"n":1,"__proto__":{}}' }, 400],
    ['another media type', { body: 'n=1', headers: { 'content-type': 'text/plain' } }, 415],
    ['another charset', { body: '{"n":1}', headers: { 'content-type': 'application/json; charset=latin1' } }, 415],
    ['an encoded body', { body: '{"n":1}', headers: { 'content-encoding': 'gzip' } }, 415],
    ['a body too large', { body: `{"n":1,"lane":"${'x'.repeat(1_100_000)}"}` }, 413],
    ['a key too long', json({ n: 1 }, { 'idempotency-key': 'k'.repeat(256) }), 400],
  ] as const)('%s', async (_, init, status) => {
    const { send } = await both(plain, await b.intake(neverBusy))
    const [fastify, plainFetch] = await send(init)
    expect(fastify.status).toBe(status)
    expect(normal(plainFetch)).toEqual(normal(fastify))
  })

  it('replayed, mismatched and in progress', async () => {
    const intake = await b.intake(neverBusy)
    const { send } = await both(plain, intake)
    const key = { 'idempotency-key': 'k' }
    const [first, other] = await send(json({ n: 1 }, key))
    expect(normal(other)).toEqual(normal(first))
    const [again, otherAgain] = await send(json({ n: 1 }, key))
    expect(again.headers['idempotent-replayed']).toBe('true')
    expect(again.body).toEqual(first.body)
    expect(normal(otherAgain)).toEqual(normal(again))
    const [mismatch, otherMismatch] = await send(json({ n: 2 }, key))
    expect(mismatch).toMatchObject({ status: 422, body: { code: 'idempotency_mismatch' } })
    expect(normal(otherMismatch)).toEqual(normal(mismatch))
  })

  it('limited, with its headers on both sides of the limit', async () => {
    const intake = await b.intake(neverBusy)
    const { send } = await both(
      (on, type) =>
        on.define(type, {
          body: Body,
          gates: [rate({ limit: 1, per: '1h', name: 'hour', by: () => type })],
          lane: () => type,
          run: () => 1,
        }),
      intake,
    )
    const [first] = await send(json({ n: 1 }))
    expect(first.headers['ratelimit-policy']).toBe('"hour";q=1;w=3600')
    const [limited, other] = await send(json({ n: 1 }))
    expect(limited).toMatchObject({ status: 429, body: { code: 'rate_limited' } })
    expect(Number(limited.headers['retry-after'])).toBe(limited.body.retry_after_seconds)
    expect(other.status).toBe(429)
    expect(Object.keys(normal(other).headers)).toEqual(Object.keys(normal(limited).headers))
  })

  it('an answer of its own', async () => {
    const intake = await b.intake(neverBusy)
    const { send } = await both(
      (on, type) =>
        on.define(type, {
          body: Body,
          lane: () => type,
          run: (body) => body.n,
          respond: ({ result }) => ({ status: 200, headers: { 'x-own': 'yes' }, body: { answer: result } }),
        }),
      intake,
    )
    const [fastify, plainFetch] = await send(json({ n: 7 }))
    expect(fastify).toMatchObject({ status: 200, headers: { 'x-own': 'yes' }, body: { answer: 7 } })
    expect(normal(plainFetch)).toEqual(normal(fastify))
  })

  it('a store that cannot give a place', async () => {
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          changeConnections: () => Promise.reject(Object.assign(new Error('away'), { code: 'unavailable' })),
        }),
    })
    const { send } = await both(
      (on, type) => on.define(type, { body: Body, gates: [connections({ perIdentity: 1, total: 1 })], run: () => 1 }),
      intake,
    )
    const [fastify, plainFetch] = await send(json({ n: 1 }))
    expect(fastify).toMatchObject({ status: 503, body: { code: 'store_unavailable' } })
    expect(plainFetch).toMatchObject({ status: 503, body: { code: 'store_unavailable' } })
  })
})

describe('gates come before the body', () => {
  const halted = async () => {
    const intake = await b.intake(neverBusy)
    const { port, handler } = await mounted(intake, (on, type) =>
      on.define(type, { body: Body, gates: [halt()], lane: () => type, run: () => 1 }),
    )
    await intake.store.halt('system', 'drill')
    await intake.presence.beat()
    return { port, handler }
  }
  const mounted = async (intake: Intake, make: Parameters<typeof both>[0]) => {
    const { origin, handler } = await both(make, intake)
    return { port: Number(new URL(origin).port), handler }
  }

  it('Fastify: refused while the body is still to come', async () => {
    const { port } = await halted()
    const { socket } = rawConnection(port)
    const answered = new Promise<string>((resolve) => socket.once('data', (chunk: Buffer) => resolve(chunk.toString())))
    socket.write(
      'POST /orders HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 900000\r\n\r\n{"n":',
    )
    expect(await answered).toMatch(/^HTTP\/1\.1 503 /)
    socket.destroy()
  })

  it('fetch: not a byte is pulled', async () => {
    const { handler } = await halted()
    let pulled = 0
    const body = new ReadableStream(
      {
        pull(controller) {
          pulled++
          controller.enqueue(new TextEncoder().encode('{"n":'))
        },
      },
      { highWaterMark: 0 },
    )
    const request = new Request('http://localhost/orders', {
      method: 'POST',
      body,
      headers: { 'content-type': 'application/json' },
      duplex: 'half',
    } as RequestInit)
    const response = await handler(request, { clientAddress: '127.0.0.1' })
    expect(response.status).toBe(503)
    expect(pulled).toBe(0)
  })

  it('but gates that need the store come after it: a malformed body is reported first', async () => {
    const intake = await b.intake({ role: 'direct' })
    const { handler } = await mounted(intake, (on, type) =>
      on.define(type, { body: Body, gates: [capacity({ limit: 1 })], lane: () => type, run: () => 1 }),
    )
    const response = await handler(
      new Request('http://localhost/', { method: 'POST', body: '{', headers: { 'content-type': 'application/json' } }),
      { clientAddress: '127.0.0.1' },
    )
    expect(response.status).toBe(400)
  })
})

describe('places', () => {
  it('are given back by a client that left before it had one', async () => {
    const asked = signal()
    const grant = signal()
    const given = { n: 0 }
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          changeConnections: async (worker, pool, change) => {
            if (change.takes.length > 0) {
              asked.fire()
              await grant.promise
            }
            const changed = await store.changeConnections(worker, pool, change)
            given.n += change.gives.length
            return changed
          },
        }),
    })
    const op = intake.define('op', { body: Body, gates: [connections({ perIdentity: 1, total: 1 })], run: () => 1 })
    const app = ourApp()
    app.route({ method: 'POST', url: '/orders', ...intake.route(op) })
    const origin = await app.listen({ host: '127.0.0.1', port: 0 })
    const { socket, ended } = rawConnection(Number(new URL(origin).port))
    socket.write(
      'POST /orders HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n{"n":1}',
    )
    await asked.promise
    // A mere FIN would be a client that still reads its answer.
    socket.resetAndDestroy()
    await ended
    await eventually(
      async () =>
        (await new Promise<number>((resolve) => app.server.getConnections((_, n) => resolve(n)))) === 0
          ? true
          : undefined,
      'the server to see it gone',
    )
    grant.fire()
    await eventually(() => (given.n === 1 ? true : undefined), 'the place to be given back', 5_000)
    expect(await b.sql('SELECT 1 FROM spillway.connections')).toEqual([])
  })
})

describe("in a user's own Fastify", () => {
  it('mounts, names the user, and answers with problems', async () => {
    const intake = await b.intake(neverBusy)
    const seen: string[] = []
    const op = intake.define('op', {
      body: Body,
      lane,
      identity: (request) => request.user?.id ?? 'nobody',
      run: (_, ctx) => void seen.push(ctx.identity),
    })
    const app = Fastify()
    apps.push(app)
    app.addHook('onRequest', (request, _, done) => {
      Object.assign(request, { user: { sub: 'ann', roles: ['submit'] } })
      done()
    })
    app.route({ method: 'POST', url: '/orders', ...intake.route(op) })
    const done = await app.inject({ method: 'POST', url: '/orders', payload: { n: 1 } })
    expect(done.statusCode).toBe(201)
    expect(done.json()).toMatchObject({ status: 'executed' })
    expect(seen).toEqual(['ann'])
    const wrong = await app.inject({ method: 'POST', url: '/orders', payload: { n: 'x' } })
    expect(wrong.statusCode).toBe(400)
    expect(wrong.headers['content-type']).toBe('application/problem+json')
    expect(wrong.json()).toMatchObject({ code: 'invalid_request', errors: [{ path: expect.any(String) }] })
  })
})
