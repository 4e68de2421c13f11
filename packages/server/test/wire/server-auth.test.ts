/** Who may do what, through the real server: keys, tokens, roles, queues, proxies. */
import { createHash, generateKeyPairSync } from 'node:crypto'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { exportJWK, SignJWT } from 'jose'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  call,
  endAll,
  get,
  post,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
} from '../server-process.js'

const secret = 'a-shared-secret-of-more-than-thirty-two-bytes'
const keys = { ann: 'key-of-ann-1', bob: 'key-of-bob-2', ops: 'key-of-ops-3', reader: 'key-of-reader-4' }
const bearer = (token: string) => ({ authorization: `Bearer ${token}` })
const { privateKey, publicKey } = generateKeyPairSync('rsa', { modulusLength: 2048 })

let database: TestDatabase
let server: ServerProcess
let target: Target
let jwks: Target
let dir: string

const token = (claims: Record<string, unknown>, expires: string | number = '5m') =>
  new SignJWT({ aud: 'spillway', ...claims })
    .setProtectedHeader({ alg: 'HS256' })
    .setExpirationTime(expires)
    .sign(new TextEncoder().encode(secret))
const signed = (claims: Record<string, unknown>) =>
  new SignJWT({ aud: 'spillway', ...claims })
    .setProtectedHeader({ alg: 'RS256', kid: 'one' })
    .setExpirationTime('5m')
    .sign(privateKey)

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget()
  const jwk = { ...(await exportJWK(publicKey)), kid: 'one', alg: 'RS256', use: 'sig' }
  jwks = await startTarget((_, response) => {
    response.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify({ keys: [jwk] }))
  })
  dir = await mkdtemp(join(tmpdir(), 'spillway-auth-'))
  const named = (key: string) => `sha256:${createHash('sha256').update(key).digest('hex')}`
  await writeFile(
    join(dir, 'keys.json'),
    JSON.stringify({
      [named(keys.ann)]: { identity: 'ann', roles: ['submit'], queues: ['orders*', 'exact'] },
      [named(keys.bob)]: { identity: 'bob', roles: ['submit', 'consume'] },
      [named(keys.ops)]: { identity: 'ops', roles: ['operate'] },
      [named(keys.reader)]: { identity: 'reader', roles: ['metrics'] },
    }),
  )
  server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_API_KEYS: join(dir, 'keys.json'),
    SPILLWAY_JWT_SECRET: secret,
    SPILLWAY_JWKS_URL: `${jwks.origin}/jwks`,
    SPILLWAY_JWT_AUDIENCE: 'spillway',
    SPILLWAY_PROTECT_METRICS: 'true',
    SPILLWAY_HOST: '0.0.0.0',
  })
  server = { ...server, origin: `http://127.0.0.1:${server.port}` }
})

afterAll(async () => {
  await endAll()
  await Promise.all([target.close(), jwks.close(), database.drop(), rm(dir, { recursive: true, force: true })])
})

const order = (headers: Record<string, string>, queue = 'orders') =>
  submit(server, `${target.origin}/a`, { queue }, headers)

describe('401', () => {
  it.each([
    ['nothing', async () => ({})],
    ['X-User-ID alone', async () => ({ 'x-user-id': 'ann' })],
    ['a wrong key', async () => bearer('nonsense')],
    ['the hash of a key', async () => bearer(createHash('sha256').update(keys.ann).digest('hex'))],
    ['another scheme', async () => ({ authorization: `Basic ${btoa(keys.ann)}` })],
    [
      'an expired token',
      async () => bearer(await token({ sub: 'x', roles: ['submit'] }, Math.floor(Date.now() / 1000) - 60)),
    ],
    [
      'a token of another secret',
      async () =>
        bearer(
          await new SignJWT({ sub: 'x', roles: ['submit'] })
            .setProtectedHeader({ alg: 'HS256' })
            .setExpirationTime('5m')
            .sign(new TextEncoder().encode('another secret of sufficient length!!')),
        ),
    ],
    ['a token without subject', async () => bearer(await token({ roles: ['submit'] }))],
    [
      'an unsigned token',
      async () =>
        bearer(
          `${Buffer.from('{"alg":"none"}').toString('base64url')}.${Buffer.from('{"sub":"ops","roles":["operate"]}').toString('base64url')}.`,
        ),
    ],
  ])('with %s', async (_, headers) => {
    const answer = await order(await headers())
    expect(answer.status).toBe(401)
    expect(answer.headers.get('www-authenticate')).toMatch(/^Bearer/)
    expect(answer.body.code).toBe('unauthenticated')
  })

  it('before anything is said about the body, and on every route but health', async () => {
    expect((await call(server, 'POST', '/api/v1/operations', { body: '{' })).status).toBe(401)
    for (const path of [
      '/api/v1/operations',
      '/api/v1/operations/stats',
      '/api/v1/dead-letters',
      '/metrics',
      '/_metrics',
    ]) {
      expect((await get(server, path)).status).toBe(401)
    }
    for (const path of ['/health', '/_health', '/health/live', '/health/ready']) {
      expect((await get(server, path)).status).toBe(200)
    }
  })
})

