/** Who may do what: the roles on every route that there is, and keys that are bound to queues. */
import { createHash, randomUUID } from 'node:crypto'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { call, endAll, type ServerProcess, startServer, startTarget, type Target } from '../server-process.js'

const principals = {
  submits: { identity: 'ann', roles: ['submit'] },
  consumes: { identity: 'bob', roles: ['consume'] },
  views: { identity: 'vic', roles: ['view'] },
  operates: { identity: 'ops', roles: ['operate'] },
  scrapes: { identity: 'pro', roles: ['metrics'] },
  boundSubmits: { identity: 'ann', roles: ['submit', 'consume'], queues: ['orders*'] },
  boundViews: { identity: 'ben', roles: ['view'], queues: ['orders*'] },
  boundOperates: { identity: 'ben', roles: ['operate'], queues: ['orders*'] },
} as const
type Who = keyof typeof principals

let database: TestDatabase
let target: Target
let server: ServerProcess
let dir: string

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget((received, response) => {
    response.writeHead(received.path === '/no' ? 400 : 200, { 'content-type': 'application/json' }).end('{}')
  })
  dir = await mkdtemp(join(tmpdir(), 'spillway-access-'))
  const file = join(dir, 'keys.json')
  const named = (who: string) => `sha256:${createHash('sha256').update(`key-${who}`).digest('hex')}`
  await writeFile(file, JSON.stringify(Object.fromEntries(Object.entries(principals).map(([w, p]) => [named(w), p]))))
  server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_API_KEYS: file,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_ENCRYPTION_KEY: '00'.repeat(32),
    SPILLWAY_PROTECT_METRICS: 'true',
  })
})
afterAll(async () => {
  await endAll()
  await Promise.all([target.close(), database.drop(), rm(dir, { recursive: true, force: true })])
})

const ask = (who: Who, method: string, path: string, body?: unknown) =>
  call(server, method, path, {
    headers: { authorization: `Bearer key-${who}` },
    ...(body !== undefined && { body }),
  })
const get = (who: Who, path: string) => ask(who, 'GET', path)
const submit = async (who: Who, queue: string, path = '/yes') => {
  const body = { type: 'http.request', queue, payload: { url: `${target.origin}${path}` } }
  return String((await ask(who, 'POST', '/api/v1/operations', body)).body.operationId)
}

interface Route {
  method: string
  path: string
}

/** Every route of the description, with something in place of its parameters. */
async function routes(): Promise<Route[]> {
  const { paths } = (await get('operates', '/openapi.json')).body
  return Object.entries(paths).flatMap(([path, methods]) =>
    Object.keys(methods).map((method) => ({
      method: method.toUpperCase(),
      path: path.replace(/\{[^}]+\}/g, () => randomUUID()),
    })),
  )
}

/** Read by POST. */
const readingPosts = new Set(['/api/v1/policies/dry-run'])
const isPublic = ({ path }: Route) => /^\/(?:_?health|console|openapi|docs|demo|$)/.test(path)
const isMetrics = ({ path }: Route) => /^\/_?metrics$/.test(path)

describe('the role view', () => {
  it('changes nothing, on any route', async () => {
    const changing = (await routes()).filter((r) => r.method !== 'GET' && !isPublic(r) && !readingPosts.has(r.path))
    expect(changing.length).toBeGreaterThan(30)
    for (const { method, path } of changing) {
      expect((await ask('views', method, path, {})).status, `${method} ${path}`).toBe(403)
    }
  })

  it('reads what operate reads', async () => {
    const reading = (await routes()).filter((r) => r.method === 'GET' && !/\/pop(?:\/|$)/.test(r.path))
    expect(reading.length).toBeGreaterThan(25)
    for (const { method, path } of reading) {
      const [seen, wanted] = [await ask('views', method, path), await ask('operates', method, path)]
      expect([seen.status, path]).toEqual([wanted.status, path])
    }
    expect((await get('views', '/api/v1/pop/queue/orders')).status).toBe(403)
    const id = await submit('submits', 'viewed')
    expect((await get('views', `/api/v1/operations/${id}`)).status).toBe(200)
    expect((await get('views', '/api/v1/operations?identity=ann&queue=viewed')).body.items).toHaveLength(1)
    expect((await get('consumes', '/api/v1/operations?identity=ann&queue=viewed')).body.items).toHaveLength(0)
  })

  it('does not cancel another identity’s operation, even together with submit', async () => {
    await ask('operates', 'POST', '/api/v1/lanes/pause', { queue: 'kept' })
    const id = await submit('operates', 'kept')
    expect((await ask('views', 'POST', `/api/v1/operations/${id}/cancel`)).status).toBe(403)
    expect((await ask('submits', 'POST', `/api/v1/operations/${id}/cancel`)).status).toBe(404)
    expect((await ask('operates', 'POST', `/api/v1/operations/${id}/cancel`)).status).toBe(200)
  })
})

