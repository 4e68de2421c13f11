/** What differs between the bindings on purpose: who asks, where they are mounted, and where errors of your own go. */
import { once } from 'node:events'
import { createServer, type RequestListener, type Server } from 'node:http'
import type { AddressInfo } from 'node:net'
import express from 'express'
import Fastify from 'fastify'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import type { IntakeRequest } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { StoreFault } from '../../src/store/postgres/faults.js'
import { bindings, json, neverBusy, serve } from '../bindings-fixture.js'
import { type Bench, bench, overriding } from '../pipeline-fixture.js'

const unknownTicket = '/api/v1/operations/01890000-0000-7000-8000-000000000000'

let b: Bench
let intake: Intake
const servers: Server[] = []
beforeAll(async () => {
  b = await bench()
  intake = await b.intake({ ...neverBusy, directWaitMs: 60_000 })
})
afterEach(() => {
  for (const server of servers.splice(0)) {
    server.closeAllConnections()
    server.close()
  }
})
afterAll(() => b.close())

let made = 0
const type = (): string => `orders-${++made}`
const order = (path = '/orders'): Request => new Request(`http://localhost${path}`, json({ item: 'tea' }))
const get = (path: string): Request => new Request(`http://localhost${path}`)

async function listen(listener: RequestListener): Promise<string> {
  const server = createServer(listener).listen(0, '127.0.0.1')
  servers.push(server)
  await once(server, 'listening')
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`
}

/** Who submitted, by what the handler was called with. */
function definition(identity?: (request: IntakeRequest) => string) {
  return intake.define(type(), { ...(identity && { identity }), run: (_, context) => context.identity })
}

const resultOf = async (response: Response): Promise<unknown> => ((await response.json()) as { result: unknown }).result

describe('fetch: identity of the caller', () => {
  it('throws if nothing says so, and names the ways to say it', async () => {
    const place = intake.fetch(definition())
    await expect(place(order())).rejects.toThrow(
      /no client address\. Give the definition an identity function.*\{ clientAddress \}/,
    )
    await expect(place(order(), {})).rejects.toThrow(TypeError)
    const reads = intake.fetch(definition((request) => request.user?.id ?? request.clientAddress))
    await expect(reads(order())).rejects.toThrow('intake.fetch does not know who asks')
    await expect(intake.fetchTickets()(get('/api/v1/operations'))).rejects.toThrow('the option viewer')
  })

  it('takes users of every usual form, and none that would make one identity of several', async () => {
    const place = intake.fetch(definition())
    const as = async (user: unknown): Promise<unknown> => resultOf(await place(order(), { user } as never))
    expect(await as('ann')).toBe('ann')
    expect(await as({ id: 42 })).toBe('42')
    expect(await as({ sub: 'x' })).toBe('x')
    for (const user of ['', { id: '' }, { id: {} }, { id: () => 'ann' }, true]) {
      await expect(as(user)).rejects.toThrow('the user of a request must be a text')
    }
  })

  it('takes an identity function, a user, an address, and what Deno and Bun pass', async () => {
    const own = intake.fetch(definition(({ headers }) => `key ${headers['x-key']}`))
    const keyed = order()
    keyed.headers.set('x-key', 'a')
    expect(await resultOf(await own(keyed))).toBe('key a')
    const place = intake.fetch(definition())
    const bun = {
      address: '192.0.2.3',
      requestIP() {
        return { address: this.address }
      },
    }
    expect(await resultOf(await place(order(), { user: { id: 'ann', roles: new Set() } }))).toBe('ann')
    expect(await resultOf(await place(order(), { clientAddress: '192.0.2.1' }))).toBe('192.0.2.1')
    expect(await resultOf(await place(order(), { remoteAddr: { hostname: '192.0.2.2' } }))).toBe('192.0.2.2')
    expect(await resultOf(await place(order(), bun))).toBe('192.0.2.3')
  })

  it('reads the params that Next passes, also of a catch-all segment', async () => {
    const place = intake.fetch(definition(({ params }) => `${params.shop} ${params.path}`))
    const params = Promise.resolve({ shop: 'north', path: ['a', 'b'] })
    expect(await resultOf(await place(order(), { params }))).toBe('north a/b')
    expect(await resultOf(await place(order(), { params: { shop: 'south', path: 'c' } }))).toBe('south c')
  })

  it('without a viewer, the role operate sees and changes everything, view sees everything', async () => {
    const place = intake.fetch(definition())
    const tickets = intake.fetchTickets()
    const asked = async (role: string, request: Request): Promise<number> =>
      (await tickets(request, { user: { id: 'other', roles: new Set([role]) } })).status
    const queued = order()
    queued.headers.set('prefer', 'respond-async')
    const location = (await place(queued, { user: { id: 'ann', roles: new Set() } })).headers.get('location') ?? ''
    expect(await asked('submit', get(location))).toBe(404)
    expect(await asked('view', get(location))).toBe(200)
    expect(await asked('operate', get(location))).toBe(200)
    const pause = () => new Request('http://localhost/api/v1/lanes/pause', json({ queue: 'nobody' }))
    expect(await asked('view', pause())).toBe(403)
    expect(await asked('operate', pause())).toBe(200)
  })
})

describe('where ticket routes are mounted', () => {
  const info = { clientAddress: '127.0.0.1' }

  it('below a path: by the router of Express and Fastify, with prefix elsewhere', async () => {
    const fastify = Fastify()
    await fastify.register(async (shop) => void (await shop.register(intake.ticketRoutes())), { prefix: '/shop' })
    await fastify.ready()
    const listeners: RequestListener[] = [
      (request, response) => fastify.routing(request, response),
      express().use('/shop', intake.expressTickets()),
      intake.nodeTickets({ prefix: '/shop' }),
    ]
    for (const listener of listeners) {
      const origin = await listen(listener)
      const found = await fetch(`${origin}/shop/api/v1/operations`)
      expect(found.status).toBe(200)
      expect(await found.json()).toHaveProperty('items')
      expect((await fetch(`${origin}/api/v1/operations`)).status).toBe(404)
      const unknown = await fetch(`${origin}/shop${unknownTicket}?wait=0`)
      expect(await unknown.json()).toMatchObject({ code: 'not_found', instance: `/shop${unknownTicket}` })
    }
    const tickets = intake.fetchTickets({ prefix: '/shop' })
    expect((await tickets(get('/shop/api/v1/operations'), info)).status).toBe(200)
    expect((await tickets(get('/api/v1/operations'), info)).status).toBe(404)
  })

  it('node and fetch answer 404 for other paths, or leave them to `otherwise`', async () => {
    const origin = await listen(intake.nodeTickets())
    const problem = await fetch(`${origin}/elsewhere`)
    expect(problem.headers.get('content-type')).toBe('application/problem+json')
    expect(await problem.json()).toMatchObject({ status: 404, code: 'not_found', instance: '/elsewhere' })
    const tickets = intake.fetchTickets()
    expect(await (await tickets(get('/elsewhere'), info)).json()).toMatchObject({ status: 404, code: 'not_found' })
    expect(await tickets(get('/elsewhere'), info, () => 'other')).toBe('other')
    expect(await tickets(get('/elsewhere'), info, async () => undefined)).toBeUndefined()
  })
})

describe('errors', () => {
  it.each(bindings)('$name: a store that does not answer is 503, on tickets and on orders', async (binding) => {
    const away = () => Promise.reject(new StoreFault('unavailable'))
    const broken = await b.intake({ wrap: (store) => overriding(store, { ticket: away, accept: away }) })
    const placed = broken.define(type(), { identity: () => 'ann', run: () => 1 })
    const api = await serve(binding, { intake: broken, order: placed })
    for (const response of [await api.call(unknownTicket), await api.call('/orders', json({}))]) {
      expect(response.status).toBe(503)
      const problem = (await response.json()) as Record<string, unknown>
      expect(problem).toMatchObject({ code: 'store_unavailable', status: 503 })
      expect(response.headers.get('retry-after')).toBe(String(problem.retry_after_seconds))
    }
    api.close()
  })

  const faulty = () =>
    intake.define(type(), {
      identity: () => {
        throw new RangeError('mine')
      },
      run: () => 1,
    })
  const viewer = (): never => {
    throw new RangeError('mine')
  }

  it("of your own functions go to Express's next", async () => {
    const app = express().use(intake.expressTickets({ viewer })).post('/orders', intake.express(faulty()))
    app.use(((fault, _request, response, _next) => {
      response.status(418).send((fault as Error).message)
    }) satisfies express.ErrorRequestHandler)
    const origin = await listen(app)
    for (const response of [await fetch(`${origin}/orders`, json({})), await fetch(`${origin}${unknownTicket}`)]) {
      expect([response.status, await response.text()]).toEqual([418, 'mine'])
    }
  })

  it("go to Fastify's error handler", async () => {
    const app = Fastify()
    app.setErrorHandler((fault, _request, reply) => reply.code(418).send((fault as Error).message))
    await app.register(intake.ticketRoutes({ viewer }))
    app.route({ method: 'POST', url: '/orders', ...intake.route(faulty()) })
    await app.ready()
    const origin = await listen((request, response) => app.routing(request, response))
    for (const response of [await fetch(`${origin}/orders`, json({})), await fetch(`${origin}${unknownTicket}`)]) {
      expect([response.status, await response.text()]).toEqual([418, 'mine'])
    }
  })

  it('reject the promise of fetch, and are logged and answered with 500 on node:http', async () => {
    await expect(intake.fetch(faulty())(order())).rejects.toThrow('mine')
    await expect(intake.fetchTickets({ viewer })(get(unknownTicket))).rejects.toThrow('mine')
    const orders = await listen(intake.node(faulty()))
    const tickets = await listen(intake.nodeTickets({ viewer }))
    for (const ask of [() => fetch(`${orders}/orders`, json({})), () => fetch(`${tickets}${unknownTicket}`)]) {
      const response = await ask()
      expect(response.status).toBe(500)
      const problem = (await response.json()) as Record<string, unknown>
      expect(problem).toMatchObject({ code: 'internal_error' })
      expect(JSON.stringify(problem)).not.toContain('mine')
      const logged = b.logged.findLast(({ message }) => message === 'request failed')
      expect(logged?.fields).toMatchObject({ err: { message: 'mine' }, trace_id: problem.trace_id })
    }
  })
})
