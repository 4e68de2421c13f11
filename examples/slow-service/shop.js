/** A service of your own: one Fastify route in front of something slow, with Spillway between them. */
import Fastify from 'fastify'
import { capacity, createIntake, embedded, FailOperation, pressure, RetryOperation, rate } from 'spillway'
import Type from 'typebox'

const ordersHeldMax = 30
export const ordersPerHour = 8

export async function buildShop({ dataDir, warehouseUrl }) {
  const intake = await createIntake({ store: embedded({ dataDir }) })

  const placeOrder = intake.define('orders.place', {
    body: Type.Object({ customer: Type.String({ minLength: 1 }), item: Type.Integer() }),
    // Orders of one customer are done one after the other, in the order in which they were accepted.
    lane: (order) => ['orders', order.customer],
    identity: (request) => request.headers['x-customer'] ?? request.clientAddress,
    gates: [
      pressure(),
      capacity({ limit: ordersHeldMax, resumeBelow: ordersHeldMax / 2, retryAfterSeconds: 1 }),
      rate({ limit: ordersPerHour, per: '1h' }),
    ],
    run: async (order, { id, signal }) => {
      const answer = await fetch(warehouseUrl, {
        method: 'POST',
        body: JSON.stringify(order),
        // The same on every attempt: the warehouse can distinguish a repetition from a second order.
        headers: { 'content-type': 'application/json', 'idempotency-key': id },
        signal,
      })
      if (answer.status >= 500) throw new RetryOperation(`the warehouse answered ${answer.status}`)
      if (!answer.ok) throw new FailOperation(`the warehouse answered ${answer.status}`)
      return answer.json()
    },
  })

  const app = Fastify()
  app.route({ method: 'POST', url: '/orders', ...intake.route(placeOrder) })
  // Where a 202 sends its caller: GET /api/v1/operations/<id>, each customer's own.
  const viewer = (request) => ({ identity: request.headers['x-customer'] ?? request.ip, operates: false })
  await app.register(intake.ticketRoutes({ viewer }))
  app.addHook('onClose', () => intake.close())
  return app
}
