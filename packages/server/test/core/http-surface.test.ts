import { createHash } from 'node:crypto'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { exportJWK, generateKeyPair, SignJWT } from 'jose'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { createAuthenticator } from '../../src/auth/auth.js'
import { type Listening, listening, rawConnection } from '../http-listening.js'

const json = { 'content-type': 'application/json' }
const open: Listening[] = []

async function started(...options: Parameters<typeof listening>): Promise<Listening> {
  const server = await listening(...options)
  open.push(server)
  return server
}

afterEach(async () => {
  await Promise.all(open.splice(0).map((server) => server.close()))
})

describe('health and metrics', () => {
  it.each(['/health', '/_health', '/health/live'])('%s answers while the process runs', async (path) => {
    const server = await started()
    expect(await (await fetch(server.origin + path)).json()).toMatchObject({
      status: 'healthy',
      version: '0.0.0-test',
      uptime_seconds: expect.any(Number),
      checks: { store: { ok: true }, nats: { ok: true } },
    })
    server.checks.store = { ok: false, detail: 'no answer' }
    const degraded = await fetch(server.origin + path)
    expect(degraded.status).toBe(200)
    expect(await degraded.json()).toMatchObject({
      status: 'degraded',
      checks: { store: { ok: false, detail: 'no answer' } },
    })
  })

  it('is ready without optional dependencies, and names failing ones', async () => {
    const server = await started()
    server.checks.nats = { ok: false, optional: true }
    expect((await fetch(`${server.origin}/health/ready`)).status).toBe(200)
    server.checks.store = { ok: false, detail: 'no answer' }
    const answer = await fetch(`${server.origin}/health/ready`)
    expect(answer.status).toBe(503)
    expect(answer.headers.get('retry-after')).toMatch(/^[12]$/)
    expect(await answer.json()).toMatchObject({
      code: 'not_ready',
      failing: ['store'],
      detail: expect.stringContaining('store'),
    })
  })

  it.each(['/metrics', '/_metrics'])('%s is Prometheus text', async (path) => {
    const server = await started()
    const answer = await fetch(server.origin + path)
    expect(answer.headers.get('content-type')).toContain('text/plain; version=0.0.4')
    expect(await answer.text()).toContain('up 1')
  })
})

describe('pages', () => {
  it('describes itself as OpenAPI 3.1, with a page to try it', async () => {
    const server = await started()
    const answer = await fetch(`${server.origin}/openapi.json`)
    expect(answer.headers.get('x-request-id')).toMatch(/^[0-9a-f]{32}$/)
    const document = (await answer.json()) as { openapi: string; paths: Record<string, object> }
    expect(document.openapi).toBe('3.1.0')
    expect(document.paths['/items']).toHaveProperty('post.requestBody.content.application/json.schema.properties.name')
    expect(document.paths).toHaveProperty('/health/ready')
    const page = await fetch(`${server.origin}/docs`)
    expect(page.status).toBe(200)
    const html = await page.text()
    expect(html).toContain('swagger')
    expect(html).not.toMatch(/(?:src|href)="(?:https?:)?\/\//)
    for (const [, path] of html.matchAll(/(?:src|href)="([^"]+)"/g)) {
      const asset = await fetch(new URL(path ?? '', `${server.origin}/docs/`))
      expect(asset.status).toBe(200)
      expect((await asset.arrayBuffer()).byteLength).toBeGreaterThan(0)
    }
    const missing = await fetch(`${server.origin}/docs/static/none.js`)
    expect(missing.status).toBe(404)
    expect(await missing.json()).toMatchObject({ code: 'not_found', trace_id: missing.headers.get('x-request-id') })
  })

  it('describes itself at the root', async () => {
    const server = await started()
    const html = await (await fetch(server.origin)).text()
    for (const part of ['href="/docs"', 'href="/health"', 'href="/metrics"', `${server.origin}/api/v1/operations`]) {
      expect(html).toContain(part)
    }
  })
})

describe('demo echo', () => {
  const echo = (server: Listening, query: string, body = '{"a":1}', headers: Record<string, string> = json) =>
    fetch(`${server.origin}/demo/echo${query}`, { method: 'POST', body, headers })

  it('answers with what it received, JSON or text', async () => {
    const server = await started()
    const answer = await echo(server, '?delay_ms=20', '{"a":1}', { ...json, 'idempotency-key': 'k' })
    expect(await answer.json()).toMatchObject({ body: { a: 1 }, headers: { 'idempotency-key': 'k' } })
    expect(await (await echo(server, '', 'hi', { 'content-type': 'text/plain' })).json()).toMatchObject({ body: 'hi' })
  })

  it('fails as asked', async () => {
    const server = await started()
    expect((await echo(server, '?fail=418')).status).toBe(418)
    expect((await echo(server, '?fail=1')).status).toBe(500)
    expect((await echo(server, '?fail=0')).status).toBe(200)
    const busy = await echo(server, '?fail=503')
    expect(busy.headers.get('retry-after')).toMatch(/^[12]$/)
    for (const query of ['?fail=2', '?fail=600', '?fail=x', '?delay_ms=60001', '?delay_ms=-1']) {
      expect((await echo(server, query)).status).toBe(400)
    }
  })

  it('stops waiting when the client leaves', async () => {
    const server = await started()
    const { socket, ended } = rawConnection(server.port)
    socket.write('POST /demo/echo?delay_ms=60000 HTTP/1.1\r\nHost: localhost\r\n\r\n', () => socket.destroy())
    await ended
    // Closing waits for requests under way: with the timer still set this would take a minute.
    await server.close()
  })
})

