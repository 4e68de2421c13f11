/**
 * Web pages against a server without authentication: DNS rebinding (a Host that is not ours) and requests from pages of
 * other sites.
 */
import { createHash, randomUUID } from 'node:crypto'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { rawExchange } from '../http-listening.js'
import {
  endAll,
  get,
  post,
  runProgram,
  type ServerProcess,
  startServer,
  startTarget,
  type Target,
} from '../server-process.js'

let database: TestDatabase
let target: Target
let server: ServerProcess
let withKeys: ServerProcess
let folder: string
const key = 'sk-test'

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget()
  folder = await mkdtemp(join(tmpdir(), 'spillway-sites-'))
  const digest = createHash('sha256').update(key).digest('hex')
  const keys = { [`sha256:${digest}`]: { identity: 'alice', roles: ['operate', 'submit', 'consume'] } }
  await writeFile(join(folder, 'keys.json'), JSON.stringify(keys))
  const env = { DATABASE_URL: database.url, SPILLWAY_FORWARD_ALLOW: target.origin }
  server = await startServer({
    ...env,
    SPILLWAY_ALLOWED_HOSTS: 'spillway.internal, Gate.Example.COM.,203.0.113.7,[2001:db8::1]',
    SPILLWAY_CORS_ORIGINS: 'https://app.example.com',
  })
  withKeys = await startServer({ ...env, SPILLWAY_API_KEYS: join(folder, 'keys.json') })
})
afterAll(async () => {
  await endAll()
  await target.close()
  await database.drop()
  await rm(folder, { recursive: true })
})

interface Sent {
  method?: string
  path?: string
  version?: string
  headers?: Record<string, string>
  body?: unknown
}

/** As it stands here: fetch sets Host, Origin and Sec-Fetch-Site itself. */
async function send(
  to: ServerProcess,
  { method = 'GET', path = '/api/v1/operations', version = '1.1', headers = {}, body }: Sent,
) {
  const text = body === undefined ? '' : JSON.stringify(body)
  const lines = Object.entries({
    connection: 'close',
    ...(body !== undefined && {
      'content-type': 'application/json',
      'content-length': String(Buffer.byteLength(text)),
    }),
    ...headers,
  }).map(([name, value]) => `${name}: ${value}\r\n`)
  const answer = await rawExchange(to.port, `${method} ${path} HTTP/${version}\r\n${lines.join('')}\r\n${text}`)
  const isJson = answer.headers['content-type']?.includes('json') === true
  return { ...answer, json: (isJson ? JSON.parse(answer.body) : {}) as Record<string, unknown> }
}

const order = () => ({ type: 'http.request', queue: 'sites', payload: { url: `${target.origin}/sites` } })