describe('configure', () => {
  const configure = (who: Who, queue: string, options?: object) =>
    ask(who, 'POST', '/api/v1/configure', { queue, ...(options && { options }) })
  const optionsOf = async (queue: string) =>
    (await configure('operates', queue)).body.options as Record<string, unknown>

  it('of an existing queue needs operate', async () => {
    const options = { encryptionEnabled: true, retentionSeconds: 3_600, retentionEnabled: true }
    expect((await configure('operates', 'sealed', options)).status).toBe(201)
    for (const who of ['submits', 'consumes', 'boundSubmits', 'views', 'scrapes'] as const) {
      for (const change of [{ encryptionEnabled: false }, { retentionSeconds: 1 }, { leaseTime: 1 }]) {
        const answer = await configure(who, 'sealed', change)
        expect([answer.status, answer.body.code]).toEqual([403, 'forbidden'])
      }
    }
    expect(await optionsOf('sealed')).toMatchObject(options)
    expect((await configure('operates', 'sealed', { retentionSeconds: 7_200 })).status).toBe(201)
    await ask('submits', 'POST', '/api/v1/push', { items: [{ queue: 'by-push', payload: 1 }] })
    expect((await configure('submits', 'by-push', { retentionSeconds: 1, retentionEnabled: true })).status).toBe(403)
    expect((await configure('submits', 'by-push', { namespace: 'x' })).status).toBe(201)
    expect((await ask('submits', 'POST', '/api/v1/configure', { queue: 'by-push', namespace: 'x' })).status).toBe(403)
  })

  it('creates a queue for submit or consume, and may be repeated unchanged', async () => {
    for (const who of ['submits', 'consumes'] as const) {
      const queue = `new-${who}`
      expect((await configure(who, queue, { leaseTime: 60 })).status).toBe(201)
      const again = await configure(who, queue, { leaseTime: 60, retryLimit: 3 })
      expect(again.status).toBe(201)
      expect(again.body).toMatchObject({ configured: true, queue, options: { leaseTime: 60 } })
      expect((await configure(who, queue, { leaseTime: 61 })).status).toBe(403)
    }
    expect((await configure('boundSubmits', 'orders-new')).status).toBe(201)
    expect((await configure('boundSubmits', 'payroll')).status).toBe(403)
    expect((await configure('boundOperates', 'payroll')).status).toBe(403)
  })

  it('of one queue by many at once makes it once', async () => {
    const answers = await Promise.all(
      Array.from({ length: 20 }, (_, n) => configure('submits', 'raced', { leaseTime: 100 + n })),
    )
    const made = answers.filter(({ status }) => status === 201)
    expect(made).toHaveLength(1)
    expect(answers.filter(({ status }) => status === 403)).toHaveLength(19)
    expect(made[0]?.body.options).toEqual(await optionsOf('raced'))
  })
})

describe('policies', () => {
  it('dry-run needs the same role as GET', async () => {
    const provider = { provider_id: 'secret-provider', weight: 1, expected_latency_ms: 1, expected_cost: 1 }
    const policy = { policy_id: 'p', tenant_id: 'ann', providers: [provider] }
    expect((await ask('operates', 'POST', '/api/v1/policies', policy)).status).toBe(201)
    const task = { version: '1', tenant_id: 'ann', task: { type: 't', payload: {} }, policy_id: 'p' }
    for (const who of Object.keys(principals) as Who[]) {
      const isSeen = (await get(who, '/api/v1/policies')).status === 200
      const dry = await ask(who, 'POST', '/api/v1/policies/dry-run', { tasks: [task] })
      expect([who, dry.status]).toEqual([who, isSeen ? 200 : 403])
      expect(dry.text.includes('secret-provider')).toBe(isSeen)
    }
  })
})

