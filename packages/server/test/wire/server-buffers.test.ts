/** What a client may make the server hold: bodies that do not end, answers that are not read. Against real processes. */
import { fork } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync } from 'node:fs'
import { connect, type Socket } from 'node:net'
import { fileURLToPath } from 'node:url'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { rawConnection } from '../http-listening.js'
import { ackOf, calm, messagesOf, popPath, pushed, take } from '../message-calls.js'
import { type Answer, call, endAll, get, post, type ServerProcess, startServer, until } from '../server-process.js'

const MiB = 1_048_576

let database: TestDatabase
const sockets = new Set<Socket>()

beforeAll(async () => {
  database = await freshDatabase()
})
afterEach(() => {
  for (const socket of sockets) socket.destroy()
  sockets.clear()
})
afterAll(async () => {
  await endAll()
  await database.drop()
})

const start = (env: Record<string, string> = {}) => startServer({ DATABASE_URL: database.url, ...calm, ...env })
/** An eighth is 1 MiB: what one identity may hold, and as much again in reserve. */
const small = { SPILLWAY_BUFFER_BYTES_MAX: String(8 * MiB) }
const as = (identity: string) => ({ 'x-user-id': identity })

async function gauge(server: ServerProcess, series: string): Promise<number> {
  const line = (await get(server, '/metrics')).text.split('\n').find((text) => text.startsWith(`${series} `))
  return Number(line?.slice(series.length))
}
const held = (server: ServerProcess, kind: 'in' | 'out') => gauge(server, `spillway_buffer_bytes{kind="${kind}"}`)
const refused = (server: ServerProcess, kind: 'in' | 'out') =>
  gauge(server, `spillway_buffer_refusals_total{kind="${kind}"}`)

interface Upload {
  path?: string
  identity?: string
  /** As Content-Length says; 0: chunked. */
  length: number
}

const head = ({ path = '/api/v1/push', identity, length }: Upload): string =>
  [
    `POST ${path} HTTP/1.1`,
    'Host: localhost',
    'Content-Type: application/json',
    ...(identity === undefined ? [] : [`X-User-ID: ${identity}`]),
    length === 0 ? 'Transfer-Encoding: chunked' : `Content-Length: ${length}`,
    '\r\n',
  ].join('\r\n')

/** Begins a body and does not end it. */
function stalled(server: ServerProcess, upload: Upload) {
  const connection = rawConnection(server.port)
  sockets.add(connection.socket)
  connection.socket.write(head(upload))
  return connection
}

/** Asks, and never reads. */
function unread(server: ServerProcess, path: string, identity?: string): Socket {
  const socket = connect(server.port, '127.0.0.1')
  sockets.add(socket)
  socket.on('error', () => socket.destroy())
  const user = identity === undefined ? '' : `X-User-ID: ${identity}\r\n`
  socket.write(`GET ${path} HTTP/1.1\r\nHost: localhost\r\n${user}\r\n`)
  return socket
}

const pushOf = (bytes: number, queue = 'small') => ({ items: [{ queue, payload: 'x'.repeat(bytes) }] })

function expectNoRoom(answer: Answer): void {
  expect(answer.status, answer.text).toBe(503)
  expect(answer.body.code).toBe('overloaded')
  expect(Number(answer.headers.get('retry-after'))).toBe(answer.body.retry_after_seconds)
  expect(answer.body.detail).toContain('space')
}

