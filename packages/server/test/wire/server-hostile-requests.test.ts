/** Requests that no ordinary client sends: each gets an explicit answer or a closed connection in time, never a 500. */
import { randomUUID } from 'node:crypto'
import { Worker } from 'node:worker_threads'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { type RawAnswer, rawConnection, rawExchange } from '../http-listening.js'
import {
  endAll,
  get,
  latch,
  post,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
  until,
} from '../server-process.js'

let database: TestDatabase
let target: Target
let server: ServerProcess
const slow = latch()

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget(async ({ path }, response) => {
    if (path === '/slow') await slow.opened
    response.writeHead(200, { 'content-type': 'application/json' }).end('{"ok":true}')
  })
  server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_ACCEPT_WAIT_BUDGET_MS: '60000',
    SPILLWAY_BUSY_QUEUE_ABOVE: '1',
    SPILLWAY_HEADERS_TIMEOUT_MS: '1000',
    SPILLWAY_REQUEST_TIMEOUT_MS: '2000',
    SPILLWAY_PRESSURE_INFLIGHT_MAX: '300',
  })
})
afterAll(async () => {
  await endAll()
  await target.close()
  await database.drop()
})

const order = (path: string) =>
  JSON.stringify({ type: 'http.request', queue: randomUUID(), payload: { url: `${target.origin}${path}` } })
const post1 = (body: string) =>
  `POST /api/v1/operations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: ${Buffer.byteLength(body)}\r\n\r\n${body}`
const statuses = ({ text }: Pick<RawAnswer, 'text'>) =>
  [...text.matchAll(/HTTP\/1\.1 (\d+)/g)].map(([, status]) => Number(status))
const errorLines = () => server.logs().filter(({ level }) => level === 'error' || level === 50)

describe('methods and versions', () => {
  it.each(['CONNECT evil.example:443', 'CONNECT localhost:80', 'CONNECT /api/v1/operations'])(
    '%s: 405 with Allow, and closed',
    async (line) => {
      const answer = await rawExchange(server.port, `${line} HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\n\r\n`)
      expect(statuses(answer)).toEqual([405])
      expect(answer.headers).toMatchObject({ 'content-type': 'application/problem+json', connection: 'close' })
      expect(answer.headers.allow?.split(', ')).toContain('GET')
      const problem = JSON.parse(answer.body)
      expect(problem).toMatchObject({ code: 'method_not_allowed', status: 405 })
      expect(answer.headers['x-request-id']).toBe(problem.trace_id)
    },
  )

  it.each(['h2c', 'websocket'])('Upgrade: %s is ignored', async (protocol) => {
    const upgrade = `Host: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: ${protocol}\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n`
    const read = await rawExchange(server.port, `GET /health HTTP/1.1\r\n${upgrade}Connection: close\r\n\r\n`)
    expect(statuses(read)).toEqual([200])
    const body = order('/upgrade')
    const written = await rawExchange(
      server.port,
      `POST /api/v1/operations HTTP/1.1\r\n${upgrade}Connection: close\r\nContent-Type: application/json\r\nContent-Length: ${body.length}\r\n\r\n${body}`,
    )
    expect(statuses(written)).toEqual([201])
  })

  it('chunks in HTTP/1.0: 400 and closed', async () => {
    const body = order('/chunks')
    const chunks = `${body.length.toString(16)}\r\n${body}\r\n0\r\n\r\n`
    const answer = await rawExchange(
      server.port,
      `POST /api/v1/operations HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n${chunks}GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n`,
    )
    expect(statuses(answer)).toEqual([400])
    expect(JSON.parse(answer.body)).toMatchObject({
      code: 'invalid_request',
      errors: [{ path: '/headers/transfer-encoding' }],
    })
  })

  it.each([
    ['length and chunks', 'Content-Length: 5\r\nTransfer-Encoding: chunked\r\n'],
    ['chunks and length', 'Transfer-Encoding: chunked\r\nContent-Length: 5\r\n'],
    ['two lengths', 'Content-Length: 5\r\nContent-Length: 6\r\n'],
    ['a length list', 'Content-Length: 5, 5\r\n'],
    ['a signed length', 'Content-Length: +5\r\n'],
    ['a length in hex', 'Content-Length: 0x5\r\n'],
    ['a huge length', 'Content-Length: 99999999999999999999999\r\n'],
    ['chunked twice', 'Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n'],
    ['chunked not last', 'Transfer-Encoding: chunked, gzip\r\n'],
    ['another encoding', 'Transfer-Encoding: xchunked\r\n'],
    ['a blank before the colon', 'Content-Length : 5\r\n'],
    ['a folded header', 'X-A: b\r\n Content-Length: 5\r\n'],
    ['a bare line feed', 'X-A: b\nContent-Length: 5\r\n'],
    ['a bare carriage return', 'X-A: b\rContent-Length: 5\r\n'],
    ['a NUL', 'X-A: b\0c\r\n'],
  ])('framing that two could read in two ways is refused, and nothing behind it is read: %s', async (_, headers) => {
    const answer = await rawExchange(
      server.port,
      `POST /api/v1/operations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n${headers}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n`,
    )
    expect(statuses(answer)).toEqual([400])
  })
})