describe('a key that is bound to queues', () => {
  const bound = ['boundOperates', 'boundViews'] as const
  const queuesIn = (items: Record<string, unknown>[]) => [...new Set(items.map(({ queue }) => String(queue)))].sort()
  let mine: string
  let others: string
  let mineDead: string
  let othersDead: string
  beforeAll(async () => {
    ;[mine = '', others = '', mineDead = '', othersDead = ''] = await Promise.all([
      submit('operates', 'orders-1'),
      submit('operates', 'payroll'),
      submit('operates', 'orders-2', '/no'),
      submit('operates', 'payroll', '/no'),
    ])
    for (const id of [mine, others, mineDead, othersDead]) {
      await get('operates', `/api/v1/operations/${id}?wait=10`)
    }
  })

  it('sees only operations of its queues, in the list, by id and in the figures', async () => {
    for (const who of bound) {
      const { items } = (await get(who, '/api/v1/operations?limit=200')).body
      expect(queuesIn(items).every((queue) => queue.startsWith('orders'))).toBe(true)
      expect(items.map(({ id }) => id)).toEqual(expect.arrayContaining([mine, mineDead]))
      expect((await get(who, `/api/v1/operations/${mine}`)).status).toBe(200)
      expect((await get(who, `/api/v1/operations/${others}`)).status).toBe(404)
      expect((await get(who, `/api/v1/operations/${others}/stream`)).status).toBe(404)
      expect((await get(who, '/api/v1/operations?queue=payroll')).body.items).toEqual([])
      const counted = (await get(who, '/api/v1/operations/stats')).body.stats
      const all = (await get('operates', '/api/v1/operations/stats')).body.stats
      const sum = (rows: { count: number }[]) => rows.reduce((n, { count }) => n + count, 0)
      expect(sum(counted)).toBeLessThan(sum(all))
      expect(sum(counted)).toBe(items.length)
    }
  })

  it('sees its own identity’s work in its queues only', async () => {
    const [inside, outside] = await Promise.all([submit('submits', 'orders-own'), submit('submits', 'elsewhere')])
    expect((await get('boundSubmits', `/api/v1/operations/${inside}`)).status).toBe(200)
    expect((await get('boundSubmits', `/api/v1/operations/${outside}`)).status).toBe(404)
    const { items } = (await get('boundSubmits', '/api/v1/operations')).body
    expect(items.map(({ id }) => id)).toContain(inside)
    expect(items.map(({ id }) => id)).not.toContain(outside)
  })

  it('keeps the tickets of work that has no queue of its caller’s', async () => {
    const body = { version: '1', request_id: randomUUID(), tenant_id: 'ann', task: { type: 't', payload: {} } }
    const sent = await call(server, 'POST', '/api/v1/messages', {
      headers: { authorization: 'Bearer key-boundSubmits', prefer: 'respond-async' },
      body,
    })
    expect(sent.status).toBe(202)
    expect((await get('boundSubmits', `/api/v1/operations/${sent.body.operationId}`)).status).toBe(200)
  })

  it('acts on its queues only', async () => {
    const act = (path: string, body?: unknown) => ask('boundOperates', 'POST', path, body)
    expect((await act(`/api/v1/operations/${othersDead}/retry`)).status).toBe(404)
    expect((await act(`/api/v1/operations/${others}/cancel`)).status).toBe(404)
    expect((await act(`/api/v1/operations/${mineDead}/retry`)).status).toBe(200)
    await get('operates', `/api/v1/operations/${mineDead}?wait=10`)
    for (const action of ['pause', 'resume']) {
      expect((await act(`/api/v1/lanes/${action}`, { queue: 'payroll' })).status).toBe(403)
      expect((await act(`/api/v1/lanes/${action}`, { queue: 'payroll', partition: 'p' })).status).toBe(403)
      expect((await act(`/api/v1/lanes/${action}`, { queue: 'orders-9' })).status).toBe(200)
    }
  })

  it('sees, redrives and purges only dead letters of its queues', async () => {
    for (const who of bound) {
      const { items } = (await get(who, '/api/v1/dead-letters')).body
      expect(items.map(({ id }) => id)).toContain(mineDead)
      expect(queuesIn(items).every((queue) => queue.startsWith('orders'))).toBe(true)
    }
    const redrive = (body: unknown) => ask('boundOperates', 'POST', '/api/v1/dead-letters/redrive', body)
    expect((await redrive({ ids: [othersDead] })).body).toMatchObject({ moved: 0, skipped: 1 })
    expect((await redrive({ filter: { queue: 'payroll' } })).body).toMatchObject({ moved: 0, skipped: 0 })
    expect((await redrive({ ids: [othersDead, mineDead] })).body).toMatchObject({ moved: 1, skipped: 1 })
    await get('operates', `/api/v1/operations/${mineDead}?wait=10`)
    expect((await redrive({ filter: {} })).body.moved).toBe(1)
    await get('operates', `/api/v1/operations/${mineDead}?wait=10`)
    const purged = await ask('boundOperates', 'DELETE', '/api/v1/dead-letters?all=true')
    expect(purged.body.purged).toBe(1)
    const left = (await get('operates', '/api/v1/dead-letters')).body.items
    expect(left.map(({ id }) => id)).toEqual([othersDead])
  })

  it('is refused on routes about the whole server', async () => {
    for (const [method, path, body] of [
      ['POST', '/api/v1/admin/halt', { reason: 'no' }],
      ['DELETE', '/api/v1/admin/halt', undefined],
      ['GET', '/api/v1/admin/halt', undefined],
      ['GET', '/api/v1/ledger', undefined],
      ['GET', '/api/v1/ledger/verify', undefined],
      ['GET', '/api/v1/alerts', undefined],
      ['GET', '/api/v1/petition-submissions', undefined],
      ['GET', '/v1/petition-submissions', undefined],
      ['POST', `/api/v1/petition-submissions/${randomUUID()}/transitions`, { to: 'ACKNOWLEDGED' }],
      ['GET', '/api/v1/policies', undefined],
      ['POST', '/api/v1/policies', {}],
      ['POST', '/api/v1/policies/dry-run', {}],
      ['DELETE', '/api/v1/policies/p', undefined],
      ['POST', '/api/v1/registry/blocks', {}],
      ['PUT', '/api/v1/registry/blocks/t/1', {}],
      ['DELETE', '/api/v1/registry/blocks/t/1', undefined],
      ['GET', '/api/v1/routes/dead-letters', undefined],
      ['POST', '/api/v1/routes/dead-letters/redrive', { ids: ['1'] }],
      ['DELETE', '/api/v1/routes/dead-letters', { ids: ['1'] }],
      ['GET', '/api/v1/system/maintenance', undefined],
      ['POST', '/api/v1/system/maintenance', { enabled: true }],
    ] as const) {
      const answer = await ask('boundOperates', method, path, body)
      expect([`${method} ${path}`, answer.status]).toEqual([`${method} ${path}`, 403])
    }
    expect((await get('operates', '/api/v1/admin/halt')).body.halted).toBe(false)
  })

  it('is bound on every route about a queue', async () => {
    const named = (await routes()).filter(({ path }) => path.includes('queue'))
    expect(named.length).toBeGreaterThan(5)
    await ask('operates', 'POST', '/api/v1/push', { items: [{ queue: 'payroll', payload: 1, transactionId: 't' }] })
    for (const [method, path] of [
      ['GET', '/api/v1/resources/queues/payroll'],
      ['DELETE', '/api/v1/resources/queues/payroll'],
      ['DELETE', '/api/v1/queues/payroll/clear'],
      ['GET', '/api/v1/status/queues/payroll'],
      ['GET', '/api/v1/pop/queue/payroll'],
      ['DELETE', '/api/v1/consumer-groups/g/queues/payroll'],
    ] as const) {
      expect([403, 404], `${method} ${path}`).toContain((await ask('boundOperates', method, path)).status)
    }
    expect((await ask('boundOperates', 'DELETE', '/api/v1/dlq?queue=payroll')).body.purged).toBe(0)
    expect((await get('boundViews', '/api/v1/messages')).body.messages).toEqual([])
    expect((await get('operates', '/api/v1/messages?queue=payroll')).body.messages).toHaveLength(1)
  })
})

describe('metrics', () => {
  it('are for metrics, view and operate', async () => {
    const wanted = { scrapes: 200, views: 200, operates: 200, submits: 403, consumes: 403 } as const
    for (const [who, status] of Object.entries(wanted)) {
      for (const { path } of (await routes()).filter(isMetrics)) {
        expect((await get(who as Who, path)).status).toBe(status)
      }
    }
  })
})
