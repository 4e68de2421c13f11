/** Invalid tasks over HTTP: each answer says what is wrong, with the broker and without, and nothing is stored. */
import { randomUUID } from 'node:crypto'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { type NatsServer, startNats } from '../../../spillway/test/setup/nats.js'
import {
  bearer,
  createdPolicy,
  decide,
  decidePath,
  decisionForm,
  expectRefused,
  hand,
  messagesPath,
  routeTask,
  taskOfBytes,
  unhurried,
  without,
  writeKeys,
} from '../routing-input-calls.js'
import { call, endAll, post, type ServerProcess, startServer } from '../server-process.js'

const nested = (depth: number): unknown => JSON.parse(`${'['.repeat(depth)}${']'.repeat(depth)}`)
const withText = (text: string): string => JSON.stringify(routeTask()).replace('chat.completion', text)

const schema = [400, 'schema_validation_failed', 'SCHEMA_VALIDATION_FAILED'] as const
/** What is no JSON of ours is refused before anybody knows that it is a task. */
const form = [400, 'invalid_request', 'SCHEMA_VALIDATION_FAILED'] as const
const correlation = [400, 'correlation_fields_invalid', 'CORRELATION_FIELDS_INVALID'] as const
const version = [400, 'version_unsupported', 'VERSION_UNSUPPORTED'] as const

type Refusal = readonly [status: number, code: string, errorCode: string]

const wrong: readonly (readonly [name: string, refusal: Refusal, body: unknown])[] = [
  ['text that is no JSON', form, '{"version":'],
  ['a member named __proto__', form, `{"__proto__":{},${JSON.stringify(routeTask()).slice(1)}`],
  ['a number beyond double precision', form, withText('x').replace('"x"', '1e999')],
  ['a NUL character', form, withText('a\\u0000b')],
  ['a lone surrogate', form, withText('a\\ud800b')],
  ['nesting beyond 64', form, routeTask({ metadata: { deep: nested(70) } })],
  ['a list', schema, [routeTask()]],
  ['null', schema, 'null'],
  ['no version', schema, without(routeTask(), 'version')],
  ['no request_id', schema, without(routeTask(), 'request_id')],
  ['no tenant_id', schema, without(routeTask(), 'tenant_id')],
  ['no task', schema, without(routeTask(), 'task')],
  ['an unknown member', schema, routeTask({ tenant: 'x' })],
  ['a tenant that is no text', schema, routeTask({ tenant_id: 7 })],
  ['neither payload nor reference', schema, routeTask({ task: { type: 'chat' } })],
  ['both payload and reference', schema, routeTask({ task: { type: 'chat', payload: 1, payload_ref: 'x' } })],
  ['a task type without characters', schema, routeTask({ task: { type: '', payload: 1 } })],
  ['a latency of zero', schema, routeTask({ constraints: { max_latency_ms: 0 } })],
  ['a cost that is a text', schema, routeTask({ constraints: { max_cost: '1' } })],
  ['an idempotency key of 256 characters', schema, routeTask({ idempotency_key: 'k'.repeat(256) })],
  ['a policy id without characters', schema, routeTask({ policy_id: '' })],
  ['metadata that is a list', schema, routeTask({ metadata: [] })],
  ['version 2', version, routeTask({ version: '2' })],
  ['a version that is a number', version, routeTask({ version: 1 })],
  ['a request_id that is no UUID', correlation, routeTask({ request_id: 'r-1' })],
  ['a trace_id that is none', correlation, routeTask({ trace_id: 'zz' })],
  ['a blank tenant', correlation, routeTask({ tenant_id: '  ' })],
  ['a tenant of 256 code points', correlation, routeTask({ tenant_id: 'é'.repeat(256) })],
]

let database: TestDatabase
let nats: NatsServer
let dir: string

beforeAll(async () => {
  database = await freshDatabase()
  nats = await startNats()
  dir = await mkdtemp(join(tmpdir(), 'spillway-routing-input-'))
})

afterAll(async () => {
  await endAll()
  await nats.stop()
  await database.drop()
  await rm(dir, { recursive: true, force: true })
})

