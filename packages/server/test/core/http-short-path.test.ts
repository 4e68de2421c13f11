/** What goes the short path and what is left to the framework, on a real connection. */
import { once } from 'node:events'
import { createServer, type Server } from 'node:http'
import { type AddressInfo, connect } from 'node:net'
import { afterEach, beforeEach, expect, it } from 'vitest'
import type { Entry, Mount } from '../../../spillway/src/http/mount.js'
import { createAuthenticator } from '../../src/auth/auth.js'
import { shortPath } from '../../src/short-path.js'
import { Buffers } from '../../src/traffic/buffers.js'

let server: Server
let origin: string
/** What the route was given, what was thrown, and how often a request was left to others or ended. */
let seen: { bodies: unknown[]; faults: unknown[]; left: number; ended: number; statuses: number[] }
let behaviour: { submit(body: unknown): Promise<unknown>; draining: boolean; enterLate: boolean }

beforeEach(async () => {
  seen = { bodies: [], faults: [], left: 0, ended: 0, statuses: [] }
  behaviour = { submit: async (body) => body, draining: false, enterLate: false }
  const path = shortPath({
    authenticator: createAuthenticator({ onFault: (fault) => seen.faults.push(fault) }),
    buffers: new Buffers({ bytesMax: 8 * 1_048_576 }),
    bodyLimitBytes: 1_000,
    declines: () => behaviour.draining,
    headers: ['x-always', 'yes'],
    onFault: (fault) => seen.faults.push(fault),
    onAnswer: (_, status) => seen.statuses.push(status),
  })
  path.add({ url: '/orders', mount: echoMount() })
  server = createServer((request, response) => {
    path.take(request, response, () => {
      seen.left++
      response.writeHead(418).end()
    })
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  origin = `http://127.0.0.1:${(server.address() as AddressInfo).port}`
})

afterEach(async () => {
  server.closeAllConnections()
  server.close()
  await once(server, 'close')
})

/** Answers with the body it was given: the pipeline behind it is not what is tested here. */
function echoMount(): Mount {
  return {
    enter: (request) => {
      const leave = (): void => {
        seen.ended++
      }
      const entry: Entry = { ok: true, entered: { request, identity: 'me', leave } }
      return behaviour.enterLate ? new Promise((resolve) => setImmediate(() => resolve(entry))) : entry
    },
    submit: async (_, body) => {
      seen.bodies.push(body)
      return { ok: true, answer: { status: 201, headers: { 'x-own': 'a' }, body: await behaviour.submit(body) } }
    },
  }
}

const send = (init: RequestInit, url = '/orders') =>
  fetch(`${origin}${url}`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: '{"a":1}',
    ...init,
  })

it('answers an ordinary request with the headers of every answer and its own', async () => {
  const answer = await send({})
  expect(answer.status).toBe(201)
  expect(answer.headers.get('x-always')).toBe('yes')
  expect(answer.headers.get('x-own')).toBe('a')
  expect(answer.headers.get('x-request-id')).toMatch(/^[0-9a-f]{32}$/)
  expect(await answer.json()).toEqual({ a: 1 })
  expect(seen).toMatchObject({ left: 0, statuses: [201] })
})

it.each<[string, RequestInit, string?]>([
  ['another path', {}, '/other'],
  ['a query', {}, '/orders?a=1'],
  ['another method', { method: 'PUT' }],
  ['an origin', { headers: { 'content-type': 'application/json', origin: 'http://a.example' } }],
  ['an encoding', { headers: { 'content-type': 'application/json', 'content-encoding': 'gzip' } }],
  ['another type', { headers: { 'content-type': 'text/plain' } }],
  ['no body', { body: '' }],
  ['a body beyond the limit', { body: `"${'x'.repeat(1_000)}"` }],
])('leaves %s to the framework, unread', async (_, init, url) => {
  expect((await send(init, url)).status).toBe(418)
  expect(seen).toMatchObject({ left: 1, bodies: [], ended: 0 })
})

it('leaves everything to the framework while that has to refuse', async () => {
  behaviour.draining = true
  expect((await send({})).status).toBe(418)
})

it('assembles a body that arrives in pieces', async () => {
  const socket = connect((server.address() as AddressInfo).port, '127.0.0.1')
  await once(socket, 'connect')
  socket.write('POST /orders HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"a"')

  await once(server, 'request')
  socket.write(':"')
  socket.write('b"}')
  const [answer] = (await once(socket, 'data')) as [Buffer]
  expect(answer.toString()).toContain('201 Created')
  expect(seen.bodies).toEqual([{ a: 'b' }])
  socket.destroy()
})

it.each([false, true])('releases its holds when the client cuts its body off (entering late: %s)', async (late) => {
  behaviour.enterLate = late
  const socket = connect((server.address() as AddressInfo).port, '127.0.0.1')
  await once(socket, 'connect')
  const taken = once(server, 'request')
  socket.write('POST /orders HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"a"')
  const [, response] = (await taken) as [unknown, NodeJS.EventEmitter]
  const closed = once(response, 'close')
  socket.destroy()
  await closed
  await new Promise((resolve) => setImmediate(resolve))
  expect(seen).toMatchObject({ bodies: [], ended: 1, statuses: [] })
})

it('answers an internal error with 500, logs it and reveals nothing to the caller', async () => {
  const defect = new Error('secret')
  behaviour.submit = () => Promise.reject(defect)
  const answer = await send({})
  expect(answer.status).toBe(500)
  expect(await answer.text()).not.toContain('secret')
  expect(seen.faults).toEqual([defect])
})
