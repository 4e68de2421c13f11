/** Policies, their trial, and the registry of blocks: made, read, changed, removed, and every way to get them wrong. */
import { randomUUID } from 'node:crypto'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { instantForm } from '../petition-calls.js'
import {
  bearer,
  blocksPath,
  createdPolicy,
  deadLettersPath,
  decide,
  expectRefused,
  policiesPath,
  policy,
  routeTask,
  unhurried,
  writeKeys,
} from '../routing-input-calls.js'
import { type Answer, call, endAll, get, post, type ServerProcess, startServer, until } from '../server-process.js'

const provider = { provider_id: 'swift', expected_latency_ms: 20, expected_cost: 4 }

let database: TestDatabase
let dir: string
let server: ServerProcess
/** The same store, with keys. */
let guarded: ServerProcess

beforeAll(async () => {
  database = await freshDatabase()
  dir = await mkdtemp(join(tmpdir(), 'spillway-routing-policies-'))
  const file = join(dir, 'keys.json')
  await writeKeys(file, {
    ann: { identity: 'ann', roles: ['submit', 'consume'] },
    ops: { identity: 'ops', roles: ['operate'] },
  })
  const env = { ...unhurried, DATABASE_URL: database.url, GATEWAY_RATE_LIMIT_REGISTRY_LIMIT: '100000' }
  server = await startServer(env)
  guarded = await startServer({ ...env, SPILLWAY_API_KEYS: file })
})

afterAll(async () => {
  await endAll()
  await database.drop()
  await rm(dir, { recursive: true, force: true })
})

const put = (members: Record<string, unknown> = {}) => post(server, policiesPath, policy(members))
const remove = (path: string) => call(server, 'DELETE', path)

function expectInvalid(answer: Answer, path: string): void {
  expectRefused(answer, 400, 'schema_validation_failed', 'SCHEMA_VALIDATION_FAILED')
  expect(answer.body.errors.map((error) => error.path)).toContain(path)
}

