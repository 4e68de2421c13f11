/** The slow service behind the shop: one order takes 100 ms, and it remembers what it saw. */
import { once } from 'node:events'
import { createServer } from 'node:http'
import { setTimeout as delay } from 'node:timers/promises'

const orderMs = 100

export async function startWarehouse() {
  const seen = []
  const busyFor = new Map()
  let overlaps = 0
  const server = createServer(async (request, response) => {
    const chunks = []
    for await (const chunk of request) chunks.push(chunk)
    const { customer } = JSON.parse(Buffer.concat(chunks).toString())
    busyFor.set(customer, (busyFor.get(customer) ?? 0) + 1)
    if (busyFor.get(customer) > 1) overlaps += 1
    await delay(orderMs)
    busyFor.set(customer, busyFor.get(customer) - 1)
    seen.push({ customer, operation: request.headers['idempotency-key'] })
    response.writeHead(200, { 'content-type': 'application/json' }).end('{"shipped":true}')
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  return {
    url: `http://127.0.0.1:${server.address().port}/`,
    seen,
    /** How often two orders of one customer were in work at the same time. */
    overlaps: () => overlaps,
    close: async () => {
      server.closeAllConnections()
      server.close()
      await once(server, 'close')
    },
  }
}
