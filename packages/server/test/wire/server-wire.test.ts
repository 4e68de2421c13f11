/** What holds for every route and health, metrics and documents, through the real server. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { rawExchange } from '../http-listening.js'
import {
  type Answer,
  call,
  endAll,
  finishes,
  get,
  post,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
} from '../server-process.js'

let database: TestDatabase
let server: ServerProcess
let target: Target

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget()
  server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_CORS_ORIGINS: 'https://app.example.com',
    SPILLWAY_LOG_LEVEL: 'debug',
  })
})

afterAll(async () => {
  await endAll()
  await target.close()
  await database.drop()
})

function expectProblem(answer: Answer, status: number, path: string): void {
  expect(answer.status).toBe(status)
  expect(answer.headers.get('content-type')).toMatch(/^application\/problem\+json/)
  expect(answer.body).toMatchObject({
    type: expect.any(String),
    title: expect.any(String),
    status,
    detail: expect.any(String),
    instance: path,
    code: expect.stringMatching(/^[a-z_]+$/),
    trace_id: expect.stringMatching(/^[0-9a-f]{32}$/),
  })
  expect(answer.headers.get('x-request-id')).toBe(answer.body.trace_id)
  expect(answer.text).not.toMatch(/\.js:\d|SELECT |node_modules/)
}

const raw = (body: string | Buffer, type = 'application/json') =>
  fetch(`${server.origin}/api/v1/operations`, {
    method: 'POST',
    headers: { 'content-type': type },
    body: typeof body === 'string' ? body.replace('TARGET', target.origin) : body,
  }).then(async (answer): Promise<Answer> => {
    const text = await answer.text()
    return { status: answer.status, headers: answer.headers, text, body: JSON.parse(text), ms: 0 }
  })
/** TARGET becomes the target's origin, which is not known while the cases are collected. */
const withBody = (member: string) => `{"type":"http.request","queue":"w","payload":{"url":"TARGET/w","body":${member}}}`

describe('bodies', () => {
  it.each([
    ['broken JSON', '{"type":'],
    ['no JSON', 'hello'],
    ['an array', '[]'],
    ['null', 'null'],
    ['a duplicate end', '{}}'],
    ['depth 65', withBody(`${'['.repeat(65)}1${']'.repeat(65)}`)],
    ['a depth that would break a stack', withBody(`${'['.repeat(100_000)}${']'.repeat(100_000)}`)],
    ['a number beyond double precision', withBody('1e999')],
    ['a member named __proto__', withBody('{"__proto__":{}}')],
    ['a NUL', withBody('"a\\u0000b"')],
    ['a lone surrogate', withBody('"\\ud800"')],
    ['a NUL in a name', withBody('1').replace('"w"', '"w\\u0000"')],
    ['a lone surrogate in a name', withBody('1').replace('"w"', '"\\udc00"')],
    ['no UTF-8', Buffer.from([0x22, 0xff, 0xfe, 0x22])],
    ['nothing', ''],
  ])('400 for %s', async (_, body) => {
    const answer = await raw(body)
    expectProblem(answer, 400, '/api/v1/operations')
    expect(answer.body.errors.length).toBeGreaterThan(0)
    for (const fault of answer.body.errors)
      expect(fault).toMatchObject({ path: expect.any(String), message: expect.any(String) })
  })

  it.each(['text/plain', 'application/xml', 'multipart/form-data; boundary=x', 'application/json; charset=latin1'])(
    '415 for %s',
    async (type) => expectProblem(await raw(withBody('1'), type), 415, '/api/v1/operations'),
  )

  it('413 beyond 1 MiB, and up to it not', async () => {
    expectProblem(await raw(withBody(`"${'x'.repeat(1_048_577)}"`)), 413, '/api/v1/operations')
    const frame = withBody('""').replace('TARGET', target.origin).length
    const fits = await raw(withBody(`"${'x'.repeat(1_048_576 - frame)}"`))
    expect(fits.status).toBe(201)
  })

  it('names may have any characters, and are returned unchanged', async () => {
    for (const queue of ['a:b/c?d#e', '..', 'ünïcödé 🎉', ' ', '%00', "';--", '🎉'.repeat(255)]) {
      const { status } = await submit(server, `${target.origin}/w`, { queue, partition: queue })
      expect([queue, status]).toEqual([queue, 201])
      const { body } = await get(server, `/api/v1/operations?queue=${encodeURIComponent(queue)}`)
      expect(body.items.map((o) => [o.queue, o.partition])).toEqual([[queue, queue]])
    }
  })

  it('payloads reach the target as they are, whatever JSON they are', async () => {
    for (const body of [null, 0, -0.5, 1e300, '', 'ü🎉', false, [], {}, [null, { a: [1, '2'] }]]) {
      await submit(server, `${target.origin}/exact`, { queue: 'exact', payload: { body } })
      expect(JSON.parse(target.calls.at(-1)?.body ?? '')).toEqual(body)
    }
  })
})

