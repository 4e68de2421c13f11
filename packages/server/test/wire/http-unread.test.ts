/** Answers that are not read: closed in time, whatever else comes over their connection; slow readers live. */
import { once } from 'node:events'
import { connect, type Socket } from 'node:net'
import { afterEach, expect, it } from 'vitest'
import { type Listening, listening } from '../http-listening.js'
import { until } from '../server-process.js'

const unreadMs = 600
let server: Listening
let client: Socket | undefined

afterEach(async () => {
  client?.destroy()
  server.app.server.closeAllConnections()
  await server.close()
})

/** Of an answer of 24 MiB, more than the kernel takes for a client that does not read. */
const text = 'x'.repeat(24 * 1_048_576)

async function start() {
  const closed: number[] = []
  server = await listening({ unreadMs, onUnreadClosed: () => closed.push(performance.now()) })
  return closed
}

function ask(path: string): Socket {
  client = connect(server.port, '127.0.0.1')
  client.on('error', () => client?.destroy())
  client.write(`GET ${path} HTTP/1.1\r\nHost: localhost\r\n\r\n`)
  return client
}

it('an unread answer is closed, also while its client continues to send', async () => {
  const closed = await start()
  const socket = ask('/large')
  await once(socket, 'connect')
  const began = performance.now()
  // A second request, a byte at a time: input must not keep the connection.
  socket.write('GET /')
  const drip = setInterval(() => socket.write('x'), 20)
  try {
    await until('it is closed', () => closed.length === 1)
  } finally {
    clearInterval(drip)
  }
  expect((closed[0] ?? 0) - began).toBeGreaterThanOrEqual(unreadMs * 0.9)
  expect(server.logged.filter(({ msg }) => String(msg).includes('not read'))).toHaveLength(1)
  await until('the socket is gone', async () => (await connections()) === 0)
})

it('a slow reader that keeps reading is not', async () => {
  const closed = await start()
  const socket = ask('/large')
  let read = 0
  const began = performance.now()
  socket.on('data', ({ length }) => {
    read += length
    socket.pause()
  })
  const sip = setInterval(() => socket.resume(), unreadMs / 6)
  try {
    await until('several times the limit has passed', () => performance.now() - began > 4 * unreadMs)
    expect(closed).toEqual([])
    expect(read).toBeGreaterThan(0)
    expect(read).toBeLessThan(text.length)
  } finally {
    clearInterval(sip)
  }
  // The rest at once, and the connection is good for more.
  socket.removeAllListeners('data')
  socket.on('data', ({ length }) => {
    read += length
  })
  socket.resume()
  await until('all of it was read', () => read > text.length)
  socket.write('GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n')
  const all = read
  await until('the next is answered', () => read > all)
})

it('a connection that waits for its answer, or for its next request, is left alone', async () => {
  const closed = await start()
  const socket = ask('/health')
  const [answer] = (await once(socket, 'data')) as [Buffer]
  expect(answer.toString()).toContain('200 OK')
  const began = performance.now()
  await until('twice the limit has passed', () => performance.now() - began > 2 * unreadMs)
  expect(closed).toEqual([])
  expect(await connections()).toBe(1)
})

const connections = (): Promise<number> =>
  new Promise((resolve, reject) => {
    server.app.server.getConnections((fault, count) => (fault === null ? resolve(count) : reject(fault)))
  })