describe('paths', () => {
  it.each([
    '/docs/static/../x',
    '/docs/static/../../package.json',
    '/docs/static/..%2fx',
    '/docs/static/%2e%2e/x',
    '/docs/static/%2e%2e%2fx',
    '/docs/static/..%5cx',
    '/docs/static/..\\x',
    '/docs/static/%252e%252e/x',
    '/docs/static/.hidden',
    '/docs/static/x%00',
    '/docs/static/%ff',
    '/docs/static//etc/passwd',
    `/docs/static/${'a'.repeat(8_000)}`,
    `/docs/static/${'a/'.repeat(4_000)}`,
    '/docs/../docs/x',
    '/docs/x/..',
    '//docs/static/../x',
  ])('%s is 404 or 400', async (path) => {
    const answer = await rawExchange(
      server.port,
      `GET ${path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n`,
    )
    expect([400, 404]).toContain(answer.status)
    expect(answer.headers['content-type']).toBe('application/problem+json')
  })
})

/** In a thread of its own, so that its work is not taken for the server's. Posts all statuses, in order. */
const pipeliner = `
const { parentPort, workerData: { port, count, paths } } = require('node:worker_threads')
const socket = require('node:net').connect(port, '127.0.0.1')
const chunks = []
socket.on('data', (chunk) => chunks.push(chunk))
socket.on('close', () => {
  const text = Buffer.concat(chunks).toString('latin1')
  parentPort.postMessage([...text.matchAll(/HTTP\\/1\\.1 (\\d+)/g)].map(([, status]) => status).join(' '))
})
for (let n = 0; n < count; n++) socket.write('GET ' + paths[n % paths.length] + ' HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n')
socket.write('GET /health HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n')
`

