/**
 * Clients that close their half of the connection behind their request (`nc -N`, shutdown(SHUT_WR)). What was begun is
 * answered. What only waits ends, and takes nothing: a client that was killed sends the same FIN.
 */
import { randomUUID } from 'node:crypto'
import { readdir, readlink } from 'node:fs/promises'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  monotonicMs,
  type ScriptedUpstream,
  startScriptedUpstream,
} from '../../../spillway/test/setup/scripted-upstream.js'
import { type RawAnswer, rawConnection } from '../http-listening.js'
import {
  endAll,
  get,
  latch,
  post,
  type ServerProcess,
  sample,
  startServer,
  startTarget,
  submit,
  type Target,
  until,
} from '../server-process.js'

let database: TestDatabase
let target: Target
let upstream: ScriptedUpstream
let server: ServerProcess
const held = new Map<string, ReturnType<typeof latch>>()

beforeAll(async () => {
  database = await freshDatabase()
  upstream = await startScriptedUpstream()
  target = await startTarget(async ({ path }, response) => {
    await held.get(path)?.opened
    response.writeHead(200, { 'content-type': 'application/json' }).end('{"ok":true}')
  })
  server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    GENERATION_UPSTREAM_URL: upstream.url,
    SPILLWAY_ACCEPT_WAIT_BUDGET_MS: '60000',
    SPILLWAY_BUSY_QUEUE_ABOVE: '1',
  })
})
afterAll(async () => {
  await endAll()
  await target.close()
  await upstream.close()
  await database.drop()
})

const requestText = (method: string, path: string, body?: unknown, headers: Record<string, string> = {}) => {
  const text = body === undefined ? '' : JSON.stringify(body)
  const lines = Object.entries({
    host: 'localhost',
    ...(body !== undefined && {
      'content-type': 'application/json',
      'content-length': String(Buffer.byteLength(text)),
    }),
    ...headers,
  }).map(([name, value]) => `${name}: ${value}\r\n`)
  return `${method} ${path} HTTP/1.1\r\n${lines.join('')}\r\n${text}`
}

/** Request and FIN at once; everything that came until the server closed. */
function halfClosed(text: string): Promise<RawAnswer> {
  const { socket, ended } = rawConnection(server.port, true)
  socket.end(text)
  return ended
}

const json = (answer: RawAnswer) => JSON.parse(answer.body) as Record<string, unknown>
const order = (path: string, more = {}) => ({
  ...{ type: 'http.request', queue: randomUUID(), payload: { url: `${target.origin}${path}` } },
  ...more,
})

async function socketsOf(pid: number): Promise<number> {
  const names = await readdir(`/proc/${pid}/fd`)
  const links = await Promise.all(names.map((name) => readlink(`/proc/${pid}/fd/${name}`).catch(() => '')))
  return links.filter((link) => link.startsWith('socket:')).length
}

describe('is answered', () => {
  it('an operation that is done at once', async () => {
    const answer = await halfClosed(requestText('POST', '/api/v1/operations', order('/at-once')))
    expect([answer.status, json(answer).status]).toEqual([201, 'executed'])
  })

  it('an operation that is under way when the FIN comes', async () => {
    held.set('/under-way', latch())
    const { socket, ended } = rawConnection(server.port, true)
    socket.write(requestText('POST', '/api/v1/operations', order('/under-way')))
    await until('it is under way', () => target.calls.some(({ path }) => path === '/under-way'))
    socket.end()
    held.get('/under-way')?.open()
    const answer = await ended
    expect([answer.status, json(answer).status]).toEqual([201, 'executed'])
  })

  it('a push, a petition, a page and a 404', async () => {
    const queue = randomUUID()
    const push = await halfClosed(requestText('POST', '/api/v1/push', { items: [{ queue, payload: 1 }] }))
    expect(push.status).toBe(201)
    const petition = await halfClosed(
      requestText('POST', '/api/v1/petition-submissions', { type: 'GENERAL', realm: 'governance', text: 'x' }),
    )
    expect(petition.status).toBe(201)
    expect((await halfClosed(requestText('GET', '/'))).status).toBe(200)
    expect((await halfClosed(requestText('GET', '/docs/'))).status).toBe(200)
    expect((await halfClosed(requestText('GET', '/nowhere'))).status).toBe(404)
    expect((await halfClosed(requestText('GET', '/health/ready'))).status).toBe(200)
    expect((await halfClosed(requestText('POST', '/demo/echo?delay_ms=50', { a: 1 }))).status).toBe(200)
  })

  it.each([
    ['autoAck=true', true],
    ['autoAck=true&wait=true&timeout=5000', true],
    ['batch=1', false],
  ])('a pop that finds a message (%s)', async (query, isSettled) => {
    const queue = randomUUID()
    await post(server, '/api/v1/push', { items: [{ queue, payload: 'kept' }] })
    const answer = await halfClosed(requestText('GET', `/api/v1/pop/queue/${queue}?${query}`))
    expect(answer.status).toBe(200)
    const [message] = json(answer).messages as { data: unknown; leaseId: string }[]
    expect([message?.data, message?.leaseId === '']).toEqual(['kept', isSettled])
    expect((await get(server, `/api/v1/pop/queue/${queue}`)).status).toBe(204)
  })

  it('each of several on one socket, in order', async () => {
    const answer = await halfClosed(
      requestText('POST', '/api/v1/operations', order('/first')) +
        requestText('GET', '/nowhere') +
        requestText('GET', '/health'),
    )
    expect([...answer.text.matchAll(/HTTP\/1\.1 (\d+)/g)].map(([, status]) => status)).toEqual(['201', '404', '200'])
  })
})

