/**
 * Ten customers place twelve orders each, all at once. Each may place eight per hour, the shop holds thirty at most, and
 * the warehouse takes 100 ms per order. Shows the answers that the customers got, waits until all that was accepted is done,
 * and checks that nothing was lost, doubled or let through.
 */
import assert from 'node:assert/strict'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { buildShop, ordersPerHour } from './shop.js'
import { startWarehouse } from './warehouse.js'

const customers = Array.from({ length: 10 }, (_, i) => `customer-${i}`)
const ordersEach = 12
const dataDir = await mkdtemp(join(tmpdir(), 'spillway-slow-service-'))
const warehouse = await startWarehouse()
const shop = await buildShop({ dataDir, warehouseUrl: warehouse.url })
const origin = await shop.listen({ port: 0, host: '127.0.0.1' })
const answers = { done: 0, queued: 0, 'not now (503)': 0, 'quota used up (429)': 0 }

async function place(customer, item) {
  const answer = await fetch(`${origin}/orders`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'x-customer': customer },
    body: JSON.stringify({ customer, item }),
  })
  const body = await answer.json()
  switch (answer.status) {
    case 201:
      answers.done += 1
      return { customer, id: body.operationId }
    case 202:
      answers.queued += 1
      return { customer, id: body.operationId }
    case 429:
      answers['quota used up (429)'] += 1
      return null
    case 503:
      answers['not now (503)'] += 1
      // A client that obeys Retry-After gets in once there is room.
      await delay(Number(answer.headers.get('retry-after')) * 1_000)
      return place(customer, item)
    default:
      throw new Error(`unexpected ${answer.status}: ${JSON.stringify(body)}`)
  }
}

async function finished({ customer, id }) {
  for (;;) {
    const answer = await fetch(`${origin}/api/v1/operations/${id}?wait=10`, { headers: { 'x-customer': customer } })
    const operation = await answer.json()
    assert.equal(answer.status, 200, JSON.stringify(operation))
    if (operation.processed_at !== null) return operation
  }
}

try {
  const orders = customers.flatMap((customer) => Array.from({ length: ordersEach }, (_, item) => ({ customer, item })))
  const accepted = (await Promise.all(orders.map(({ customer, item }) => place(customer, item)))).filter(Boolean)
  console.log(`${orders.length} orders, answered:`, answers)

  const operations = await Promise.all(accepted.map(finished))
  assert.ok(operations.every(({ status }) => status === 'completed'))
  assert.equal(accepted.length, customers.length * ordersPerHour, 'each customer gets in exactly as often as allowed')
  assert.equal(answers['quota used up (429)'], orders.length - accepted.length)
  assert.ok(answers.queued > 0 && answers['not now (503)'] > 0, 'the burst was too small to show anything')
  assert.deepEqual(
    warehouse.seen.map(({ operation }) => operation).sort(),
    accepted.map(({ id }) => id).sort(),
    'each accepted order arrives once',
  )
  assert.equal(warehouse.overlaps(), 0, 'a customer has one order in work at a time')
  console.log(`all ${accepted.length} accepted orders are done, each once, one at a time per customer`)
} finally {
  await shop.close()
  await warehouse.close()
  await rm(dataDir, { recursive: true, force: true })
}
