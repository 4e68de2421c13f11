/** Every binding behind one way to call it, for the conformance suite (test/core/bindings-*.test.ts). */
import { once } from 'node:events'
import { createServer, type RequestListener } from 'node:http'
import type { AddressInfo } from 'node:net'
import { getRequestListener } from '@hono/node-server'
import { getConnInfo } from '@hono/node-server/conninfo'
import express from 'express'
import express4 from 'express4'
import Fastify from 'fastify'
import { Hono } from 'hono'
import type { TicketRoutesOptions } from '../src/http/tickets.js'
import type { Definition } from '../src/index.js'
import type { Intake } from '../src/intake/intake.js'

/** The machine may be slow: an answer must not depend on that. */
export const neverBusy = { busyQueueAbove: 1, acceptWaitBudgetMs: 60_000, storeTimeoutMs: 20_000 }

/** A definition at POST /orders, and the ticket routes. */
interface Mounts {
  intake: Intake
  order: Definition
  tickets?: TicketRoutesOptions
}

/** Without sockets it is called with a Request. */
type Served = RequestListener | ((request: Request) => Promise<Response>)

export interface Binding {
  name: string
  /** The framework parses bodies, and refuses those that it cannot read in its own form. */
  parsesItself?: boolean
  /** Sockets: what only a connection can show. */
  hasSockets: boolean
  /** No client address: definitions need an identity. */
  hasNoAddress?: boolean
  serve(mounts: Mounts): Served | Promise<Served>
}

const withExpress = (make: typeof express | typeof express4, parser?: express.RequestHandler) => (mounts: Mounts) => {
  const app = (make as typeof express)()
  if (parser !== undefined) app.use(parser)
  return app.use(mounts.intake.expressTickets(mounts.tickets)).post('/orders', mounts.intake.express(mounts.order))
}

/** A catch-all as in Next: app/orders/route.ts, and app/api/v1/[...path]/route.ts. */
function nextRoutes({ intake, order, tickets: options }: Mounts): (request: Request) => Promise<Response> {
  const tickets = intake.fetchTickets(options)
  const orders = { POST: intake.fetch(order) }
  const catchAll = { GET: tickets, POST: tickets, DELETE: tickets, HEAD: tickets }
  return async (request) => {
    const { pathname } = new URL(request.url)
    const path = pathname.split('/').slice(1)
    const handlers: Partial<Record<string, typeof tickets | typeof orders.POST>> =
      pathname === '/orders' ? orders : catchAll
    const handle = handlers[request.method]
    if (handle === undefined) return new Response(null, { status: 405 })
    return handle(request, { params: Promise.resolve({ path }) })
  }
}

export const bindings: readonly Binding[] = [
  {
    name: 'Fastify 5',
    hasSockets: true,
    async serve({ intake, order, tickets: options }) {
      const app = Fastify()
      await app.register(intake.ticketRoutes(options))
      app.route({ method: 'POST', url: '/orders', ...intake.route(order) })
      await app.ready()
      return (request, response) => app.routing(request, response)
    },
  },
  { name: 'Express 4', hasSockets: true, serve: withExpress(express4) },
  {
    name: 'Express 4 with express.json()',
    parsesItself: true,
    hasSockets: true,
    serve: withExpress(express4, express4.json({ limit: '1mb' })),
  },
  { name: 'Express 5', hasSockets: true, serve: withExpress(express) },
  {
    name: 'Express 5 with express.json()',
    parsesItself: true,
    hasSockets: true,
    serve: withExpress(express, express.json({ limit: '1mb' })),
  },
  {
    name: 'node:http',
    hasSockets: true,
    serve({ intake, order, tickets: options }) {
      const tickets = intake.nodeTickets(options)
      const place = intake.node(order)
      return (request, response) =>
        tickets(request, response, () => {
          if (request.url?.split('?')[0] === '/orders') place(request, response)
          else response.writeHead(404).end()
        })
    },
  },
  {
    name: 'Hono',
    hasSockets: true,
    serve({ intake, order, tickets: options }) {
      const tickets = intake.fetchTickets(options)
      const place = intake.fetch(order)
      const app = new Hono()
      const clientAddress = (c: Parameters<typeof getConnInfo>[0]) => getConnInfo(c).remote.address ?? ''
      app.use((c, next) => tickets(c.req.raw, { clientAddress: clientAddress(c) }, next))
      app.post('/orders', (c) => place(c.req.raw, { clientAddress: clientAddress(c) }))
      return getRequestListener(app.fetch) as RequestListener
    },
  },
  {
    name: 'a Next route handler, on sockets',
    hasSockets: true,
    hasNoAddress: true,
    serve: (mounts) => getRequestListener(nextRoutes(mounts)) as RequestListener,
  },
  {
    name: 'fetch, without sockets',
    hasSockets: false,
    serve({ intake, order, tickets: options }) {
      const tickets = intake.fetchTickets(options)
      const place = intake.fetch(order)
      const info = { clientAddress: '127.0.0.1' }
      return (request: Request) =>
        tickets(request, info, () =>
          new URL(request.url).pathname === '/orders' ? place(request, info) : new Response(null, { status: 404 }),
        )
    },
  },
]

/** Like `fetch`, with a path. */
export type Call = (path: string, init?: RequestInit & { duplex?: 'half' }) => Promise<Response>

export interface Api {
  call: Call
  /** Null without sockets. */
  port: number | null
  close(): void
}

export async function serve(binding: Binding, mounts: Mounts): Promise<Api> {
  const served = await binding.serve(mounts)
  if (!binding.hasSockets) {
    const handle = served as (request: Request) => Promise<Response>
    return {
      call: (path, init) => handle(new Request(`http://localhost${path}`, init)),
      port: null,
      close: () => undefined,
    }
  }
  const server = createServer(served as RequestListener).listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  return {
    call: (path, init) => fetch(`http://127.0.0.1:${port}${path}`, init),
    port,
    close() {
      server.closeAllConnections()
      server.close()
    },
  }
}

/** A JSON body, sent with its length. */
export const json = (value: unknown, headers: Record<string, string> = {}): RequestInit => ({
  method: 'POST',
  body: typeof value === 'string' ? value : JSON.stringify(value),
  headers: { 'content-type': 'application/json', ...headers },
})

/** A body that is sent in pieces, without a length. */
export function chunked(pieces: Iterable<string> | AsyncIterable<string>, headers: Record<string, string> = {}) {
  return {
    method: 'POST',
    body: ReadableStream.from(bytesOf(pieces)),
    headers: { 'content-type': 'application/json', ...headers },
    duplex: 'half' as const,
  }
}

async function* bytesOf(pieces: Iterable<string> | AsyncIterable<string>): AsyncGenerator<Uint8Array> {
  const encoder = new TextEncoder()
  for await (const piece of pieces) yield encoder.encode(piece)
}

/** One server-sent event. */
export interface Sent {
  id: string
  event: string
  data: Record<string, unknown>
}

/** Reads events one at a time, as they come. */
export async function* eventsOf(response: Response): AsyncGenerator<Sent> {
  let text = ''
  const decoder = new TextDecoder()
  for await (const chunk of response.body ?? []) {
    text += decoder.decode(chunk, { stream: true })
    for (let end = text.indexOf('\n\n'); end >= 0; end = text.indexOf('\n\n')) {
      const lines = text.slice(0, end).split('\n')
      text = text.slice(end + 2)
      const member = (name: string): string =>
        lines.find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2) ?? ''
      yield { id: member('id'), event: member('event'), data: JSON.parse(member('data')) }
    }
  }
}