describe.each(['with a broker', 'without a broker'])('%s', (way) => {
  const bodyLimit = 4_096
  let server: ServerProcess

  beforeAll(async () => {
    server = await startServer({
      ...unhurried,
      DATABASE_URL: database.url,
      SPILLWAY_BODY_LIMIT_BYTES: String(bodyLimit),
      ...(way === 'with a broker' && { NATS_URL: nats.url }),
    })
  })

  describe.each([decidePath, messagesPath])('POST %s', (path) => {
    it.each(wrong)('refuses %s', async (_, [status, code, errorCode], body) => {
      expectRefused(await post(server, path, body), status, code, errorCode)
    })

    it('refuses a request without a body', async () => {
      expectRefused(await post(server, path), 400, 'payload_too_small', 'PAYLOAD_TOO_SMALL')
    })

    it('refuses an empty body that calls itself JSON', async () => {
      const headers = { 'content-type': 'application/json' }
      expectRefused(await call(server, 'POST', path, { headers }), 400, 'payload_too_small', 'PAYLOAD_TOO_SMALL')
    })

    it('refuses a body over the limit', async () => {
      expectRefused(await post(server, path, taskOfBytes(bodyLimit + 1)), 413, 'body_too_large', 'PAYLOAD_TOO_LARGE')
    })

    it('takes a body at the limit', async () => {
      expect((await post(server, path, taskOfBytes(bodyLimit))).status).toBeLessThan(300)
    })

    it('refuses another media type', async () => {
      const headers = { 'content-type': 'text/plain' }
      expectRefused(await call(server, 'POST', path, { headers, body: 'x' }), 415, 'unsupported_media_type')
    })

    it('names the member that is wrong', async () => {
      const { body } = await post(server, path, routeTask({ constraints: { max_cost: '1' } }))
      expect(body.errors).toEqual([expect.objectContaining({ path: '/constraints/max_cost' })])
    })

    it('refuses an Idempotency-Key of 256 characters', async () => {
      const answer = await post(server, path, routeTask(), { 'idempotency-key': 'k'.repeat(256) })
      expectRefused(answer, 400, 'invalid_request', 'SCHEMA_VALIDATION_FAILED')
    })

    it('answers another method with 405 and Allow', async () => {
      const answer = await call(server, 'PATCH', path, { body: routeTask() })
      expect(answer.status).toBe(405)
      expect(answer.headers.get('allow')).toContain('POST')
    })
  })

  it('answers a policy that is not there with 404', async () => {
    expectRefused(
      await decide(server, routeTask({ policy_id: 'nowhere' })),
      404,
      'policy_not_found',
      'POLICY_NOT_FOUND',
    )
  })

  it('answers constraints that no provider keeps with 422', async () => {
    const policyId = await createdPolicy(server)
    const answer = await decide(server, routeTask({ policy_id: policyId, constraints: { max_latency_ms: 1 } }))
    expectRefused(answer, 422, 'no_provider', 'NO_PROVIDER')
  })

  it('returns request and trace of a task that cannot be decided', async () => {
    const task = routeTask({ policy_id: 'nowhere', trace_id: 'ab'.repeat(16) })
    const { body } = await decide(server, task)
    expect(body.context).toEqual({ request_id: task.request_id, trace_id: 'ab'.repeat(16) })
  })

  it('does not count invalid requests for the rate', async () => {
    const tenant_id = routeTask().tenant_id
    for (const spoilt of [{ version: '2' }, { request_id: 'r' }, { task: {} }, { policy: 1 }]) {
      expect((await decide(server, routeTask({ tenant_id, ...spoilt }))).status).toBe(400)
    }
    expect((await decide(server, taskOfBytes(bodyLimit + 1, { tenant_id }))).status).toBe(413)
    const answer = await decide(server, routeTask({ tenant_id }))
    expect(answer.headers.get('x-ratelimit-remaining')).toBe('49')
  })

  it('takes tenants of 255 code points, whatever they are', async () => {
    const answer = await decide(server, routeTask({ tenant_id: '\u{1f6b0}'.repeat(255) }))
    expect(answer.body.decision).toMatchObject(decisionForm)
  })

  it('takes a request id in capitals', async () => {
    const task = routeTask({ request_id: String(routeTask().request_id).toUpperCase() })
    expect((await decide(server, task)).body.context).toMatchObject({ request_id: task.request_id })
  })
})