describe('bodies', () => {
  let server: ServerProcess
  beforeAll(async () => {
    server = await start(small)
  })
  afterAll(() => server.kill())

  it.each(['/api/v1/push', '/v1/chat/completions'])(
    '%s: a stalled one holds its full length, counted for its identity alone, until it closes',
    async (path) => {
      const before = await refused(server, 'in')
      const holder = stalled(server, { path, identity: 'a', length: 600_000 })
      await until('the body is counted', async () => (await held(server, 'in')) === 600_000)
      // Refused by its head: nothing of the body was sent.
      const beyond = stalled(server, { path, identity: 'a', length: 600_000 })
      const answer = await beyond.ended
      expect(answer.status).toBe(503)
      expect(answer.body).toContain('overloaded')
      expect(Number(answer.headers['retry-after'])).toBeGreaterThanOrEqual(1)
      expect(await refused(server, 'in')).toBe(before + 1)

      expect((await post(server, '/api/v1/push', pushOf(600_000), as('b'))).status).toBe(201)
      expect((await post(server, '/api/v1/push', pushOf(60_000), as('a'))).status).toBe(201)
      const acks = [{ transactionId: 't', partitionId: 'p', status: 'completed', error: 'e'.repeat(2_000) }]
      const batch = { acknowledgments: Array.from({ length: 50 }, () => acks[0]) }
      expect((await post(server, '/api/v1/ack/batch', batch, as('a'))).status).toBe(200)

      holder.socket.destroy()
      await until('the space is given back', async () => (await held(server, 'in')) === 0)
      expect((await post(server, '/api/v1/push', pushOf(600_000), as('a'))).status).toBe(201)
      expect(await held(server, 'in')).toBe(0)
    },
  )

  it('that are chunked count as they grow', async () => {
    const { socket, ended } = stalled(server, { identity: 'a', length: 0 })
    const chunk = `${(65_536).toString(16)}\r\n${'x'.repeat(65_536)}\r\n`
    socket.write(chunk.repeat(4))
    await until('4 chunks are counted', async () => (await held(server, 'in')) >= 4 * 65_536)
    expect(await held(server, 'in')).toBeLessThanOrEqual(8 * 65_536)
    stalled(server, { identity: 'a', length: 600_000 })
    await until('the other body is counted', async () => (await held(server, 'in')) > 700_000)
    socket.write(chunk.repeat(4))
    const answer = await ended
    expect(answer.status).toBe(503)
    expect(answer.body).toContain('overloaded')
    await until('only the other is left', async () => (await held(server, 'in')) === 600_000)
  })

  it('that are larger than an identity may ever hold are answered 413, not 503', async () => {
    const before = await refused(server, 'in')
    expect((await stalled(server, { length: 1_100_000 }).ended).status).toBe(413)
    const chunked = stalled(server, { length: 0 })
    const chunk = `${(65_536).toString(16)}\r\n${'x'.repeat(65_536)}\r\n`
    chunked.socket.write(chunk.repeat(17))
    expect((await chunked.ended).status).toBe(413)
    expect(await refused(server, 'in')).toBe(before)
  })

  it('of generations are given back when the prompt is stored, long before the answer ends', async () => {
    const content = `Write 5000 words. ${'x'.repeat(500_000)}`
    const body = JSON.stringify({ model: 'demo', stream: true, messages: [{ role: 'user', content }] })
    const upload = stalled(server, { path: '/v1/chat/completions', identity: 'c', length: body.length })
    await until('the body is counted', async () => (await held(server, 'in')) === body.length)
    const [first] = (await Promise.all([once(upload.socket, 'data'), upload.socket.write(body)]))[0] as [Buffer]
    expect(first.toString()).toContain('200 OK')
    await until('the space is given back', async () => (await held(server, 'in')) === 0)
    expect(upload.socket.readyState).toBe('open')
  })

  it('of requests that wait behind another on their connection are given back with it', async () => {
    const { socket } = rawConnection(server.port)
    sockets.add(socket)
    const body = JSON.stringify(pushOf(100_000))
    // The first is answered in a minute; the second is done long before, and its answer waits behind.
    socket.write(`GET ${popPath('nothing', { wait: true, timeout: 60_000 })} HTTP/1.1\r\nHost: localhost\r\n\r\n`)
    socket.write(`${head({ length: body.length })}${body}`)
    await until('the second is held', async () => (await held(server, 'in')) === body.length)
    await until('it is stored', async () => (await take(server, 'small', { consumerGroup: 'behind' })).length > 0)
    socket.destroy()
    await until('all is given back', async () => (await held(server, 'in')) === 0)
  })

  it('of a GET, which nobody reads, are not kept while it waits', async () => {
    const path = popPath('nothing', { wait: true, timeout: 20_000 })
    const waiting = rawConnection(server.port)
    sockets.add(waiting.socket)
    waiting.socket.write(`GET ${path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n`)
    waiting.socket.write('1\r\nx\r\n'.repeat(2_000))
    // One without an end is cut off; a small one is nobody's concern.
    await waiting.ended
    const harmless = await call(server, 'POST', '/demo/echo', { body: {} })
    expect(harmless.status).toBe(200)
    const ended = rawConnection(server.port)
    ended.socket.write(
      'GET /api/v1/operations HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}',
    )
    expect((await ended.ended).status).toBe(200)
  })
})