describe('many requests on one socket', () => {
  it('20,000: answered in order, while others are answered at once', async () => {
    const count = 20_000
    const paths = ['/health', '/health', '/nowhere']
    const client = new Worker(pipeliner, { eval: true, workerData: { port: server.port, count, paths } })
    const latenciesMs: number[] = []
    let seen: string | undefined
    client.once('message', (statuses: string) => {
      seen = statuses
    })
    while (seen === undefined) latenciesMs.push((await get(server, '/health')).ms)
    expect(seen).toBe(`${Array.from({ length: count }, (_, n) => (n % 3 === 2 ? 404 : 200)).join(' ')} 200`)
    expect(latenciesMs.sort((a, b) => a - b)[Math.floor(latenciesMs.length * 0.95)]).toBeLessThan(100)
  }, 60_000)

  it('that wait cost only a few places: the rest has not begun', async () => {
    const before = target.calls.length
    const connection = rawConnection(server.port)
    connection.socket.write(Array.from({ length: 1_000 }, () => post1(order('/slow'))).join(''))
    await until('some have begun', () => target.calls.length > before)
    for (let n = 0; n < 20; n++) expect((await submit(server, `${target.origin}/others`)).status).toBe(201)
    expect(target.calls.filter(({ path }) => path === '/slow').length).toBeLessThan(64)
    slow.open()
    await until('all are done', () => target.calls.filter(({ path }) => path === '/slow').length === 1_000, 30_000)
    connection.socket.end()
    expect(statuses(await connection.ended)).toEqual(Array.from({ length: 1_000 }, () => 201))
  }, 60_000)

  it('whose client leaves give back their places', async () => {
    for (let round = 0; round < 3; round++) {
      const connections = Array.from({ length: 20 }, () => rawConnection(server.port))
      for (const { socket } of connections) {
        socket.write(
          `GET /api/v1/pop/queue/${randomUUID()}?wait=true&timeout=30000 HTTP/1.1\r\nHost: localhost\r\n\r\n${post1(order('/left')).repeat(30)}`,
        )
      }
      await until(
        'they were taken',
        () => target.calls.filter(({ path }) => path === '/left').length >= (round + 1) * 100,
      )
      for (const { socket } of connections) socket.destroy()
    }
    // 1,800 were begun and never answered: with their places kept, this would be overloaded (300 in flight).
    await expect
      .poll(async () => (await submit(server, `${target.origin}/after`)).status, { timeout: 10_000 })
      .toBe(201)
  }, 60_000)

  it('before one that is not well-formed get their answers', async () => {
    const good = () => post1(order('/before'))
    for (const bad of ['nonsense\r\n\r\n', 'GET / HTTP/1.1\r\nBad Header\r\n\r\n', 'GET / HTTP/9.9\r\n\r\n']) {
      expect(statuses(await rawExchange(server.port, good() + bad))).toEqual([201, 400])
      expect(statuses(await rawExchange(server.port, good() + good() + good() + bad))).toEqual([201, 201, 201, 400])
    }
  })

  it('that are held longer than a request may take are answered all the same', async () => {
    const pop = `GET /api/v1/pop/queue/${randomUUID()}?wait=true&timeout=4000 HTTP/1.1\r\nHost: localhost\r\n\r\n`
    const connection = rawConnection(server.port)
    // The last read ends in the middle of a request, and nothing more is read while others are held.
    connection.socket.write(`${pop}${'GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n'.repeat(400)}GET /heal`)
    let text = ''
    connection.socket.on('data', (chunk: Buffer) => {
      text += chunk.toString()
    })
    await until('all are answered', () => statuses({ text }).length === 401)
    connection.socket.write('th HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n')
    expect(statuses(await connection.ended)).toEqual([204, ...Array.from({ length: 401 }, () => 200)])
  }, 30_000)
})

