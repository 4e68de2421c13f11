import { once } from 'node:events'
import { createServer, type Server } from 'node:http'
import type { AddressInfo } from 'node:net'
import { Worker } from 'node:worker_threads'
import { afterEach, describe, expect, it } from 'vitest'
import { guardRequests } from '../../src/http/connections.js'
import { Door } from '../../src/pressure/door.js'

const running: { server?: Server; clients?: Worker } = {}

afterEach(async () => {
  await running.clients?.terminate()
  running.server?.closeAllConnections()
  running.server?.close()
})

const busyMs = 1
const faithful = 200
const newcomers = 40

/** Clients that send the next request when the last is answered; then newcomers, whose time to an answer is returned. */
const clients = `
const { connect } = require('node:net')
const { parentPort, workerData: { port, faithful, newcomers } } = require('node:worker_threads')
const request = 'GET /work HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n'
const open = (answered) => {
  const socket = connect({ port, host: '127.0.0.1' }, () => socket.write(request))
  socket.on('data', () => answered(socket))
  socket.on('error', () => {})
}
let answers = 0
for (let i = 0; i < faithful; i++) open((socket) => { answers++; socket.write(request) })
parentPort.once('message', () => {
  const startedAt = performance.now()
  let left = newcomers
  for (let i = 0; i < newcomers; i++) open(() => { if (--left === 0) parentPort.postMessage(performance.now() - startedAt) })
})
const watch = setInterval(() => { if (answers > 3 * faithful) { clearInterval(watch); parentPort.postMessage('busy') } }, 10)
`

/** How long newcomers wait for their answers while the server has more to do than it can. */
async function newcomersWaitMs(guarded: boolean, patienceMs: number): Promise<number> {
  const server = createServer((_, response) => {
    for (const until = performance.now() + busyMs; performance.now() < until; );
    response.end('done')
  })
  if (guarded) guardRequests(server, new Door())
  running.server = server
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  const worker = new Worker(clients, { eval: true, workerData: { port, faithful, newcomers } })
  running.clients = worker
  await once(worker, 'message')
  worker.postMessage('come')
  const patience = new Promise<[number]>((resolve) => {
    setTimeout(() => resolve([patienceMs]), patienceMs).unref()
  })
  const [waited] = await Promise.race([once(worker, 'message') as Promise<[number]>, patience])
  return waited
}

describe('new connections of a server that has more to do than it can', () => {
  it('are taken in time: the turns of the event loop are kept short', async () => {
    expect(await newcomersWaitMs(true, 20_000)).toBeLessThan(5_000)
  })

  it('are why: without it they wait for as long as the load lasts', async () => {
    // One connection a turn, and a turn answers all who are connected: 40 × 200 ms.
    expect(await newcomersWaitMs(false, 5_000)).toBe(5_000)
  })
})

describe('a request whose caller left while it waited', () => {
  it('costs no work', async () => {
    let looked = 0
    const later: (() => void)[] = []
    const server = createServer((_, response) => {
      looked++
      response.end()
    })
    let now = 0
    const door = new Door(
      () => now,
      (go) => later.push(go),
    )
    guardRequests(server, door)
    door.pass(() => {
      now += 10
    })
    const response = { destroyed: true }
    server.emit('request', { url: '/' }, response)
    while (later.length > 0) later.shift()?.()
    expect(looked).toBe(0)
  })
})

describe('requests that are never shed', () => {
  it('does not wait at the door', () => {
    const asked: string[] = []
    const server = createServer((request) => {
      asked.push(request.url ?? '')
    })
    let now = 0
    const door = new Door(
      () => now,
      () => undefined,
    )
    guardRequests(server, door, (url) => url === '/health')
    door.pass(() => {
      now += 10
    })
    server.emit('request', { url: '/work' }, { destroyed: false })
    server.emit('request', { url: '/health' }, { destroyed: false })
    expect(asked).toEqual(['/health'])
  })
})