describe('paths and methods', () => {
  it('404 for the unknown, 405 with Allow for the wrong method', async () => {
    expectProblem(await get(server, '/nowhere?secret=1'), 404, '/nowhere')
    const wrong = await call(server, 'PUT', '/api/v1/operations', { body: {} })
    expectProblem(wrong, 405, '/api/v1/operations')
    expect(wrong.headers.get('allow')?.split(', ')).toEqual(expect.arrayContaining(['GET', 'POST']))
    const deleted = await call(server, 'DELETE', '/health')
    expectProblem(deleted, 405, '/health')
  })

  it('400, never 500, for query and header nonsense', async () => {
    const queries = ['queue=%00', 'limit=1&limit=2', 'queue=%ff']
    for (const path of queries.map((query) => `/api/v1/operations?${query}`)) {
      const { status } = await get(server, path)
      expect([path, status]).toEqual([path, 400])
    }
    const long = await get(server, '/health', { 'x-long': 'x'.repeat(20_000) })
    expect(long.status).toBe(431)
    const answer = await rawExchange(server.port, 'nonsense\r\n\r\n')
    expect(answer.status).toBe(400)
    expect(JSON.parse(answer.body)).toMatchObject({ code: 'invalid_request' })
  })

  it.each([
    ['GET /api/v1/operations?queue=%00', 'X-A: 1', ''],
    ['GET /api/v1/operations/%ff', 'X-A: 1', ''],
    ['GET /%', 'X-A: 1', ''],
    ['GET /api/v1/operations', 'X-User-ID:', '/headers/x-user-id'],
    ['GET /api/v1/operations', `X-User-ID: ${'x'.repeat(256)}`, '/headers/x-user-id'],
    ['GET /api/v1/operations', 'Expect: foo', '/headers/expect'],
    [
      'POST /api/v1/operations',
      'Expect: foo\r\nContent-Length: 2\r\nContent-Type: application/json',
      '/headers/expect',
    ],
  ])('400 says what is wrong with %s, %s', async (line, header, path) => {
    const asked = `${line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n${header}\r\n\r\n{}`
    const { status, headers, body } = await rawExchange(server.port, asked)
    expect([status, headers['content-type']]).toEqual([400, 'application/problem+json'])
    expect(JSON.parse(body)).toMatchObject({
      code: 'invalid_request',
      trace_id: headers['x-request-id'],
      errors: [{ path, message: expect.any(String) }],
    })
  })
})

describe('traces', () => {
  const parent = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'

  it('continue from traceparent, through the queue, to the target', async () => {
    const direct = await submit(server, `${target.origin}/trace`, { queue: 'trace' }, { traceparent: parent })
    expect(direct.headers.get('x-request-id')).toBe('0af7651916cd43dd8448eb211c80319c')
    expect(target.calls.at(-1)?.headers.traceparent).toMatch(/^00-0af7651916cd43dd8448eb211c80319c-[0-9a-f]{16}-01$/)
    const queued = await submit(
      server,
      `${target.origin}/trace?q`,
      { queue: 'trace' },
      { traceparent: parent.replace('0af7', '1af7'), prefer: 'respond-async' },
    )
    await finishes(server, queued.body.operationId)
    const made = target.calls.find((c) => c.path === '/trace?q')?.headers.traceparent
    expect(made).toMatch(/^00-1af7651916cd43dd8448eb211c80319c-[0-9a-f]{16}-01$/)
    expect(made).not.toContain('b7ad6b7169203331')
  })

  it.each([
    'nonsense',
    '00-00000000000000000000000000000000-b7ad6b7169203331-01',
    'ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01',
  ])('are created for %s', async (traceparent) => {
    const { headers } = await get(server, '/health', { traceparent })
    expect(headers.get('x-request-id')).toMatch(/^(?!0{32})(?!0af76519)[0-9a-f]{32}$/)
  })
})