describe('answers', () => {
  /** More than the kernel takes for a client that does not read, and less than one push may bring. */
  const large = 7_000_000
  const medium = { SPILLWAY_BUFFER_BYTES_MAX: String(64 * MiB) }
  let server: ServerProcess
  beforeAll(async () => {
    server = await start(medium)
  })
  afterAll(() => server.kill())

  async function largeMessage(queue: string): Promise<string> {
    const [result] = await pushed(server, [{ queue, payload: 'x'.repeat(large), transactionId: `t-${queue}` }])
    const { partition_id } = result as unknown as { partition_id: string }
    return `/api/v1/messages/${partition_id}/t-${queue}`
  }

  it('that are not read are counted, and reads beyond them refused until they are', async () => {
    const path = await largeMessage('read')
    const first = unread(server, path)
    await until('the answer is counted', async () => (await held(server, 'out')) > large)
    expectNoRoom(await get(server, path))
    expect(await refused(server, 'out')).toBe(1)
    expect((await get(server, '/api/v1/operations')).status).toBe(200)
    first.resume()
    await until('it was read', async () => (await held(server, 'out')) === 0)
    const answer = await get(server, path)
    expect(answer.status).toBe(200)
    expect(answer.text.length).toBeGreaterThan(large)
  })

  it.each([{ autoAck: false }, { autoAck: true }])(
    'of pops: one that gets no space takes nothing ($autoAck)',
    async (options) => {
      const queue = `popped-${options.autoAck}`
      await largeMessage(queue)
      await pushed(server, [{ queue, payload: 'y'.repeat(500_000), partition: 'other' }])
      // It waits for messages, which holds nothing.
      const woken = `woken-${options.autoAck}`
      const waiting = get(server, popPath(woken, { wait: true, timeout: 20_000, ...options, batch: 500 }), as('a'))
      await until('it waits', async () => (await gauge(server, 'spillway_messages_waiting_consumers')) === 1)
      await until('it holds nothing', async () => (await held(server, 'out')) === 0)
      const first = unread(server, popPath(queue, { partition: 'Default', ...options }), 'a')
      await until('the answer is counted', async () => (await held(server, 'out')) > large)
      const other = popPath(queue, { partition: 'other', ...options })
      const answer = await get(server, other, as('a'))
      expectNoRoom(answer)
      expect(answer.body.error).toBe(answer.body.detail)
      await pushed(server, [{ queue: woken, payload: 'z'.repeat(300_000) }])
      expectNoRoom(await waiting)

      const messages = messagesOf(await get(server, other, as('b')))
      expect(messages).toHaveLength(1)
      expect(await take(server, woken, { autoAck: true })).toHaveLength(1)
      // Acks have a reserve of their own.
      const ack = await post(server, '/api/v1/ack', ackOf(messages[0] as never), as('a'))
      expect(ack.status).toBe(200)
      first.destroy()
      await until('all is given back', async () => (await held(server, 'out')) === 0)
    },
  )

  it('pops of many consumers are served, whatever is known of their queue', async () => {
    const items = Array.from({ length: 200 }, (_, n) => ({ queue: 'many', partition: `p${n}`, payload: n }))
    await pushed(server, items)
    // Nothing is known of the queue to a process that was started after the pushes: each is estimated at a whole page.
    const fresh = await start(medium)
    const answers = await Promise.all(items.map(() => get(fresh, popPath('many'), as('fleet'))))
    const statuses = answers.map(({ status }) => status)
    expect(statuses.filter((status) => status !== 200)).toEqual([])
    expect(new Set(answers.flatMap((answer) => messagesOf(answer).map(({ data }) => data))).size).toBe(200)
    expect(await refused(fresh, 'out')).toBe(0)
    await until('nothing is held', async () => (await held(fresh, 'out')) === 0)
    await fresh.kill()
  })
})

