/** Deciding and handing over, as callers see it: answers, keys, tickets, limits, and metrics. */
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
  routeTask,
  unhurried,
  writeKeys,
} from '../routing-input-calls.js'
import { type Answer, endAll, finishes, get, type ServerProcess, startServer, until } from '../server-process.js'

let nats: NatsServer
let dir: string
const databases: TestDatabase[] = []

/** Both ways have the same answers; each has a database of its own, or one would work on what the other took in. */
const ways = ['with a broker', 'without a broker'] as const

async function startWay(way: (typeof ways)[number], env: Record<string, string> = {}): Promise<ServerProcess> {
  const database = await freshDatabase()
  databases.push(database)
  return startServer({
    ...unhurried,
    DATABASE_URL: database.url,
    ...(way === 'with a broker' && { NATS_URL: nats.url }),
    ...env,
  })
}

beforeAll(async () => {
  nats = await startNats()
  dir = await mkdtemp(join(tmpdir(), 'spillway-routing-routes-'))
})

afterAll(async () => {
  await endAll()
  await nats.stop()
  await Promise.all(databases.map((database) => database.drop()))
  await rm(dir, { recursive: true, force: true })
})

describe.each(ways)('%s', (way) => {
  let server: ServerProcess
  let halves: string

  beforeAll(async () => {
    server = await startWay(way)
    halves = await createdPolicy(server)
  })

  afterAll(() => server.kill())

  describe('decide', () => {
    it('answers with the decision and its context', async () => {
      const task = routeTask({ policy_id: halves, trace_id: 'ab'.repeat(16) })
      const { status, body } = await decide(server, task)
      expect(status).toBe(200)
      const context = { request_id: task.request_id, trace_id: 'ab'.repeat(16) }
      expect(body).toEqual({ ok: true, decision: decisionForm, context })
    })

    it('returns the trace of the request if the task has none', async () => {
      const traceparent = `00-${'cd'.repeat(16)}-${'12'.repeat(8)}-01`
      const { body, headers } = await decide(server, routeTask(), { traceparent })
      expect(body.context).toMatchObject({ trace_id: 'cd'.repeat(16) })
      expect(headers.get('x-request-id')).toBe('cd'.repeat(16))
    })

    it('decides the same request alike', async () => {
      const task = routeTask({ policy_id: halves })
      const [first, second] = [await decide(server, task), await decide(server, task)]
      expect(second.body.decision).toEqual(first.body.decision)
    })

    it('returns the limit and the remaining count', async () => {
      const { headers } = await decide(server, routeTask())
      expect(headers.get('x-ratelimit-limit')).toBe('50')
      expect(headers.get('x-ratelimit-remaining')).toBe('49')
      expect(headers.get('ratelimit-policy')).toBe('"routes_decide";q=50;w=60')
      expect(headers.get('ratelimit')).toMatch(/^"routes_decide";r=49;t=\d+$/)
      expect(Number(headers.get('x-ratelimit-reset')) * 1_000).toBeGreaterThan(Date.now())
    })

    it('counts each tenant for itself', async () => {
      await decide(server, routeTask({ tenant_id: `a-${way}` }))
      const { headers } = await decide(server, routeTask({ tenant_id: `b-${way}` }))
      expect(headers.get('x-ratelimit-remaining')).toBe('49')
    })

    it.each(['in the body', 'in the header'])('gives the stored answer again for a key %s', async (where) => {
      const own = where === 'in the body' ? { idempotency_key: randomUUID() } : {}
      const headers: Record<string, string> = where === 'in the body' ? {} : { 'idempotency-key': randomUUID() }
      const task = routeTask({ policy_id: halves, ...own })
      const first = await decide(server, task, headers)
      const second = await decide(server, task, headers)
      expect(first.headers.get('idempotent-replayed')).toBeNull()
      expect(second.headers.get('idempotent-replayed')).toBe('true')
      expect(second.body.decision).toEqual(first.body.decision)
    })

    it.each(['in the body', 'in the header'])('refuses another task under a key %s', async (where) => {
      const own = where === 'in the body' ? { idempotency_key: randomUUID() } : {}
      const headers: Record<string, string> = where === 'in the body' ? {} : { 'idempotency-key': randomUUID() }
      const task = routeTask(own)
      expect((await decide(server, task, headers)).status).toBe(200)
      const answer = await decide(server, { ...task, task: { type: 'image', payload: 1 } }, headers)
      expect({ status: answer.status, error: answer.body.error }, answer.text).toEqual({
        status: 422,
        error: { code: 'IDEMPOTENCY_VIOLATION', message: expect.stringMatching(/./) },
      })
    })

    it('a key is of its tenant: another may use the same', async () => {
      const key = { idempotency_key: 'shared' }
      await decide(server, routeTask({ ...key, task: { type: 'a', payload: 1 } }))
      const answer = await decide(server, routeTask({ ...key, task: { type: 'b', payload: 1 } }))
      expect(answer.status).toBe(200)
      expect(answer.headers.get('idempotent-replayed')).toBeNull()
    })

    it('a key belongs to its caller: for another tenant the same key is another key', async () => {
      const headers = { 'idempotency-key': randomUUID() }
      expect((await decide(server, routeTask(), headers)).status).toBe(200)
      const answer = await decide(server, routeTask(), headers)
      expect({ status: answer.status, error: answer.body.error }, answer.text).toMatchObject({
        ...{ status: 422, error: { code: 'IDEMPOTENCY_VIOLATION' } },
      })
    })

    it('gives several at once with one request id the same answer', async () => {
      const task = routeTask({ policy_id: halves })
      const all = await Promise.all(Array.from({ length: 8 }, () => decide(server, task)))
      expect(all.map(({ status }) => status)).toEqual(Array(8).fill(200))
      expect(new Set(all.map(({ body }) => JSON.stringify(body.decision))).size).toBe(1)
    })

    it('gives 20 at once with one key one decision', async () => {
      // Each by itself would be decided by its request id, half of them otherwise.
      const task = { ...routeTask({ policy_id: halves }), idempotency_key: randomUUID() }
      const all = await Promise.all(
        Array.from({ length: 20 }, () => decide(server, { ...task, request_id: randomUUID() })),
      )
      expect(all.map(({ status }) => status)).toEqual(Array(20).fill(200))
      expect(new Set(all.map(({ body }) => JSON.stringify(body.decision))).size).toBe(1)
      expect(all.filter(({ headers }) => headers.get('idempotent-replayed') === null)).toHaveLength(1)
    })

    it("refuses requests over the tenant's limit, with the time to wait", async () => {
      const tenant_id = `full-${randomUUID()}`
      const all = await Promise.all(Array.from({ length: 55 }, () => decide(server, routeTask({ tenant_id }))))
      const refused = all.filter(({ status }) => status !== 200)
      expect(refused).toHaveLength(5)
      for (const answer of refused) {
        expectRefused(answer, 429, 'rate_limited')
        expect(answer.headers.get('x-ratelimit-remaining')).toBe('0')
      }
    })
  })

  describe('GET decide/:messageId', () => {
    it('returns a decision right after it was made', async () => {
      const statuses: number[] = []
      for (let i = 0; i < 10; i++) {
        const task = routeTask()
        expect((await decide(server, task)).status).toBe(200)
        statuses.push((await get(server, `${decidePath}/${String(task.request_id)}`)).status)
      }
      expect(statuses).toEqual(Array(10).fill(200))
    })

    it('returns the decision of a request', async () => {
      const task = routeTask({ policy_id: halves })
      const { body } = await decide(server, task)
      const found = await until('it is kept', async () => {
        const answer = await get(server, `${decidePath}/${String(task.request_id)}`)
        return answer.status === 200 && answer.body
      })
      expect(found).toEqual(body)
    })

    it('finds it however the id is written', async () => {
      const task = routeTask()
      await decide(server, task)
      const path = `${decidePath}/${String(task.request_id).toUpperCase()}`
      await until('it is kept', async () => (await get(server, path)).status === 200)
    })

    it('returns the operation of a message', async () => {
      const { body } = await hand(server, routeTask())
      await finishes(server, body.operationId)
      const found = await get(server, `${decidePath}/${body.operationId}`)
      expect(found.body).toMatchObject({ id: body.operationId, status: 'completed', result: { ok: true } })
    })

    it.each([randomUUID(), 'x', '%20'])('answers %s with 404', async (id) => {
      expectRefused(await get(server, `${decidePath}/${id}`), 404, 'not_found')
    })
  })

  describe('messages', () => {
    it('are answered with a ticket whose result is the decision', async () => {
      const task = routeTask({ policy_id: halves })
      const { status, body, headers } = await hand(server, task)
      expect(status).toBe(202)
      expect(headers.get('location')).toBe(`/api/v1/operations/${body.operationId}`)
      expect(body).toMatchObject({ status: 'queued', reason: 'requested' })
      const ticket = await finishes(server, body.operationId)
      expect(ticket).toMatchObject({ status: 'completed', operation_type: 'routing.message' })
      expect(ticket.result).toMatchObject({
        ...{ ok: true, decision: decisionForm, context: { request_id: task.request_id } },
      })
    })

    it('that no provider takes fail, and are dead-lettered', async () => {
      const { body } = await hand(server, routeTask({ policy_id: halves, constraints: { max_cost: 0.1 } }))
      const ticket = await finishes(server, body.operationId)
      expect(ticket).toMatchObject({
        status: 'failed',
        attempt: 1,
        error_message: expect.stringMatching(/^NO_PROVIDER/),
      })
      const letters = (await get(server, '/api/v1/dead-letters')).body.items
      expect(letters.map(({ id }) => id)).toContain(body.operationId)
    })

    it('of an unknown policy fail', async () => {
      const { body } = await hand(server, routeTask({ policy_id: 'nowhere' }))
      const ticket = await finishes(server, body.operationId)
      expect(ticket).toMatchObject({ status: 'failed', error_message: expect.stringMatching(/^POLICY_NOT_FOUND/) })
    })

    it('with one Idempotency-Key are one', async () => {
      const task = routeTask()
      const headers = { 'idempotency-key': randomUUID() }
      const [first, second] = [await hand(server, task, headers), await hand(server, task, headers)]
      expect(second.body.operationId).toBe(first.body.operationId)
      expect(second.headers.get('idempotent-replayed')).toBe('true')
      const other = await hand(server, { ...task, task: { type: 'image', payload: 1 } }, headers)
      expectRefused(other, 422, 'idempotency_mismatch', 'IDEMPOTENCY_VIOLATION')
    })

    it('with one key in the body are one, for the same task', async () => {
      const task = routeTask({ idempotency_key: randomUUID() })
      const [first, second] = [await hand(server, task), await hand(server, { ...task, request_id: randomUUID() })]
      expect(second.status).toBe(202)
      expect(second.body.operationId).toBe(first.body.operationId)
      expect(second.headers.get('idempotent-replayed')).toBe('true')
      const other = await hand(server, { ...task, task: { type: 'image', payload: 1 } })
      expectRefused(other, 422, 'idempotency_mismatch', 'IDEMPOTENCY_VIOLATION')
    })

    it('are waited for with Prefer: wait', async () => {
      const { status, body, headers } = await hand(server, routeTask(), { prefer: 'wait=20' })
      expect(status).toBe(201)
      expect(headers.get('preference-applied')).toBe('wait=20')
      expect(body).toMatchObject({ status: 'executed', result: { ok: true, decision: decisionForm } })
      const undecided = await hand(server, routeTask({ policy_id: 'nowhere' }), { prefer: 'wait=20' })
      expect(undecided.body).toMatchObject({
        ...{ status: 'failed', error_message: expect.stringMatching(/^POLICY_NOT_FOUND/) },
      })
    })

    it('have a limit of their own', async () => {
      const { headers } = await hand(server, routeTask())
      expect(headers.get('ratelimit-policy')).toBe('"messages";q=100;w=60')
    })
  })
})