it('CORS for listed origins only', async () => {
  const listed = await get(server, '/api/v1/operations', { origin: 'https://app.example.com' })
  expect(listed.headers.get('access-control-allow-origin')).toBe('https://app.example.com')
  const other = await get(server, '/api/v1/operations', { origin: 'https://evil.example.com' })
  expect(other.headers.get('access-control-allow-origin')).toBeNull()
})

describe('health, metrics and documents', () => {
  it('health shows version, uptime and checks', async () => {
    for (const path of ['/_health', '/health', '/health/live']) {
      const { status, body } = await get(server, path)
      expect(status).toBe(200)
      expect(body).toMatchObject({
        status: 'healthy',
        version: expect.stringMatching(/^\d+\.\d+\.\d+/),
        uptime_seconds: expect.any(Number),
        checks: { store: { ok: true } },
      })
    }
    expect((await get(server, '/health/ready')).status).toBe(200)
  })

  it('/openapi.json is OpenAPI 3.1 and names every route of health, metrics, operations and dead letters', async () => {
    const { status, body } = await get(server, '/openapi.json')
    expect(status).toBe(200)
    expect(body.openapi).toMatch(/^3\.1\./)
    const described = Object.entries(body.paths).flatMap(([path, methods]) =>
      Object.keys(methods).map((method) => `${method.toUpperCase()} ${path}`),
    )
    for (const route of [
      'GET /_health',
      'GET /health',
      'GET /health/live',
      'GET /health/ready',
      'GET /metrics',
      'GET /_metrics',
      'POST /api/v1/operations',
      'GET /api/v1/operations',
      'GET /api/v1/operations/stats',
      'GET /api/v1/operations/{id}',
      'GET /api/v1/operations/{id}/stream',
      'POST /api/v1/operations/{id}/cancel',
      'POST /api/v1/operations/{id}/retry',
      'GET /api/v1/dead-letters',
      'DELETE /api/v1/dead-letters',
      'POST /api/v1/dead-letters/redrive',
      'POST /api/v1/lanes/pause',
      'POST /api/v1/lanes/resume',
      'POST /demo/echo',
    ]) {
      expect(described).toContain(route)
    }
    // Every reference leads somewhere, and every path parameter is described.
    for (const [, pointer = ''] of JSON.stringify(body).matchAll(/"\$ref":"#([^"]*)"/g)) {
      const found = pointer
        .split('/')
        .slice(1)
        .reduce<unknown>((at, step) => (at as Record<string, unknown> | undefined)?.[decodeURIComponent(step)], body)
      expect(found).toBeDefined()
    }
    for (const [path, methods] of Object.entries(body.paths)) {
      for (const operation of Object.values(methods) as {
        parameters?: { name: string; in: string }[]
        responses?: object
      }[]) {
        expect(Object.keys(operation.responses ?? {}).length).toBeGreaterThan(0)
        for (const [, name] of path.matchAll(/\{(\w+)\}/g)) {
          expect(operation.parameters?.some((p) => p.in === 'path' && p.name === name)).toBe(true)
        }
      }
    }
  })

  it('/docs is a page, and / leads somewhere', async () => {
    const docs = await fetch(`${server.origin}/docs`)
    expect(docs.status).toBe(200)
    expect(docs.headers.get('content-type')).toContain('text/html')
    const root = await fetch(`${server.origin}/`)
    expect(root.status).toBe(200)
    expect(root.headers.get('content-type')).toContain('text/html')
  })
})

it('logs are JSON lines without payloads, keys or secrets', async () => {
  const marks = { body: 'marked-body-1', header: 'marked-header-2', key: 'marked-key-3', answer: 'marked-answer-4' }
  const telling = await startTarget((_, response) => void response.writeHead(400).end(marks.answer))
  const own = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: telling.origin,
    SPILLWAY_LOG_LEVEL: 'trace',
    SPILLWAY_DB_SCHEMA: 'logs',
  })
  await submit(
    own,
    `${telling.origin}/x`,
    { payload: { body: { secret: marks.body }, headers: { authorization: marks.header } } },
    { 'idempotency-key': marks.key, authorization: `Bearer ${marks.key}` },
  )
  await post(own, '/api/v1/operations', `{"type":"${marks.body}`)
  expect(await own.stop()).toEqual({ code: 0, signal: null })
  const written = own.stdout()
  expect(own.logs().length).toBeGreaterThan(0)
  for (const mark of Object.values(marks)) expect(written).not.toContain(mark)
  expect(written).not.toContain(new URL(database.url).password)
  await telling.close()
})
