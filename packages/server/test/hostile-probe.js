/** Honest callers in a process of their own, so that the load of the hostile ones in the test's does not count as the server's. */
import { setTimeout as delay } from 'node:timers/promises'

const origin = `http://127.0.0.1:${process.argv[2]}`
const health = []
const statuses = {}
let isOver = false

async function timed(name, path, body) {
  const began = performance.now()
  const headers = { 'content-type': 'application/json' }
  const answer = await fetch(`${origin}${path}`, body ? { method: 'POST', headers, body: JSON.stringify(body) } : {})
  await answer.text()
  if (name === 'health') health.push(performance.now() - began)
  else statuses[`${name} ${answer.status}`] = (statuses[`${name} ${answer.status}`] ?? 0) + 1
}

async function probeHealth() {
  while (!isOver) {
    await timed('health', '/health')
    await delay(10)
  }
}

async function work() {
  const ack = { transactionId: 't', partitionId: 'p', status: 'completed' }
  while (!isOver) {
    await timed('push', '/api/v1/push', { items: [{ queue: 'honest', payload: 1 }] })
    await timed('ack', '/api/v1/ack', ack)
    await delay(10)
  }
}

process.once('message', () => {
  isOver = true
})
await timed('first', '/health')
process.send('ready')
await Promise.all([probeHealth(), work()])
process.send({ health, statuses })
process.disconnect()