describe('Host', () => {
  it.each([
    'localhost',
    'LocalHost:1',
    'localhost.',
    'spillway.localhost:7745',
    '127.0.0.1',
    '127.0.0.1:99999',
    '127.8.9.10',
    '[::1]',
    '[::1]:7745',
    '[0:0:0:0:0:0:0:1]',
    '[::ffff:127.0.0.1]:7745',
    'spillway.internal',
    'SPILLWAY.internal.:8443',
    'gate.example.com',
    '203.0.113.7:80',
    '[2001:DB8::1]',
  ])('%s is ours', async (host) => {
    expect((await send(server, { headers: { host } })).status).toBe(200)
    expect((await send(server, { method: 'POST', headers: { host }, body: order() })).status).toBe(201)
  })

  it.each([
    'evil.example',
    'evil.example:7745',
    'localhost.evil.example',
    'localhost:7745.evil.example',
    '127.0.0.1.evil.example',
    'evillocalhost',
    '.localhost',
    'spillway.internal.evil.example',
    'evil.example@localhost',
    'localhost@evil.example',
    'localhost/',
    'localhost#',
    'localhost,evil.example',
    '128.0.0.1',
    '0.0.0.0',
    '10.0.0.1',
    '[::2]',
    '[::]',
    '::1',
    '[::ffff:10.0.0.1]',
    '',
    'x'.repeat(10_000),
  ])('%s is not: 421 for every route', async (host) => {
    const answers = await Promise.all([
      send(server, { headers: { host } }),
      send(server, { method: 'POST', headers: { host }, body: order() }),
      send(server, { path: '/metrics', headers: { host } }),
      send(server, { path: '/docs/', headers: { host } }),
      send(server, { path: '/nowhere', headers: { host } }),
      send(server, { method: 'POST', path: '/api/v1/admin/halt', headers: { host }, body: { reason: 'rebound' } }),
    ])
    for (const { status, json, headers } of answers) {
      expect([status, json.code]).toEqual([421, 'misdirected_request'])
      expect(json.detail).toContain('SPILLWAY_ALLOWED_HOSTS')
      expect(headers['content-type']).toBe('application/problem+json')
    }
    const asOpenAi = await send(server, { path: '/v1/models', headers: { host } })
    expect([asOpenAi.status, (asOpenAi.json.error as { code: string }).code]).toEqual([421, 'misdirected_request'])
  })

  it('the first good one opens the door to no other', async () => {
    for (const [host, status] of [
      ['localhost', 201],
      ['evil.example', 421],
      ['localhost', 201],
      ['evil.example', 421],
    ] as const) {
      expect((await send(server, { method: 'POST', headers: { host }, body: order() })).status).toBe(status)
    }
  })

  it('of a target in absolute form counts before the header', async () => {
    const path = '/api/v1/operations'
    const evil = await send(server, { path: `http://evil.example${path}`, headers: { host: 'localhost' } })
    expect(evil.status).toBe(421)
    const posted = await send(server, {
      ...{ method: 'POST', path: `http://evil.example${path}`, body: order() },
      headers: { host: 'localhost' },
    })
    expect(posted.status).toBe(421)
    const own = await send(server, { path: `http://localhost:1${path}`, headers: { host: 'evil.example' } })
    expect(own.status).toBe(200)
  })

  it('health answers by any name, and HTTP/1.0 needs none', async () => {
    for (const path of ['/health', '/_health', '/health/live', '/health/ready']) {
      expect((await send(server, { path, headers: { host: 'evil.example' } })).status).toBe(200)
    }
    expect((await send(server, { version: '1.0' })).status).toBe(200)
    expect((await send(server, { version: '1.0', headers: { host: 'evil.example' } })).status).toBe(421)
    expect((await send(server, {})).status).toBe(400)
  })

  it('twice is refused, even with the same value', async () => {
    for (const [first, second] of [
      ['localhost', 'localhost'],
      ['localhost', 'evil.example'],
      ['evil.example', 'localhost'],
    ]) {
      for (const to of [server, withKeys]) {
        for (const body of [undefined, order()]) {
          const { status, json } = await send(to, {
            method: body === undefined ? 'GET' : 'POST',
            headers: { host: first as string, HOST: second as string, authorization: `Bearer ${key}` },
            body,
          })
          expect([status, json.code]).toEqual([400, 'invalid_request'])
          expect(json.errors).toEqual([{ path: '/headers/host', message: expect.any(String) }])
        }
      }
    }
  })

  it('is not looked at with authentication on: a page has no key', async () => {
    const headers = { host: 'evil.example', authorization: `Bearer ${key}` }
    expect((await send(withKeys, { headers })).status).toBe(200)
    expect((await send(withKeys, { method: 'POST', headers, body: order() })).status).toBe(201)
    const foreign = { ...headers, origin: 'https://evil.example', 'sec-fetch-site': 'cross-site' }
    expect((await send(withKeys, { method: 'POST', headers: foreign, body: order() })).status).toBe(201)
  })
})