describe('200 hostile sockets of each kind', () => {
  const count = 200
  const probe = fileURLToPath(new URL('../hostile-probe.js', import.meta.url))

  const rssMegabytes = (server: ServerProcess): number =>
    Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${server.pid}/status`, 'utf8'))?.[1]) / 1_024

  it.each([1, count])(
    'of %d identities cost little more than the budget, and honest callers are served',
    async (identities) => {
      const server = await start({ SPILLWAY_REQUEST_TIMEOUT_MS: '120000' })
      const queue = `hostile-${identities}`
      await pushed(
        server,
        Array.from({ length: 4 }, () => ({ queue, payload: 'x'.repeat(990_000) })),
      )
      const listed = `listed-${identities}`
      await pushed(
        server,
        Array.from({ length: 200 }, () => ({ queue: listed, payload: 'x'.repeat(4_000) })),
      )
      // Warm: what is measured is what the hostile cost.
      await take(server, queue, { batch: 4, consumerGroup: 'warm' })
      const before = rssMegabytes(server)
      let peak = before
      const watch = setInterval(() => {
        peak = Math.max(peak, rssMegabytes(server))
      }, 5)
      const honest = fork(probe, [String(server.port)])
      try {
        await once(honest, 'message')
        const named = (n: number) => (identities === 1 ? {} : { identity: `u${n}` })
        const list = `/api/v1/messages?queue=${listed}&limit=200`
        const uploads: { socket: Socket; answered: Promise<unknown>; bytes: number }[] = []
        for (let n = 0; n < count; n++) {
          for (const [path, length] of [
            ['/v1/chat/completions', 16_000_000],
            ['/api/v1/push', 8_000_000],
          ] as const) {
            const { socket, ended } = stalled(server, { path, length, ...named(n) })
            const answered = Promise.race([new Promise((resolve) => socket.once('data', resolve)), ended])
            uploads.push({ socket, answered, bytes: length - 1_000 })
          }
          unread(server, popPath(queue, { batch: 4, consumerGroup: `g${n}` }), named(n).identity)
          const last = unread(server, list)
          // Node takes one new connection per turn of its event loop: a storm of them would be measured, not what they hold.
          if (n % 10 === 9) await once(last, 'connect')
        }
        const answered = new Set<Socket>()
        for (const upload of uploads) void upload.answered.then(() => answered.add(upload.socket))
        // Each is answered, or counted.
        await until(
          'all uploads are decided',
          async () => {
            const chats = Math.floor((await held(server, 'in')) / 16_000_000)
            return answered.size >= uploads.length - 2 * chats - 4 && answered.size >= (await refused(server, 'in'))
          },
          60_000,
        )
        const open = uploads.filter(({ socket }) => !answered.has(socket))
        // Those that were not refused send all but the end.
        for (const { socket, bytes } of open) socket.write(Buffer.alloc(bytes, ' '))
        await until(
          'the bodies have come',
          () => open.every(({ socket }) => socket.destroyed || socket.writableLength === 0),
          60_000,
        )
        await until(
          'the pops are decided',
          async () => (await refused(server, 'out')) > 0 || (await held(server, 'out')) > 0,
        )
        const report = once(honest, 'message')
        honest.send('stop')
        const [{ health, statuses }] = (await report) as [{ health: number[]; statuses: Record<string, number> }]
        expect(Object.keys(statuses).filter((name) => !/ 20[012]$/.test(name))).toEqual([])
        expect(statuses['ack 200']).toBeGreaterThan(0)
        health.sort((a, b) => a - b)
        const p99 = health[Math.floor(health.length * 0.99)] ?? 0
        console.info(
          `${identities} identities: ${Math.round(peak - before)} MB, health p99 ${Math.round(p99)} ms of ${health.length}, ${open.length} uploads held`,
        )
        // The budget is 256 MiB. 300 is what is wanted (66 and 286 were measured); the rest is room for the garbage collector.
        expect(peak - before).toBeLessThan(350)
        expect(open.length).toBeGreaterThan(0)
        // 100 ms is the goal on a machine of its own; here others have the processors as well.
        expect(p99).toBeLessThan(1_000)
      } finally {
        clearInterval(watch)
        honest.kill()
        await server.kill()
      }
    },
    120_000,
  )
})