describe('CORS', () => {
  const preflight = { 'access-control-request-method': 'POST', 'access-control-request-headers': 'authorization' }

  it('answers preflights and names what a page may read, for listed origins', async () => {
    const server = await started({ corsOrigins: ['https://app.example.com'] })
    const origin = 'https://app.example.com'
    const asked = await fetch(`${server.origin}/items`, { method: 'OPTIONS', headers: { origin, ...preflight } })
    expect(asked.status).toBe(204)
    expect(asked.headers.get('access-control-allow-origin')).toBe(origin)
    expect(asked.headers.get('access-control-allow-headers')).toBe('authorization')
    const refused = await fetch(`${server.origin}/nothing`, { headers: { origin } })
    expect(refused.headers.get('access-control-allow-origin')).toBe(origin)
    expect(refused.headers.get('access-control-expose-headers')).toContain('Retry-After')
    expect(refused.headers.get('vary')).toBe('Origin')
  })

  it('sends no headers to other origins, and none when off', async () => {
    const listed = await started({ corsOrigins: ['https://app.example.com'] })
    const off = await started()
    for (const server of [listed, off]) {
      const answer = await fetch(`${server.origin}/items`, {
        method: 'OPTIONS',
        headers: { origin: 'https://evil.example.com', ...preflight },
      })
      expect(answer.status).toBe(405)
      expect(answer.headers.get('access-control-allow-origin')).toBeNull()
    }
  })
})

