/** The doors with Spillway, by its public library: what cannot run now is refused (`refuse`) or queued (`queue`). */
import { capacity, createIntake, postgres, pressure } from 'spillway'
import { createDoor, Downstream, Order, openDoor } from '../overload-door.js'
import { deadlineMs, downstreamPerSecond, downstreamSlots, given } from '../overload-wire.js'

const whenBusy = given('WHEN_BUSY')
if (whenBusy !== 'refuse' && whenBusy !== 'queue') throw new Error(`WHEN_BUSY is refuse or queue, not ${whenBusy}`)
const downstream = new Downstream(given('DOWNSTREAM'))

const intake = await createIntake({
  store: postgres({ url: given('DATABASE_URL') }),
  // What the downstream works on at once, and half as many again: those whose acceptance is being written meanwhile.
  concurrency: downstreamSlots * 1.5,
  // Before its caller gives up, what runs long is answered with its ticket.
  directWaitMs: deadlineMs - 1_000,
})

const placeOrder = intake.define('orders.place', {
  body: Order,
  lane: (order) => ['orders', order.customer],
  identity: (request) => request.headers['x-customer'] ?? request.clientAddress,
  // Queued: ten seconds of the downstream's work, no more.
  gates: whenBusy === 'refuse' ? [pressure()] : [pressure(), capacity({ limit: downstreamPerSecond * 10 })],
  whenBusy,
  run: (order) => downstream.fulfil(order),
  respond: ({ result }) => ({ status: 200, body: result }),
})

const app = createDoor()
app.route({ method: 'POST', url: '/orders', ...intake.route(placeOrder) })

await openDoor(app, async () => {
  await app.close()
  await intake.close()
  await downstream.close()
})