describe('a policy', () => {
  it('is created with its defaults', async () => {
    const { status, body } = await put({ policy_id: 'fresh', providers: [provider] })
    expect(status).toBe(201)
    expect(body).toEqual({
      policy_id: 'fresh',
      strategy: 'weighted',
      providers: [{ ...provider, weight: 1, priority: 50, enabled: true }],
      score: { latency_weight: 0.5, cost_weight: 0.5 },
      version: 1,
      updated_at: expect.stringMatching(instantForm),
    })
  })

  it('is replaced by another of its name, with the next version', async () => {
    const policyId = await createdPolicy(server)
    const answer = await put({ policy_id: policyId, providers: [provider] })
    expect({ status: answer.status, version: answer.body.version }).toEqual({ status: 200, version: 2 })
  })

  it('is in force as soon as it is answered', async () => {
    const policyId = await createdPolicy(server, { providers: [{ ...provider, provider_id: 'only' }] })
    const { body } = await decide(server, routeTask({ policy_id: policyId }))
    expect(body.decision).toMatchObject({ provider_id: 'only' })
  })

  it('is in force on another instance a moment later', async () => {
    const policyId = await createdPolicy(server)
    const task = () => routeTask({ policy_id: policyId, tenant_id: 'ann' })
    await until('it is known there', async () => (await decide(guarded, task(), bearer('ops'))).status === 200)
  })

  it('of a tenant stands before one for all, and is read by both names', async () => {
    const tenant_id = `tenant-${randomUUID()}`
    const policyId = await createdPolicy(server, { providers: [{ ...provider, provider_id: 'for-all' }] })
    await put({ policy_id: policyId, tenant_id, providers: [{ ...provider, provider_id: 'for-one' }] })
    const own = await decide(server, routeTask({ policy_id: policyId, tenant_id }))
    expect(own.body.decision).toMatchObject({ provider_id: 'for-one' })
    const other = await decide(server, routeTask({ policy_id: policyId }))
    expect(other.body.decision).toMatchObject({ provider_id: 'for-all' })
    expect((await get(server, `${policiesPath}/${policyId}`)).body.tenant_id).toBeUndefined()
    expect((await get(server, `${policiesPath}/${policyId}?tenant_id=${tenant_id}`)).body.tenant_id).toBe(tenant_id)
  })

  it('that is removed is not found, neither to read nor to decide by', async () => {
    const policyId = await createdPolicy(server)
    expect((await remove(`${policiesPath}/${policyId}`)).status).toBe(204)
    expectRefused(await get(server, `${policiesPath}/${policyId}`), 404, 'policy_not_found', 'POLICY_NOT_FOUND')
    expectRefused(await remove(`${policiesPath}/${policyId}`), 404, 'policy_not_found', 'POLICY_NOT_FOUND')
    expect((await decide(server, routeTask({ policy_id: policyId }))).body.error).toMatchObject({
      code: 'POLICY_NOT_FOUND',
    })
  })

  it('may have any name', async () => {
    const policyId = `ä/b ?#:%${randomUUID()}`
    await createdPolicy(server, { policy_id: policyId })
    expect((await get(server, `${policiesPath}/${encodeURIComponent(policyId)}`)).body.policy_id).toBe(policyId)
  })

  it.each<[string, Record<string, unknown>, string]>([
    ['without providers', { providers: [] }, '/providers'],
    ['with a negative cost', { providers: [{ ...provider, expected_cost: -1 }] }, '/providers/0/expected_cost'],
    ['with a priority over 100', { providers: [{ ...provider, priority: 101 }] }, '/providers/0/priority'],
    ['with two providers of one id', { providers: [provider, provider] }, '/providers/1/provider_id'],
    ['with a fallback that is no provider', { fallback: ['nobody'] }, '/fallback/0'],
    ['with a fallback named twice', { fallback: ['swift', 'swift'] }, '/fallback/1'],
    ['in which nobody has a weight', { providers: [{ ...provider, weight: 0 }] }, '/providers'],
    ['with a star in the middle', { providers: [{ ...provider, task_types: ['a*b'] }] }, '/providers/0/task_types/0'],
    ['with another strategy', { strategy: 'random' }, '/strategy'],
    ['with an unknown sticky key', { sticky: { by: 'colour' } }, '/sticky/by'],
    ['with a blank tenant', { tenant_id: ' ' }, '/tenant_id'],
    ['with an unknown member', { owner: 'me' }, '/owner'],
    ['of more than 64 KiB', { providers: many() }, ''],
  ])('%s is refused, with the place', async (_, members, path) => {
    expectInvalid(await put(members), path)
  })

  it('that is no object is refused', async () => {
    const answer = await post(server, policiesPath, [policy()])
    expectRefused(answer, 400, 'schema_validation_failed', 'SCHEMA_VALIDATION_FAILED')
  })

  it('that is no JSON is refused', async () => {
    expectRefused(await post(server, policiesPath, '{'), 400, 'invalid_request', 'SCHEMA_VALIDATION_FAILED')
  })

  it('is listed once, page by page, by tenant', async () => {
    const tenant_id = `tenant-${randomUUID()}`
    const ids = ['a', 'b', 'c', 'd', 'e']
    for (const policy_id of ids) await put({ policy_id, tenant_id })
    const found: unknown[] = []
    for (let cursor = ''; ; ) {
      const { body } = await get(server, `${policiesPath}?tenant_id=${tenant_id}&limit=2${cursor}`)
      expect(body.items.length).toBeLessThanOrEqual(2)
      found.push(...body.items.map((item) => item.policy_id))
      if (body.next_cursor === null) break
      cursor = `&cursor=${encodeURIComponent(body.next_cursor)}`
    }
    expect(found).toEqual(ids)
  })
})

function many(): unknown[] {
  return Array.from({ length: 100 }, (_, n) => ({
    ...provider,
    provider_id: `p${n}`,
    task_types: Array.from({ length: 10 }, (_, m) => `${m}${'x'.repeat(90)}`),
  }))
}

