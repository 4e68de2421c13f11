import { Agent, createServer, type IncomingMessage, request } from 'node:http'
import type { AddressInfo, Socket } from 'node:net'
import { afterEach, expect, it } from 'vitest'
import { discardRest } from '../../src/http/connections.js'

const sockets = new Set<Socket>()
const server = createServer((incoming, response) => {
  sockets.add(incoming.socket)
  // As for a fault that is answered before the request was read.
  discardRest(incoming)
  response.writeHead(400).end('{}')
})

afterEach(() => server.close())

it('a connection carries any number of refused requests without growing', async () => {
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve))
  const agent = new Agent({ keepAlive: true, maxSockets: 1 })
  const { port } = server.address() as AddressInfo
  const ask = (): Promise<void> =>
    new Promise((resolve, reject) => {
      const outgoing = request({ host: '127.0.0.1', port, method: 'POST', agent }, (incoming: IncomingMessage) => {
        incoming.resume().once('end', resolve)
      })
      outgoing.once('error', reject)
      outgoing.end('{"a":1}')
    })
  await ask()
  const listeners = (): number[] => [...sockets].map((socket) => socket.listenerCount('close'))
  const before = listeners()
  for (let n = 0; n < 50; n++) await ask()
  expect(sockets.size).toBe(1)
  expect(listeners()).toEqual(before)
  agent.destroy()
})
