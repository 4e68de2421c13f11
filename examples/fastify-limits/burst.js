/** Ten customers place twelve orders each, all at once. Checks that the limits are exact, and that nothing is lost or doubled. */
import assert from 'node:assert/strict'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { buildShop, ordersPerHour } from './shop.js'

const dataDir = await mkdtemp(join(tmpdir(), 'spillway-fastify-limits-'))
const shipped = []
// Nothing is shipped until the shop is full, so that the burst meets every limit on any machine.
let open
const full = new Promise((resolve) => {
  open = resolve
})
const ship = async (order, { id, customer }) => {
  await full
  shipped.push({ id, customer, item: order.item })
  return { shipped: order.item }
}
const shop = await buildShop({ dataDir, ship })
const origin = await shop.listen({ port: 0, host: '127.0.0.1' })
const seen = { 201: 0, 202: 0, 429: 0, 503: 0 }

/** The ticket, or null if the customer's quota is used up. */
async function place(customer, item) {
  const answer = await fetch(`${origin}/orders`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'x-customer': customer },
    body: JSON.stringify({ item }),
  })
  const body = await answer.json()
  seen[answer.status] += 1
  if (answer.status === 429) return null
  if (answer.status !== 503) return { customer, id: body.operationId }
  open()
  await delay(Number(answer.headers.get('retry-after')) * 1_000)
  return place(customer, item)
}

async function finished({ customer, id }) {
  const answer = await fetch(`${origin}/api/v1/operations/${id}?wait=30`, { headers: { 'x-customer': customer } })
  return (await answer.json()).status
}

try {
  const customers = Array.from({ length: 10 }, (_, i) => `customer-${i}`)
  const orders = customers.flatMap((customer) => Array.from({ length: 12 }, (_, item) => ({ customer, item })))
  const accepted = (await Promise.all(orders.map(({ customer, item }) => place(customer, item)))).filter(Boolean)
  console.log(`${orders.length} orders, answers by status:`, seen)

  const ends = await Promise.all(accepted.map(finished))
  assert.ok(ends.every((status) => status === 'completed'))
  for (const customer of customers) {
    const theirs = accepted.filter((order) => order.customer === customer)
    assert.equal(theirs.length, ordersPerHour, 'each customer gets in exactly as often as allowed')
  }
  assert.equal(seen[429], orders.length - accepted.length)
  assert.deepEqual(shipped.map(({ id }) => id).sort(), accepted.map(({ id }) => id).sort(), 'each is shipped once')
  assert.ok(seen[202] > 0 && seen[503] > 0)
  console.log(`all ${accepted.length} accepted orders are shipped, each once`)
} finally {
  await shop.close()
  await rm(dataDir, { recursive: true, force: true })
}
