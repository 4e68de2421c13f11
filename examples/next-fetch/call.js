/** Calls the route handlers as Next does: with a Request, and the params of the path. */
import assert from 'node:assert/strict'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { startEmbedded } from '@spillway/embedded-postgres'

// Your app has a PostgreSQL of its own; here one is started for the occasion.
const dataDir = await mkdtemp(join(tmpdir(), 'spillway-next-fetch-'))
const server = await startEmbedded({ dataDir })
process.env.DATABASE_URL = server.url
const { intake } = await import('./shop.js')
const orders = await import('./app/orders/route.js')
const tickets = await import('./app/api/v1/[...path]/route.js')

function place(body, headers = {}) {
  const request = new Request('http://shop.example/orders', {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'x-customer': 'ann', ...headers },
    body: JSON.stringify(body),
  })
  return orders.POST(request, { params: Promise.resolve({}) })
}

function read(location, customer) {
  const url = new URL(`${location}?wait=30`, 'http://shop.example')
  const path = url.pathname.split('/').slice(3)
  const request = new Request(url, { headers: { 'x-customer': customer } })
  return tickets.GET(request, { params: Promise.resolve({ path }) })
}

try {
  const done = await place({ item: 'tea' })
  assert.equal(done.status, 201)
  console.log('done:', await done.json())

  const queued = await place({ item: 'cake' }, { prefer: 'respond-async' })
  assert.equal(queued.status, 202)
  const location = queued.headers.get('location')
  const ticket = await (await read(location, 'ann')).json()
  assert.deepEqual([ticket.status, ticket.result], ['completed', { shipped: 'cake' }])
  console.log(`queued: ${location} is ${ticket.status}`)
  assert.equal((await read(location, 'bob')).status, 404, 'nobody sees the tickets of others')

  const refused = await place({ item: '' })
  assert.equal(refused.status, 400)
  console.log('refused:', (await refused.json()).errors)
} finally {
  await intake.close()
  await server.stop()
  await rm(dataDir, { recursive: true, force: true })
}
