/** An intake on Bun or Deno: POST /orders, and the ticket routes. Prints its port. */
import process from 'node:process'
import Type from 'typebox'
import { createIntake, postgres, rate } from '../dist/index.js'

const intake = await createIntake({ store: postgres({ url: process.env.DATABASE_URL, poolMax: 8 }) })
let release = () => undefined
const held = new Promise((resolve) => {
  release = resolve
})
const order = intake.define('orders', {
  body: Type.Object({ item: Type.String() }),
  gates: [rate({ limit: 20, per: '1h' })],
  run: async ({ item }, { identity }) => {
    if (item === 'held') await held
    return { shipped: item, identity }
  },
})
const place = intake.fetch(order)
const tickets = intake.fetchTickets()
// `info` is what the runtime passes: a server of Bun, or Deno's { remoteAddr }.
const handle = (request, info) => {
  if (new URL(request.url).pathname === '/release') {
    release()
    return new Response(null, { status: 204 })
  }
  return tickets(request, info, () => place(request, info))
}

if (typeof Bun === 'undefined') {
  Deno.serve({ hostname: '127.0.0.1', port: 0, onListen: ({ port }) => console.log(`port ${port}`) }, handle)
} else {
  const { port } = Bun.serve({ hostname: '127.0.0.1', port: 0, idleTimeout: 60, fetch: handle })
  console.log(`port ${port}`)
}