describe('a page of another site', () => {
  const foreign: [string, Record<string, string>][] = [
    ['cross-site', { 'sec-fetch-site': 'cross-site' }],
    ['same-site', { 'sec-fetch-site': 'same-site' }],
    ['cross-site with our own origin', { 'sec-fetch-site': 'cross-site', origin: 'http://localhost' }],
    ['a foreign origin', { origin: 'https://evil.example' }],
    ['another port of this machine', { origin: 'http://localhost:5173' }],
    ['no port, where we have one', { origin: 'http://127.0.0.1' }],
    ['a longer port', { origin: 'http://localhost:10PORT' }],
    ['a sandboxed frame', { origin: 'null' }],
    ['an empty origin', { origin: '' }],
    ['an origin with a user', { origin: 'http://localhost:PORT@evil.example' }],
    ['an origin with a path', { origin: 'http://evil.example/localhost:PORT' }],
    ['another scheme', { origin: 'chrome-extension://localhost:PORT' }],
    ['a listed name with another port', { origin: 'https://app.example.com:8443' }],
  ]
  const filled = (headers: Record<string, string>) =>
    Object.fromEntries(
      Object.entries({ host: 'localhost:PORT', ...headers }).map(([name, value]) => [
        name,
        value.replace('PORT', String(server.port)),
      ]),
    )

  it.each(foreign)('changes and consumes nothing: %s', async (_, given) => {
    const headers = filled(given)
    const queue = randomUUID()
    expect((await post(server, '/api/v1/push', { items: [{ queue, payload: 1 }] })).status).toBe(201)
    const answers = await Promise.all([
      send(server, { method: 'POST', headers, body: order() }),
      send(server, { method: 'POST', path: '/api/v1/push', headers, body: { items: [{ queue, payload: 2 }] } }),
      send(server, { path: `/api/v1/pop/queue/${queue}?autoAck=true`, headers }),
      send(server, { path: `/api/v1/pop/queue/${queue}/partition/Default`, headers }),
      send(server, { path: '/api/v1/pop', headers }),
      send(server, { method: 'DELETE', path: `/api/v1/resources/queues/${queue}`, headers }),
      send(server, { method: 'POST', path: '/api/v1/admin/halt', headers, body: {} }),
      send(server, { method: 'PUT', path: '/nowhere', headers }),
    ])
    for (const { status, json } of answers) {
      expect([status, json.code]).toEqual([403, 'forbidden'])
      expect(json.detail).toContain('SPILLWAY_CORS_ORIGINS')
    }
    // Reads pass: the browser keeps the answer from the page.
    expect((await send(server, { headers })).status).toBe(200)
    const left = await get(server, `/api/v1/pop/queue/${queue}?batch=10&autoAck=true`)
    expect((left.body.messages as unknown[]).length).toBe(1)
  })

  it.each([
    ['same-origin', { 'sec-fetch-site': 'same-origin' }],
    [
      'same-origin behind a proxy that changes the Host',
      { 'sec-fetch-site': 'same-origin', origin: 'https://gate.example' },
    ],
    ['typed by the user', { 'sec-fetch-site': 'none' }],
    ['our own origin', { origin: 'http://localhost:PORT' }],
    ['our own origin in capitals', { origin: 'HTTP://LOCALHOST:PORT' }],
    ['our own origin by another name', { origin: 'http://127.0.0.1:PORT' }],
    ['behind TLS', { host: 'gate.example.com', origin: 'https://gate.example.com' }],
    ['behind TLS on another port', { host: 'gate.example.com:8443', origin: 'https://gate.example.com:8443' }],
    ['a listed origin', { origin: 'https://app.example.com', 'sec-fetch-site': 'cross-site' }],
    ['no browser', {}],
  ])('is not what this is: %s', async (_, given) => {
    const headers = filled(given)
    expect((await send(server, { method: 'POST', headers, body: order() })).status).toBe(201)
    expect((await send(server, { path: `/api/v1/pop/queue/${randomUUID()}`, headers })).status).toBe(204)
  })

  it('of a listed origin sends a preflight request, which is allowed', async () => {
    const headers = filled({
      origin: 'https://app.example.com',
      'sec-fetch-site': 'cross-site',
      'access-control-request-method': 'POST',
    })
    const preflight = await send(server, { method: 'OPTIONS', headers })
    expect(preflight.status).toBe(204)
    expect(preflight.headers['access-control-allow-origin']).toBe('https://app.example.com')
    const answer = await send(server, { method: 'POST', headers, body: order() })
    expect([answer.status, answer.headers['access-control-allow-origin']]).toEqual([201, 'https://app.example.com'])
  })
})

describe('SPILLWAY_ALLOWED_HOSTS', () => {
  it('is listed by `spillway config` as it is compared', async () => {
    const shown = await runProgram({ SPILLWAY_ALLOWED_HOSTS: 'A.Example,b.example.' }, { args: ['config'] })
    expect(shown.code).toBe(0)
    expect(shown.stdout).toMatch(/SPILLWAY_ALLOWED_HOSTS\s.*a\.example,b\.example/)
  })

  it.each(['a.example:80', 'http://a.example', 'a b', '*', '*.example', 'a..b', '-a', '[::1', 'a/b', 'a@b'])(
    'refuses %s',
    async (hosts) => {
      const refused = await runProgram({ SPILLWAY_ALLOWED_HOSTS: hosts }, { args: ['config'] })
      expect(refused.code).not.toBe(0)
      expect(refused.stderr + refused.stdout).toContain('SPILLWAY_ALLOWED_HOSTS')
    },
  )
})