describe('a trial', () => {
  const dryRun = (body: unknown) => post(server, `${policiesPath}/dry-run`, body)

  it('shows the decision and its reasons, and stores nothing', async () => {
    const given = policy({
      strategy: 'best_score',
      providers: [provider, { ...provider, provider_id: 'off', enabled: false }],
    })
    const task = { tenant_id: 'ann', task: { type: 'chat', payload: 1 }, request_id: randomUUID() }
    const { status, body } = await dryRun({ policy: given, tasks: [task] })
    expect(status).toBe(200)
    expect(body.results).toEqual([
      {
        request_id: task.request_id,
        policy_id: given.policy_id,
        policy_source: 'given',
        decision: expect.objectContaining({ provider_id: 'swift', reason: 'best_score' }),
        error: null,
        providers: [
          expect.objectContaining({ provider_id: 'swift', eligible: true, chosen: true, score: expect.any(Number) }),
          expect.objectContaining({ provider_id: 'off', eligible: false, excluded_by: ['disabled'], chosen: false }),
        ],
      },
    ])
    expect((await get(server, `${policiesPath}/${String(given.policy_id)}`)).status).toBe(404)
    expect((await get(server, `/api/v1/routes/decide/${task.request_id}`)).status).toBe(404)
  })

  it('says what decide then does', async () => {
    const policyId = await createdPolicy(server)
    const task = routeTask({ policy_id: policyId })
    const tried = (await dryRun({ tasks: [task] })).body.results as unknown as { decision: unknown }[]
    expect((await decide(server, task)).body.decision).toEqual(tried[0]?.decision)
  })

  it('reports a policy that does not exist', async () => {
    const { status, body } = await dryRun({ tasks: [routeTask({ policy_id: 'nowhere' })] })
    expect(status).toBe(200)
    expect(body.results).toMatchObject([{ decision: null, error: { code: 'POLICY_NOT_FOUND' }, providers: [] }])
  })

  it.each<[string, unknown]>([
    ['no tasks', { tasks: [] }],
    ['too many tasks', { tasks: Array.from({ length: 101 }, () => routeTask()) }],
    ['a task without a tenant', { tasks: [{ task: { type: 'chat' } }] }],
    ['a policy with a fallback that is none', { policy: policy({ fallback: ['nobody'] }), tasks: [routeTask()] }],
    ['an unknown member', { tasks: [routeTask()], verbose: true }],
    ['nothing', {}],
  ])('of %s is refused', async (_, body) => {
    const answer = await dryRun(body)
    expect({ status: answer.status, error: answer.body.error }, answer.text).toMatchObject({
      status: 400,
      error: { code: 'SCHEMA_VALIDATION_FAILED' },
    })
  })
})

describe('a block', () => {
  const named = () => ({ type: `type-${randomUUID()}`, version: '1.4.0' })
  const at = ({ type, version }: { type: string; version: string }) =>
    `${blocksPath}/${encodeURIComponent(type)}/${encodeURIComponent(version)}`
  const replace = (name: { type: string; version: string }, body: unknown) => call(server, 'PUT', at(name), { body })

  it('is registered, and read as it was', async () => {
    const block = { ...named(), capabilities: ['stream'], metadata: { team: 'a' }, input_schema: { type: 'object' } }
    const made = await post(server, blocksPath, block)
    expect(made.status).toBe(201)
    const instant = expect.stringMatching(instantForm)
    expect(made.body).toEqual({ ...block, status: 'active', created_at: instant, updated_at: instant })
    expect((await get(server, at(block))).body).toEqual(made.body)
  })

  it('that exists is not registered again', async () => {
    const block = named()
    await post(server, blocksPath, block)
    expectRefused(await post(server, blocksPath, block), 409, 'conflict')
  })

  it('is made by PUT, then replaced', async () => {
    const block = named()
    expect((await replace(block, {})).status).toBe(201)
    const second = await replace(block, { status: 'deprecated' })
    expect({ status: second.status, is: second.body.status }).toEqual({ status: 200, is: 'deprecated' })
  })

  it('is removed once', async () => {
    const block = named()
    await post(server, blocksPath, block)
    expect((await remove(at(block))).status).toBe(204)
    expectRefused(await remove(at(block)), 404, 'not_found')
    expectRefused(await get(server, at(block)), 404, 'not_found')
  })

  it.each<[string, Record<string, unknown>, string]>([
    ['whose body contradicts its path', { version: '2.0.0' }, '/version'],
    ['with a capability twice', { capabilities: ['a', 'a'] }, '/capabilities/1'],
    ['with another status', { status: 'gone' }, '/status'],
    ['with an unknown member', { owner: 1 }, '/owner'],
    ['with metadata over 64 KiB', { metadata: { x: 'x'.repeat(65_536) } }, '/metadata'],
  ])('%s is refused', async (_, members, path) => {
    expectInvalid(await replace(named(), members), path)
  })

  it.each(['latest', '1.2.3.4', ''])('of version %j is refused', async (version) => {
    expectInvalid(await post(server, blocksPath, { ...named(), version }), '/version')
  })

  it('is listed once, page by page, by type', async () => {
    const { type } = named()
    for (const version of ['1', '2', '3']) await post(server, blocksPath, { type, version })
    const first = (await get(server, `${blocksPath}?type=${type}&limit=2`)).body
    const rest = (await get(server, `${blocksPath}?type=${type}&limit=2&cursor=${first.next_cursor}`)).body
    expect([...first.items, ...rest.items].map(({ version }) => version)).toEqual(['1', '2', '3'])
    expect(rest.next_cursor).toBeNull()
  })

  it('returns the limit of changes, and counts one that fails', async () => {
    const before = await post(server, blocksPath, named())
    await post(server, blocksPath, { type: '' })
    const after = await post(server, blocksPath, named())
    const left = (answer: Answer) => Number(answer.headers.get('x-ratelimit-remaining'))
    expect(left(before) - left(after)).toBeGreaterThanOrEqual(1)
    expect(after.headers.get('ratelimit-policy')).toBe('"registry";q=100000;w=60')
  })
})

