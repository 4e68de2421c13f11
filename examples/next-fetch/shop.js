import { createIntake, postgres, rate } from 'spillway'
import Type from 'typebox'

async function openShop() {
  const intake = await createIntake({
    store: postgres({ url: process.env.DATABASE_URL }),
    // Next passes no client address to a handler, so the request itself says who asks; take your session here.
    identity: (request) => request.headers['x-customer'] ?? 'nobody',
  })
  const placeOrder = intake.define('orders.place', {
    body: Type.Object({ item: Type.String({ minLength: 1 }) }),
    gates: [rate({ limit: 100, per: '1h' })],
    run: async (order) => ({ shipped: order.item }),
  })
  return { intake, placeOrder }
}

// In development Next loads modules again when they change; the intake stays.
globalThis.shop ??= openShop()

export const { intake, placeOrder } = await globalThis.shop