describe('a little of everything', () => {
  it('a FIN after each byte of a request is answered and closed', async () => {
    const whole = post1(order('/bytes'))
    const answers = await Promise.all(
      Array.from({ length: whole.length + 1 }, async (_, length) => {
        const { socket, ended } = rawConnection(server.port, true)
        socket.end(whole.slice(0, length))
        return [length, statuses(await ended)] as const
      }),
    )
    for (const [length, [status]] of answers) {
      expect([length, status]).toEqual([length, length === 0 ? undefined : length < whole.length ? 400 : 201])
    }
  })

  it('odd methods, names, values and sizes: no 500, no hang, nothing logged as a failure', async () => {
    const lines = [
      'get /health HTTP/1.1',
      'GET  /health HTTP/1.1',
      'GET\t/health HTTP/1.1',
      ' GET /health HTTP/1.1',
      'GET /health',
      'GET /health HTTP/1.1 ',
      'GET /health HTTP/2.0',
      'GET /health HTTP/0.9',
      'PRI * HTTP/2.0',
      'OPTIONS * HTTP/1.1',
      'GET * HTTP/1.1',
      'GET health HTTP/1.1',
      'GET http:// HTTP/1.1',
      'GET http:///health HTTP/1.1',
      'GET //localhost/health HTTP/1.1',
      'GET ?a=b HTTP/1.1',
      'GET /health#x HTTP/1.1',
      'GET /health\x7f HTTP/1.1',
      'GET /h\xe9alth HTTP/1.1',
      'GET /%zz HTTP/1.1',
      'TRACE /health HTTP/1.1',
      'PROPFIND /api/v1/operations HTTP/1.1',
      'M-SEARCH * HTTP/1.1',
      'QUERY /api/v1/operations HTTP/1.1',
      'BREW /pot HTTP/1.1',
      'HEAD /api/v1/pop HTTP/1.1',
      'HEAD /health HTTP/1.1',
      'DELETE /api/v1/operations HTTP/1.1',
      `GET /${'a'.repeat(20_000)} HTTP/1.1`,
      `${'A'.repeat(20_000)} / HTTP/1.1`,
    ]
    const headers = [
      'X-A: b',
      ': b',
      'X A: b',
      'X-A b',
      'X-\xe9: b',
      'X-A: \x01',
      'X-A: \xff\xfe',
      `X-A: ${'b'.repeat(20_000)}`,
      Array.from({ length: 3_000 }, (_, n) => `X-${n}: b`).join('\r\n'),
      '__proto__: x',
      'constructor: x',
      'Expect: 100-continue',
      'Expect: nonsense',
      'Connection: keep-alive, close, upgrade',
      'Cookie: a=b\r\nCookie: c=d',
      'Authorization: Bearer x\r\nAuthorization: Bearer y',
      'Content-Type: a\r\nContent-Type: b',
      'Accept: */*;q=nan',
      'traceparent: 00-zz',
      'Content-Length: 3',
      'Transfer-Encoding: chunked',
      'Transfer-Encoding:',
      'Range: bytes=0-1,2-3',
      'Origin: \xff',
      'Last-Event-ID: \xff',
      'X-User-ID: \xe9',
    ]
    const cases = [
      ...lines.map((line) => `${line}\r\nHost: localhost\r\n\r\n`),
      ...headers.map((header) => `POST /api/v1/operations HTTP/1.1\r\nHost: localhost\r\n${header}\r\n\r\n`),
      ...headers.map((header) => `GET /api/v1/operations HTTP/1.1\r\n${header}\r\nHost: localhost\r\n\r\n`),
      '\r\n\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n',
      'GET /health HTTP/1.1\nHost: localhost\n\n',
      '\0'.repeat(100),
      '\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03',
      'POST /api/v1/operations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n',
      `POST /api/v1/operations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5;${'x'.repeat(20_000)}\r\n`,
      `POST /api/v1/operations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Trailer: a\r\nBad Trailer\r\n\r\n`,
    ]
    // Half of them stay open, half close their half at once: the timeouts of this server end the former.
    const began = performance.now()
    const ends = await Promise.all(
      cases.flatMap((text) =>
        [true, false].map(async (isHalf) => {
          const { socket, ended } = rawConnection(server.port, true)
          socket.write(Buffer.from(text, 'latin1'))
          if (isHalf) socket.end()
          // What was answered and is kept alive is closed here.
          const answer = await Promise.race([
            ended,
            new Promise<null>((resolve) => setTimeout(() => resolve(null), 6_000).unref()),
          ])
          if (answer === null) socket.destroy()
          return { text: text.slice(0, 60), isHalf, ended: answer ?? (await ended), hung: answer === null }
        }),
      ),
    )
    for (const { text, isHalf, ended, hung } of ends) {
      const all = statuses(ended)
      expect([text, all.filter((status) => status >= 500)]).toEqual([text, []])
      // Open and unanswered is a hang; so is half-closed and not closed in turn.
      if (hung) expect([text, isHalf, all.length > 0]).toEqual([text, false, true])
    }
    expect(performance.now() - began).toBeLessThan(20_000)
    expect((await get(server, '/health/ready')).status).toBe(200)
    expect((await post(server, '/api/v1/operations', JSON.parse(order('/last')))).status).toBe(201)
    expect(errorLines()).toEqual([])
  }, 60_000)
})
