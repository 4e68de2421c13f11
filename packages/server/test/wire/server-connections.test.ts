/** Many, slow and half-closed connections. */

import { spawnSync } from 'node:child_process'
import { connect, type Socket } from 'node:net'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { rawConnection, rawExchange } from '../http-listening.js'
import { endAll, get, type ServerProcess, startServer, startTarget, submit, type Target } from '../server-process.js'

let database: TestDatabase
let target: Target

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget()
})
afterEach(() => endAll())
afterAll(async () => {
  await target.close()
  await database.drop()
})

const start = (env: Record<string, string> = {}) =>
  startServer({ DATABASE_URL: database.url, SPILLWAY_FORWARD_ALLOW: target.origin, ...env })

/** What this process may open, less what it needs itself. */
function descriptorsLeft(): number {
  const { stdout } = spawnSync('sh', ['-c', 'ulimit -n'], { encoding: 'utf8' })
  return stdout.trim() === 'unlimited' ? Number.POSITIVE_INFINITY : Number(stdout) - 200
}

async function openMany(server: ServerProcess, count: number): Promise<Socket[]> {
  const sockets: Socket[] = []
  const openOne = () =>
    new Promise<void>((resolve, reject) => {
      const socket = connect(server.port, '127.0.0.1', () => resolve())
      socket.once('error', reject)
      sockets.push(socket)
    })
  for (let open = 0; open < count; open += 500) {
    await Promise.all(Array.from({ length: Math.min(500, count - open) }, openOne))
  }
  return sockets
}

describe('many', () => {
  it('10,000 open connections: health and work are answered', async () => {
    const wanted = 10_000
    const possible = Math.min(wanted, descriptorsLeft())
    if (possible < wanted) console.info(`only ${possible} connections: the limit of open files is lower (ulimit -n)`)
    expect(possible).toBeGreaterThan(500)
    const server = await start({ SPILLWAY_HEADERS_TIMEOUT_MS: '120000', SPILLWAY_REQUEST_TIMEOUT_MS: '120000' })
    const sockets = await openMany(server, possible)
    try {
      for (const path of ['/health', '/metrics', '/health/ready']) {
        const answer = await get(server, path)
        expect(answer.status).toBe(200)
        expect(answer.ms).toBeLessThan(2_000)
      }
      expect((await submit(server, `${target.origin}/many`)).status).toBe(201)
      expect(sockets.filter((socket) => socket.destroyed)).toHaveLength(0)
    } finally {
      for (const socket of sockets) socket.destroy()
    }
    expect((await get(server, '/health')).status).toBe(200)
  }, 90_000)

  it('beyond SPILLWAY_CONNECTIONS_MAX: 503 with Retry-After, health goes on, and place is found again', async () => {
    const server = await start({ SPILLWAY_CONNECTIONS_MAX: '50' })
    const sockets = await openMany(server, 60)
    try {
      // Over a connection of its own: one that is open already is not beyond the cap.
      const refused = await rawExchange(
        server.port,
        'GET /api/v1/operations HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n',
      )
      expect(refused.status).toBe(503)
      expect(JSON.parse(refused.body).code).toBe('overloaded')
      expect(Number(refused.headers['retry-after'])).toBeGreaterThanOrEqual(1)
      const health = await rawExchange(
        server.port,
        'GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n',
      )
      expect(health.status).toBe(200)
      expect((await get(server, '/health')).status).toBe(200)
    } finally {
      for (const socket of sockets) socket.destroy()
    }
    await expect.poll(async () => (await submit(server, `${target.origin}/again`)).status, { timeout: 5_000 }).toBe(201)
  })
})