describe('identity and roles', () => {
  it('a key, a token of a shared secret and one of a key set are all taken', async () => {
    expect((await order(bearer(keys.ann))).status).toBe(201)
    expect((await order(bearer(await token({ sub: 'tom', roles: ['submit'] })))).status).toBe(201)
    expect((await order(bearer(await signed({ sub: 'kim', roles: ['submit'] })))).status).toBe(201)
  })

  it('the identity is the subject: X-User-ID changes nothing', async () => {
    const { body } = await order({ ...bearer(keys.ann), 'x-user-id': 'bob' })
    expect((await get(server, `/api/v1/operations/${body.operationId}`, bearer(keys.bob))).status).toBe(404)
    expect((await get(server, `/api/v1/operations/${body.operationId}`, bearer(keys.ann))).status).toBe(200)
    expect((await get(server, `/api/v1/operations/${body.operationId}`, bearer(keys.ops))).status).toBe(200)
    expect((await get(server, '/api/v1/operations?identity=ann', bearer(keys.ops))).body.items.length).toBeGreaterThan(
      0,
    )
  })

  it('403 without the role; operate does all', async () => {
    expect((await order(bearer(keys.reader))).status).toBe(403)
    expect((await order(bearer(await token({ sub: 'none' })))).status).toBe(403)
    expect((await order(bearer(keys.ops))).status).toBe(201)
    expect((await post(server, '/api/v1/lanes/pause', { queue: 'z' }, bearer(keys.bob))).status).toBe(403)
    expect((await post(server, '/api/v1/lanes/pause', { queue: 'z' }, bearer(keys.ops))).status).toBe(200)
    expect((await get(server, '/metrics', bearer(keys.ann))).status).toBe(403)
    expect((await get(server, '/metrics', bearer(keys.reader))).status).toBe(200)
  })

  it('queues are patterns', async () => {
    for (const queue of ['orders', 'orders-2', 'exact']) expect((await order(bearer(keys.ann), queue)).status).toBe(201)
    for (const queue of ['order', 'xorders', 'exactly', 'ORDERS']) {
      const answer = await order(bearer(keys.ann), queue)
      expect(answer.status).toBe(403)
      expect(answer.body.code).toBe('forbidden')
    }
    expect((await order(bearer(await token({ sub: 'q', roles: ['submit'], queues: ['a'] })), 'b')).status).toBe(403)
  })

  it("another one's work cannot be cancelled", async () => {
    await post(server, '/api/v1/lanes/pause', { queue: 'orders-p' }, bearer(keys.ops))
    const { body } = await order(bearer(keys.ann), 'orders-p')
    const cancel = (key: string) =>
      post(server, `/api/v1/operations/${body.operationId}/cancel`, undefined, bearer(key))
    expect((await cancel(keys.bob)).status).toBe(404)
    expect((await cancel(keys.ann)).status).toBe(200)
  })

  it('no key or secret is ever logged', async () => {
    await order(bearer(keys.ann))
    const written = server.stdout() + server.stderr()
    for (const text of [...Object.values(keys), secret]) expect(written).not.toContain(text)
  })
})

describe('off, on loopback', () => {
  it('counts X-Forwarded-For of trusted proxies only', async () => {
    const [trusting, plain] = await Promise.all(
      [{ SPILLWAY_TRUSTED_PROXIES: '127.0.0.0/8' }, {}].map((env) =>
        startServer({
          DATABASE_URL: database.url,
          SPILLWAY_FORWARD_ALLOW: target.origin,
          SPILLWAY_DB_SCHEMA: 'xff',
          ...env,
        }),
      ),
    )
    if (trusting === undefined || plain === undefined) throw new Error('both were started')
    const forwarded = { 'x-forwarded-for': '203.0.113.9, 127.0.0.2' }
    const behind = await submit(trusting, `${target.origin}/a`, { queue: 'xff' }, forwarded)
    const forged = await submit(plain, `${target.origin}/a`, { queue: 'xff' }, forwarded)
    const of = async (identity: string) =>
      (await get(plain, `/api/v1/operations?queue=xff&identity=${identity}`)).body.items.map((o) => o.id)
    expect(await of('203.0.113.9')).toEqual([behind.body.operationId])
    expect(await of('127.0.0.1')).toEqual([forged.body.operationId])
  })
})
