/** `client.route` against routes of the library, below a prefix, with the types of their definitions. */
import { once } from 'node:events'
import { createServer, type Server } from 'node:http'
import type { AddressInfo } from 'node:net'
import { createIntake, FailOperation, type Intake, postgres } from 'spillway'
import Type from 'typebox'
import { afterAll, beforeAll, expect, expectTypeOf, it } from 'vitest'
import { type Client, createClient } from '../src/index.js'
import { deferred } from './deferred.js'
import { freshDatabase } from './running-server.js'

const Order = Type.Object({ item: Type.String() })
const held = deferred()

function definitions(intake: Intake) {
  const place = intake.define('orders.place', {
    body: Order,
    lane: ({ item }) => ['orders', item],
    identity: () => 'ann',
    maxRetries: 0,
    run: async ({ item }) => {
      if (item === 'held') await held.promise
      if (item === 'bad') throw new FailOperation('out of stock')
      return { shipped: item, at: new Date(0) }
    },
  })
  const confirm = intake.define('orders.confirm', {
    ...{ body: Order, identity: () => 'ann', run: () => 1 },
    respond: ({ operationId }) => ({ status: 200, body: { order: operationId } }),
  })
  return { place, confirm }
}
type Definitions = ReturnType<typeof definitions>

let database: Awaited<ReturnType<typeof freshDatabase>>
let intake: Intake
let server: Server
let client: Client

beforeAll(async () => {
  database = await freshDatabase()
  const log = { debug: () => undefined, info: () => undefined, warn: () => undefined, error: () => undefined }
  const calm = { busyQueueAbove: 1, acceptWaitBudgetMs: 60_000, storeTimeoutMs: 20_000, drainMs: 1_000, log }
  intake = await createIntake({ store: postgres({ url: database.url, log }), ...calm })
  const { place, confirm } = definitions(intake)
  const routes = { '/shop/orders': intake.node(place), '/shop/confirm': intake.node(confirm) }
  const tickets = intake.nodeTickets({ prefix: '/shop' })
  server = createServer((request, response) =>
    tickets(request, response, () => {
      const route = routes[request.url as keyof typeof routes]
      if (route === undefined) response.writeHead(404).end()
      else route(request, response)
    }),
  ).listen(0, '127.0.0.1')
  await once(server, 'listening')
  client = createClient({ baseUrl: `http://127.0.0.1:${(server.address() as AddressInfo).port}` })
})
afterAll(async () => {
  held.resolve()
  server?.closeAllConnections()
  server?.close()
  await intake?.close()
  await database?.drop()
})

it('gives the typed result of a run, and its failure', async () => {
  const place = client.route<Definitions['place']>('POST /shop/orders')
  const answer = await place.submit({ item: 'tea' })
  expect(answer).toMatchObject({ kind: 'done', result: { shipped: 'tea', at: '1970-01-01T00:00:00.000Z' } })
  if (answer.kind === 'done') expectTypeOf(answer.result).toEqualTypeOf<{ shipped: string; at: string }>()
  // @ts-expect-error an order has an item
  void (() => place.submit({ colour: 'red' }))
  expect(await place.submit({ item: 'bad' })).toMatchObject({
    ...{ kind: 'failed', code: 'operation_failed', operationId: expect.any(String), message: 'out of stock' },
  })
})

it('gives the same answer for the same key', async () => {
  const place = client.route<Definitions['place']>('POST /shop/orders')
  const first = await place.submit({ item: 'milk' }, { idempotencyKey: 'k' })
  expect(await place.submit({ item: 'milk' }, { idempotencyKey: 'k' })).toEqual({ ...first, replayed: true })
  expect(await place.submit({ item: 'other' }, { idempotencyKey: 'k' })).toMatchObject({
    ...{ kind: 'refused', code: 'idempotency_mismatch' },
  })
})

it('gives a ticket, which is found below the prefix, and cancelled', async () => {
  const place = client.route<Definitions['place']>('POST /shop/orders')
  const first = await place.submit({ item: 'held' }, { respondAsync: true })
  const second = await place.submit({ item: 'held' }, { respondAsync: true })
  if (first.kind !== 'queued' || second.kind !== 'queued') throw new Error(`${first.kind}, ${second.kind}`)
  expect(await first.wait({ timeoutMs: 10 })).toBe(first)
  expect(await second.cancel()).toMatchObject({ status: 'cancelled' })
  expect(await second.wait()).toMatchObject({ kind: 'failed', code: 'operation_cancelled' })
  held.resolve()
  const done = await first.wait()
  expect(done).toMatchObject({ kind: 'done', operationId: first.operationId, result: { shipped: 'held' } })
  if (done.kind === 'done') expectTypeOf(done.result).toEqualTypeOf<{ shipped: string; at: string }>()
})

it('gives what respond makes of the result, and a refusal', async () => {
  const confirm = client.route<Definitions['confirm'], { order: string }>('POST /shop/confirm')
  const answer = await confirm.submit({ item: 'tea' })
  expect(answer).toMatchObject({ kind: 'done', result: { order: expect.any(String) } })
  if (answer.kind === 'done') expectTypeOf(answer.result).toEqualTypeOf<{ order: string }>()
  const wrong = {} as { item: string }
  expect(await confirm.submit(wrong)).toMatchObject({
    ...{ kind: 'refused', code: 'invalid_request', error: { status: 400, problem: { errors: [{ path: '/item' }] } } },
  })
})

it('is unexpected where no such route is', async () => {
  await expect(client.route('POST /nowhere').submit({})).rejects.toMatchObject({ code: 'unexpected', status: 404 })
})