describe('slow', () => {
  it('headers that never end are closed in time, with a 408', async () => {
    const server = await start({ SPILLWAY_HEADERS_TIMEOUT_MS: '500' })
    const { socket, ended } = rawConnection(server.port)
    const began = performance.now()
    socket.write('GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ')
    const drip = setInterval(() => socket.write('x'), 50)
    const answer = await ended
    clearInterval(drip)
    expect(answer.status).toBe(408)
    expect(JSON.parse(answer.body).code).toBe('request_timeout')
    expect(performance.now() - began).toBeLessThan(5_000)
  })

  it('a body that never ends is closed in time, and its place is free', async () => {
    const server = await start({ SPILLWAY_HEADERS_TIMEOUT_MS: '500', SPILLWAY_REQUEST_TIMEOUT_MS: '1000' })
    const slow = Array.from({ length: 50 }, () => {
      const connection = rawConnection(server.port)
      connection.socket.write(
        'POST /api/v1/operations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{',
      )
      return connection
    })
    const drip = setInterval(() => {
      for (const { socket } of slow) if (!socket.destroyed) socket.write(' ')
    }, 100)
    const began = performance.now()
    expect((await submit(server, `${target.origin}/meanwhile`)).status).toBe(201)
    const answers = await Promise.all(slow.map((s) => s.ended))
    clearInterval(drip)
    expect(performance.now() - began).toBeLessThan(10_000)
    for (const answer of answers) expect([0, 408]).toContain(answer.status || 0)
  })

  it('a reader that does not read its stream costs nobody else', async () => {
    const server = await start()
    const { body } = await submit(server, `${target.origin}/s`, { delay_seconds: 60 })
    const idle = Array.from({ length: 20 }, () => {
      const { socket } = rawConnection(server.port)
      socket.pause()
      socket.write(`GET /api/v1/operations/${body.operationId}/stream HTTP/1.1\r\nHost: localhost\r\n\r\n`)
      return socket
    })
    expect((await submit(server, `${target.origin}/others`, { queue: 'others' })).status).toBe(201)
    for (const socket of idle) socket.destroy()
    expect((await get(server, '/health')).status).toBe(200)
  })
})

describe('half-closed and broken', () => {
  it('a client that closed its half: what it asked for is done once, and its connection is not kept', async () => {
    const server = await start()
    const order = JSON.stringify({ type: 'http.request', queue: 'half', payload: { url: `${target.origin}/half` } })
    const { socket, ended } = rawConnection(server.port, true)
    socket.end(
      `POST /api/v1/operations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: ${order.length}\r\n\r\n${order}`,
    )
    await ended
    await expect.poll(() => target.calls.filter((c) => c.path === '/half').length, { timeout: 5_000 }).toBe(1)
    const { items } = (await get(server, '/api/v1/operations?queue=half')).body
    expect(items.map((o) => o.attempt)).toEqual([1])
  })

  it('a client that leaves in the middle: what was accepted is done, the rest is not there', async () => {
    const server = await start()
    const order = JSON.stringify({ type: 'http.request', queue: 'leave', payload: { url: `${target.origin}/leave` } })
    const head = (length: number) =>
      `POST /api/v1/operations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: ${length}\r\n\r\n`
    const cut = rawConnection(server.port)
    await new Promise<void>((resolve) => cut.socket.write(head(order.length + 10) + order, () => resolve()))
    cut.socket.destroy()
    const gone = rawConnection(server.port)
    await new Promise<void>((resolve) => gone.socket.write(head(order.length) + order, () => resolve()))
    gone.socket.end()
    await expect.poll(() => target.calls.filter((c) => c.path === '/leave').length, { timeout: 5_000 }).toBe(1)
    const { items } = (await get(server, '/api/v1/operations?queue=leave')).body
    expect(items).toHaveLength(1)
  })

  it('pipelined requests are answered in order', async () => {
    const server = await start()
    const answer = await rawExchange(
      server.port,
      'GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n',
    )
    expect([...answer.text.matchAll(/HTTP\/1\.1 (\d+)/g)].map((m) => m[1])).toEqual(['200', '404', '200'])
  })

  it.each([
    [
      'two lengths',
      'POST /api/v1/operations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello',
    ],
    [
      'length and chunks',
      'POST /api/v1/operations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n',
    ],
    ['no host', 'GET /api/v1/operations HTTP/1.1\r\nConnection: close\r\n\r\n'],
    ['a bare line feed in a header', 'GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\nY: b\r\n\r\n'],
  ])('400 and closed: %s', async (_, bytes) => {
    const server = await start()
    const answer = await rawExchange(server.port, bytes)
    expect(answer.status).toBe(400)
    expect((await get(server, '/health')).status).toBe(200)
  })
})