describe('ends, and takes nothing', () => {
  it.each(['', '&autoAck=true'])('a pop that waits (%s)', async (more) => {
    const queue = randomUUID()
    await post(server, '/api/v1/configure', { queue })
    const { socket, ended } = rawConnection(server.port, true)
    const waits = async () => sample((await get(server, '/metrics')).text, 'spillway_messages_waiting_consumers') ?? 0
    socket.write(requestText('GET', `/api/v1/pop/queue/${queue}?wait=true&timeout=30000${more}`))
    await until('it waits', async () => (await waits()) === 1)
    const began = performance.now()
    socket.end()
    expect((await ended).status).toBe(204)
    expect(performance.now() - began).toBeLessThan(1_000)
    await post(server, '/api/v1/push', { items: [{ queue, payload: 'for the next' }] })
    const { body } = await get(server, `/api/v1/pop/queue/${queue}`)
    expect((body.messages as { data: unknown; retryCount: number }[])[0]).toMatchObject({
      ...{ data: 'for the next', retryCount: 0 },
    })
  })

  it('a long poll, Prefer: wait and a stream of an operation: answered with the state by then', async () => {
    held.set('/long', latch())
    const { body: ticket } = await submit(
      server,
      `${target.origin}/long`,
      { queue: randomUUID() },
      { prefer: 'respond-async' },
    )
    const path = `/api/v1/operations/${ticket.operationId}`
    const began = performance.now()
    const [poll, preferred, stream] = await Promise.all([
      halfClosed(requestText('GET', `${path}?wait=30`)),
      halfClosed(
        requestText('POST', '/api/v1/operations', order('/long', { delay_seconds: 60 }), { prefer: 'wait=30' }),
      ),
      halfClosed(requestText('GET', `${path}/stream`)),
    ])
    expect(performance.now() - began).toBeLessThan(3_000)
    expect(poll.status).toBe(200)
    expect(preferred.status).toBe(202)
    expect(stream.status).toBe(200)
    held.get('/long')?.open()
  })

  it('a petition whose state is waited for', async () => {
    const { body } = await post(server, '/api/v1/petition-submissions', {
      type: 'GENERAL',
      realm: 'governance',
      text: 'y',
    })
    const status = `/api/v1/petition-submissions/${body.petition_id}/status`
    const { body: now } = await get(server, status)
    const began = performance.now()
    const answer = await halfClosed(requestText('GET', `${status}?version=${now.version}&wait=30`))
    expect(answer.status).toBe(304)
    expect(performance.now() - began).toBeLessThan(3_000)
  })

  it.each([true, false])(
    'a plain generation that runs (stream: %s): its upstream hears of it within 1 s',
    async (stream) => {
      const marker = `half-${stream}`
      const { socket, ended } = rawConnection(server.port, true)
      socket.write(
        requestText('POST', '/v1/chat/completions', {
          ...{ model: 'demo', stream },
          messages: [{ role: 'user', content: `script: marker=${marker} tokens=1 end=hang` }],
        }),
      )
      const seen = await until('it runs', () => upstream.requests.find((request) => request.marker === marker))
      const leftMs = monotonicMs()
      socket.end()
      await until('its upstream was left', () => seen.outcome === 'aborted')
      expect((seen.endedMs ?? Number.POSITIVE_INFINITY) - leftMs).toBeLessThan(1_000)
      await ended
    },
  )
})

it('no socket is left when all are gone', async () => {
  const before = await socketsOf(server.pid)
  const queue = randomUUID()
  await Promise.all(
    Array.from({ length: 100 }, (_, n) =>
      halfClosed(
        n % 2 === 0
          ? requestText('POST', '/api/v1/push', { items: [{ queue, payload: n }] }).repeat(5)
          : requestText('GET', `/api/v1/pop/queue/${randomUUID()}?wait=true&timeout=60000`).repeat(3),
      ),
    ),
  )
  await until('their sockets are closed', async () => (await socketsOf(server.pid)) <= before)
})