describe('where the broker takes less than the body limit', () => {
  const payloadMax = 131_072
  const bytesMax = payloadMax - 65_536
  let small: NatsServer
  let server: ServerProcess

  beforeAll(async () => {
    small = await startNats({ settings: [`max_payload: ${payloadMax}`] })
    server = await startServer({ ...unhurried, DATABASE_URL: database.url, NATS_URL: small.url })
  })

  afterAll(async () => {
    await server.kill()
    await small.stop()
  })

  describe.each([
    ['decide', decide],
    ['messages', hand],
  ])('%s', (_, send) => {
    it('accepts one that is 64 KiB smaller', async () => {
      expect((await send(server, taskOfBytes(bytesMax))).status).toBeLessThan(300)
    })

    it('refuses one byte more', async () => {
      expectRefused(await send(server, taskOfBytes(bytesMax + 1)), 413, 'payload_too_large', 'PAYLOAD_TOO_LARGE')
    })
  })

  it('continues afterwards: the broker has not dropped the connection', async () => {
    await decide(server, taskOfBytes(200_000))
    expect((await decide(server, routeTask())).status).toBe(200)
  })
})

describe.each(['with a broker', 'without a broker'])('with API keys, %s', (way) => {
  const odd = 'zoë\u2028:\n\u{1f6b0} x'
  let server: ServerProcess

  beforeAll(async () => {
    const file = join(dir, `keys-${way.length}.json`)
    await writeKeys(file, {
      ann: { identity: 'ann', roles: ['submit'] },
      odd: { identity: odd, roles: ['submit'] },
      eve: { identity: 'eve', roles: ['consume'] },
      ops: { identity: 'ops', roles: ['operate'] },
    })
    server = await startServer({
      ...unhurried,
      DATABASE_URL: database.url,
      SPILLWAY_API_KEYS: file,
      ...(way === 'with a broker' && { NATS_URL: nats.url }),
    })
  })

  describe.each([
    ['decide', decide],
    ['messages', hand],
  ])('%s', (_, send) => {
    it('refuses the tenant of somebody else', async () => {
      const answer = await send(server, routeTask({ tenant_id: 'bob' }), bearer('ann'))
      expectRefused(answer, 403, 'tenant_forbidden', 'TENANT_FORBIDDEN')
    })

    it('counts nothing against the tenant of somebody else', async () => {
      const tenant_id = routeTask().tenant_id
      await send(server, routeTask({ tenant_id }), bearer('ann'))
      const { headers } = await send(server, routeTask({ tenant_id }), bearer('ops'))
      const limit = Number(headers.get('x-ratelimit-limit'))
      expect(headers.get('x-ratelimit-remaining')).toBe(String(limit - 1))
    })

    it('takes an identity of any characters, with an Idempotency-Key', async () => {
      const headers = { ...bearer('odd'), 'idempotency-key': randomUUID() }
      expect((await send(server, routeTask({ tenant_id: odd }), headers)).status).toBeLessThan(300)
    })

    it('takes the own tenant', async () => {
      expect((await send(server, routeTask({ tenant_id: 'ann' }), bearer('ann'))).status).toBeLessThan(300)
    })

    it('lets operators act for any tenant', async () => {
      expect((await send(server, routeTask({ tenant_id: 'bob' }), bearer('ops'))).status).toBeLessThan(300)
    })

    it('refuses callers without a key', async () => {
      const answer = await send(server, routeTask())
      expectRefused(answer, 401, 'unauthenticated')
      expect(answer.headers.get('www-authenticate')).toMatch(/^Bearer/)
    })

    it('refuses callers without the role submit', async () => {
      expectRefused(await send(server, routeTask({ tenant_id: 'eve' }), bearer('eve')), 403, 'forbidden')
    })
  })
})
