/** A Fastify route in front of something slow: a quota for each customer, and a limit on what the shop holds. */
import Fastify from 'fastify'
import { capacity, createIntake, embedded, pressure, rate } from 'spillway'
import Type from 'typebox'

export const ordersPerHour = 8
export const ordersHeld = 30

/** `ship` is slow, and is called once for each attempt of an order. */
export async function buildShop({ dataDir, ship }) {
  const intake = await createIntake({ store: embedded({ dataDir }) })
  const customerOf = (request) => request.headers['x-customer'] ?? request.clientAddress

  const placeOrder = intake.define('orders.place', {
    body: Type.Object({ item: Type.Integer() }),
    identity: customerOf,
    // The orders of one customer are shipped one after the other, in the order of their acceptance.
    lane: (_order, request) => ['orders', customerOf(request)],
    gates: [
      pressure(),
      capacity({ limit: ordersHeld, resumeBelow: ordersHeld / 2, retryAfterSeconds: 1 }),
      rate({ limit: ordersPerHour, per: '1h' }),
    ],
    // The id is the same on every attempt: what ships can distinguish a repetition from a second order.
    run: (order, { id, identity, signal }) => ship(order, { id, customer: identity, signal }),
  })

  const app = Fastify()
  app.route({ method: 'POST', url: '/orders', ...intake.route(placeOrder) })
  await app.register(intake.ticketRoutes())
  app.addHook('preClose', () => intake.close())
  return app
}