describe.each([policiesPath, blocksPath])('the list %s', (path) => {
  it.each(['cursor=x', 'cursor=WzFd', 'limit=0', 'limit=201', 'limit=two', 'sort=asc'])('refuses %s', async (query) => {
    expectRefused(await get(server, `${path}?${query}`), 400, 'invalid_request', 'SCHEMA_VALIDATION_FAILED')
  })
})

it.each([
  ['PATCH', policiesPath, 'POST'],
  ['PUT', `${policiesPath}/x`, 'DELETE'],
  ['GET', `${policiesPath}/dry-run/x`, null],
  ['PATCH', `${blocksPath}/a/1`, 'PUT'],
  ['DELETE', blocksPath, 'POST'],
])('%s %s is not allowed', async (method, path, allowed) => {
  const answer = await call(server, method, path)
  expect(answer.status).toBe(allowed === null ? 404 : 405)
  if (allowed !== null) expect(answer.headers.get('allow')).toContain(allowed)
})

describe('without a broker', () => {
  it('the dead letters of the router are elsewhere', async () => {
    expectRefused(await get(server, deadLettersPath), 404, 'not_found')
    expectRefused(await post(server, `${deadLettersPath}/redrive`, { ids: ['1'] }), 404, 'not_found')
  })
})

describe('with API keys', () => {
  const changes: readonly (readonly [string, string, unknown])[] = [
    ['POST', policiesPath, policy()],
    ['DELETE', `${policiesPath}/x`, undefined],
    ['GET', policiesPath, undefined],
    ['GET', `${policiesPath}/x`, undefined],
    ['POST', blocksPath, { type: 'a', version: '1' }],
    ['PUT', `${blocksPath}/a/1`, {}],
    ['DELETE', `${blocksPath}/a/1`, undefined],
    ['GET', deadLettersPath, undefined],
    ['POST', `${deadLettersPath}/redrive`, { ids: ['1'] }],
    ['DELETE', deadLettersPath, { ids: ['1'] }],
  ]

  it.each(changes)('%s %s is for operators', async (method, path, body) => {
    const refused = await call(guarded, method, path, { headers: bearer('ann'), ...(body !== undefined && { body }) })
    expectRefused(refused, 403, 'forbidden')
    const allowed = await call(guarded, method, path, { headers: bearer('ops'), ...(body !== undefined && { body }) })
    expect([200, 201, 204, 404]).toContain(allowed.status)
  })

  it.each([`${blocksPath}`, `${blocksPath}/a/9`])('GET %s is for everybody with a key', async (path) => {
    expect([200, 404]).toContain((await get(guarded, path, bearer('ann'))).status)
    expect((await get(guarded, path)).status).toBe(401)
  })
})