describe('authentication', () => {
  const secret = 'a secret of more than thirty-two bytes'
  const keyName = (key: string) => `sha256:${createHash('sha256').update(key).digest('hex')}`
  let folder: string
  let keyFile: string
  let jwksUrl: string
  let stopKeyServer: () => void
  let privateKey: Awaited<ReturnType<typeof generateKeyPair>>['privateKey']

  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), 'spillway-keys-'))
    keyFile = join(folder, 'keys.json')
    const pair = await generateKeyPair('ES256')
    privateKey = pair.privateKey
    const keys = JSON.stringify({ keys: [{ ...(await exportJWK(pair.publicKey)), kid: '1', alg: 'ES256' }] })
    const keyServer = createServer((_, answer) => answer.setHeader('content-type', 'application/json').end(keys))
    await new Promise<void>((resolve) => keyServer.listen(0, '127.0.0.1', resolve))
    jwksUrl = `http://127.0.0.1:${(keyServer.address() as AddressInfo).port}/`
    stopKeyServer = () => {
      keyServer.closeAllConnections()
      keyServer.close()
    }
  })
  afterAll(async () => {
    stopKeyServer()
    await rm(folder, { recursive: true })
  })

  const writeKeys = (keys: Record<string, object>) => writeFile(keyFile, JSON.stringify(keys))
  const bearer = (token: string) => ({ authorization: `Bearer ${token}` })
  const status = async (server: Listening, path: string, headers: Record<string, string> = {}) =>
    (await fetch(server.origin + path, { headers })).status
  const exp = Math.floor(Date.now() / 1_000) + 600
  const hmac = (claims: object) =>
    new SignJWT({ exp, ...claims }).setProtectedHeader({ alg: 'HS256' }).sign(new TextEncoder().encode(secret))
  const signed = (claims: object) =>
    new SignJWT({ exp, ...claims }).setProtectedHeader({ alg: 'ES256', kid: '1' }).sign(privateKey)

  it('off: X-User-ID submits and consumes, a request without it may do everything', async () => {
    const server = await started()
    expect(await status(server, '/operate')).toBe(200)
    expect(await status(server, '/operate', { 'x-user-id': 'ann' })).toBe(403)
    expect(await status(server, '/consume', { 'x-user-id': 'ann' })).toBe(200)
    expect(await status(server, '/consume', { 'x-user-id': 'x'.repeat(300) })).toBe(400)
    const answer = await fetch(`${server.origin}/items`, { method: 'POST', body: '{"name":"a"}', headers: json })
    expect(await answer.json()).toMatchObject({ identity: '127.0.0.1', clientAddress: '127.0.0.1' })
  })

  it('on: keys and both kinds of tokens, 401 and 403', async () => {
    await writeKeys({
      [keyName('key-1')]: { identity: 'ann', roles: ['submit'] },
      [keyName('key-2')]: { identity: 'op', roles: ['operate'] },
    })
    const authenticator = createAuthenticator({
      apiKeysFile: keyFile,
      jwtSecret: secret,
      jwksUrl,
      onFault: (fault) => {
        throw fault
      },
    })
    const server = await started({ authenticator })

    const nobody = await fetch(`${server.origin}/consume`)
    expect(nobody.status).toBe(401)
    expect(nobody.headers.get('www-authenticate')).toBe('Bearer realm="spillway"')
    expect(await nobody.json()).toMatchObject({ code: 'unauthenticated' })
    const wrong = await fetch(`${server.origin}/consume`, { headers: bearer('key-3') })
    expect(wrong.status).toBe(401)
    expect(wrong.headers.get('www-authenticate')).toContain('error="invalid_token"')

    for (const [token, expected] of [
      ['key-1', 403],
      ['key-2', 200],
      [await hmac({ sub: 'bob', roles: ['consume'] }), 200],
      [await hmac({ sub: 'bob', roles: ['submit'] }), 403],
      [await hmac({ sub: 'bob', roles: ['consume'], exp: 1 }), 401],
      [await signed({ sub: 'eve', roles: ['consume'] }), 200],
      [await signed({ sub: 'eve' }), 403],
    ] as const) {
      expect(await status(server, '/consume', bearer(token))).toBe(expected)
    }
    const submitted = await fetch(`${server.origin}/items`, {
      method: 'POST',
      body: '{"name":"a"}',
      headers: { ...json, ...bearer('key-1'), 'x-user-id': 'op' },
    })
    expect(await submitted.json()).toMatchObject({ identity: 'ann' })
    expect(await status(server, '/health')).toBe(200)
    expect(await status(server, '/metrics')).toBe(200)
    expect(await status(server, '/nothing')).toBe(404)
  })

  it('accepts added keys, drops removed ones, and survives a broken file', async () => {
    let now = 0
    const faults: unknown[] = []
    await writeKeys({ [keyName('old')]: { identity: 'ann', roles: ['consume'] } })
    const authenticator = createAuthenticator({
      apiKeysFile: keyFile,
      now: () => now,
      onFault: (fault) => faults.push(fault),
    })
    const server = await started({ authenticator })
    expect(await status(server, '/consume', bearer('old'))).toBe(200)
    await writeKeys({ [keyName('new')]: { identity: 'ann', roles: ['consume', 'submit'] } })
    now += 2_000
    expect(await status(server, '/consume', bearer('old'))).toBe(401)
    expect(await status(server, '/consume', bearer('new'))).toBe(200)
    await writeFile(keyFile, '{')
    now += 2_000
    expect(await status(server, '/consume', bearer('new'))).toBe(200)
    expect(faults).toEqual([expect.objectContaining({ code: 'invalid_api_keys' })])
  })

  it('answers 503 when tokens cannot be verified because the key server is away', async () => {
    const faults: unknown[] = []
    const authenticator = createAuthenticator({
      jwksUrl: 'http://127.0.0.1:1/',
      onFault: (fault) => faults.push(fault),
    })
    const server = await started({ authenticator })
    const answer = await fetch(`${server.origin}/consume`, { headers: bearer(await signed({ sub: 'eve' })) })
    expect(answer.status).toBe(503)
    expect(answer.headers.get('retry-after')).toMatch(/^[56]$/)
    expect(faults).toHaveLength(1)
  })

  it('protects metrics when asked to, never health', async () => {
    await writeKeys({
      [keyName('m')]: { identity: 'prometheus', roles: ['metrics'] },
      [keyName('s')]: { identity: 'ann', roles: ['submit'] },
    })
    const authenticator = createAuthenticator({
      apiKeysFile: keyFile,
      onFault: (fault) => {
        throw fault
      },
    })
    const server = await started({ authenticator, protectMetrics: true })
    expect(await status(server, '/metrics')).toBe(401)
    expect(await status(server, '/_metrics', bearer('s'))).toBe(403)
    expect(await status(server, '/metrics', bearer('m'))).toBe(200)
    expect(await status(server, '/health')).toBe(200)
  })

  it('takes the address that a trusted proxy names', async () => {
    const authenticator = createAuthenticator({
      trustedProxies: ['127.0.0.0/8'],
      onFault: (fault) => {
        throw fault
      },
    })
    const server = await started({ authenticator })
    const answer = await fetch(`${server.origin}/items`, {
      method: 'POST',
      body: '{"name":"a"}',
      headers: { ...json, 'x-forwarded-for': '6.6.6.6, 198.51.100.7' },
    })
    expect(await answer.json()).toMatchObject({ identity: '198.51.100.7', clientAddress: '198.51.100.7' })
  })
})