describe.each(ways)('with API keys, %s', (way) => {
  let server: ServerProcess

  beforeAll(async () => {
    const file = join(dir, `keys-${way.length}.json`)
    await writeKeys(file, {
      ann: { identity: 'ann', roles: ['submit', 'consume'] },
      bob: { identity: 'bob', roles: ['submit', 'consume'] },
      ops: { identity: 'ops', roles: ['operate'] },
    })
    server = await startWay(way, { SPILLWAY_API_KEYS: file })
  })

  afterAll(() => server.kill())

  const read = (id: unknown, who: string) => get(server, `${decidePath}/${String(id)}`, bearer(who))

  it('a decision is for its tenant and for operators', async () => {
    const task = routeTask({ tenant_id: 'ann' })
    await decide(server, task, bearer('ann'))
    await until('it is kept', async () => (await read(task.request_id, 'ann')).status === 200)
    expect((await read(task.request_id, 'ops')).status).toBe(200)
    expectRefused(await read(task.request_id, 'bob'), 404, 'not_found')
  })

  it('an operation is for its owner and for operators', async () => {
    const { body } = await hand(server, routeTask({ tenant_id: 'ann' }), bearer('ann'))
    expect((await read(body.operationId, 'ann')).body.id).toBe(body.operationId)
    expect((await read(body.operationId, 'ops')).body.id).toBe(body.operationId)
    expectRefused(await read(body.operationId, 'bob'), 404, 'not_found')
  })

  it('two tenants may use one request id, and read their own', async () => {
    const request_id = randomUUID()
    for (const who of ['ann', 'bob']) {
      await decide(
        server,
        routeTask({ request_id, tenant_id: who, trace_id: (who === 'ann' ? 'a' : 'b').repeat(32) }),
        bearer(who),
      )
    }
    for (const who of ['ann', 'bob']) {
      const found = await until('it is kept', async () => {
        const answer = await read(request_id, who)
        return answer.status === 200 && answer.body
      })
      expect(found.context).toMatchObject({ trace_id: (who === 'ann' ? 'a' : 'b').repeat(32) })
    }
  })
})

describe.each(ways)('two gateways on one store, %s', (way) => {
  it('let exactly the limit through', async () => {
    const database = await freshDatabase()
    databases.push(database)
    const env = {
      ...unhurried,
      DATABASE_URL: database.url,
      GATEWAY_RATE_LIMIT_ROUTES_DECIDE_LIMIT: '10',
      ...(way === 'with a broker' && { NATS_URL: nats.url }),
    }
    const pair = await Promise.all([startServer(env), startServer(env)])
    const tenant_id = 'both'
    const all = await Promise.all(
      Array.from({ length: 40 }, (_, n) => decide(pair[n % 2] as ServerProcess, routeTask({ tenant_id }))),
    )
    // Without a broker one that has to wait for a worker is answered 202: let through, too.
    const isLetThrough = ({ status }: Answer) => status === 200 || (status === 202 && way === 'without a broker')
    const others = all.filter((answer) => !isLetThrough(answer) && answer.status !== 429)
    expect(others.map(({ status, text }) => `${status} ${text}`)).toEqual([])
    expect(all.filter(isLetThrough)).toHaveLength(10)
    expect(all.filter(({ status }) => status === 429)).toHaveLength(30)
    await Promise.all(pair.map((server) => server.kill()))
  }, 60_000)
})
