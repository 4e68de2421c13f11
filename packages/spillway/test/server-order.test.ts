/** Order within lanes; priority, fairness and honest estimates between them. */
import { afterAll, afterEach, beforeAll, expect, it } from 'vitest'
import { endAll, finishes, get, latch, post, startServer, startTarget, submit, until } from './server-process.js'
import { freshDatabase, type TestDatabase } from './setup/database.js'

let database: TestDatabase

beforeAll(async () => {
  database = await freshDatabase()
})
afterEach(() => endAll())
afterAll(() => database.drop())

it('500 operations over 20 lanes keep their order, with random failures, on two instances', async () => {
  const seed = Math.floor(Math.random() * 2 ** 31)
  let state = seed
  const random = () => {
    state = (Math.imul(state, 1_103_515_245) + 12_345) >>> 0
    return state / 2 ** 32
  }
  const effects = new Map<string, number[]>()
  const target = await startTarget((call, response) => {
    const { lane, n } = JSON.parse(call.body) as { lane: string; n: number }
    const luck = random()
    if (luck < 0.15) return void response.writeHead(503).end()
    if (luck < 0.2) return void response.destroy()
    effects.set(lane, [...(effects.get(lane) ?? []), n])
    response.end()
  })
  const env = {
    DATABASE_URL: database.url,
    SPILLWAY_DB_SCHEMA: 'lanes',
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_RETRY_BASE_MS: '5',
  }
  const servers = await Promise.all([startServer(env), startServer(env)])
  const reasons = new Set<string | undefined>()
  const ids: string[] = []
  await Promise.all(
    Array.from({ length: 20 }, async (_, lane) => {
      for (let n = 0; n < 25; n++) {
        // A lane's caller goes on when the last was answered: that is the order of acceptance.
        const server = servers[Math.floor(random() * 2)] ?? servers[0]
        const { status, body } = await submit(
          server,
          target.origin,
          { queue: 'lanes', partition: `lane ${lane}`, max_retries: 50, payload: { body: { lane: String(lane), n } } },
          random() < 0.3 ? { prefer: 'respond-async' } : {},
        )
        expect([201, 202]).toContain(status)
        reasons.add(body.reason)
        ids.push(body.operationId)
      }
    }),
  )
  for (const id of ids) expect((await finishes(servers[0], id, 60_000)).status).toBe('completed')
  const wrong = [...effects].filter(([, seen]) => {
    // A call whose answer was lost may come twice in a row: at least once, never out of order.
    const once = seen.filter((n, index) => n !== seen[index - 1])
    return once.length !== 25 || once.some((n, index) => n !== index)
  })
  expect(wrong, `seed ${seed}`).toEqual([])
  expect(effects.size).toBe(20)
  expect(reasons.has('maintaining_order')).toBe(true)
  await target.close()
}, 120_000)

it('priority acts between lanes: lower first, and the highest number is not starved', async () => {
  const target = await startTarget()
  const server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_DB_SCHEMA: 'priority',
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_CONCURRENCY: '1',
  })
  await post(server, '/api/v1/lanes/pause', { queue: 'prio' })
  const ids = []
  for (const priority of [10, 5, 1]) {
    for (let n = 0; n < 20; n++) {
      const { body } = await submit(server, `${target.origin}/${priority}`, {
        queue: 'prio',
        partition: `${priority}-${n}`,
        priority,
      })
      ids.push(body.operationId)
    }
  }
  await post(server, '/api/v1/lanes/resume', { queue: 'prio' })
  for (const id of ids) await finishes(server, id)
  const ranks = new Map<string, number>()
  for (const [rank, { path }] of target.calls.entries()) ranks.set(path, (ranks.get(path) ?? 0) + rank / 20)
  expect(ranks.get('/1') ?? 0).toBeLessThan(ranks.get('/5') ?? 0)
  expect(ranks.get('/5') ?? 0).toBeLessThan(ranks.get('/10') ?? 0)
  await target.close()
}, 60_000)

it('fairness: one identity with a hundred lanes does not starve one with a single lane', async () => {
  const target = await startTarget()
  const server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_DB_SCHEMA: 'fair',
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_CONCURRENCY: '1',
  })
  await post(server, '/api/v1/lanes/pause', { queue: 'fair' })
  const ids = []
  for (let n = 0; n < 100; n++) {
    const { body } = await submit(server, `${target.origin}/greedy`, { queue: 'fair', partition: `g${n}` }, { 'x-user-id': 'greedy' })
    ids.push(body.operationId)
  }
  const modest = await submit(server, `${target.origin}/modest`, { queue: 'fair', partition: 'm' }, { 'x-user-id': 'modest' })
  await post(server, '/api/v1/lanes/resume', { queue: 'fair' })
  await finishes(server, modest.body.operationId)
  for (const id of ids) await finishes(server, id)
  const rank = target.calls.findIndex((c) => c.path === '/modest')
  expect(rank).toBeGreaterThanOrEqual(0)
  expect(rank).toBeLessThan(30)
  await target.close()
}, 60_000)

it('system_busy: slow writes queue what could not be run in time, and nothing is refused', async () => {
  const target = await startTarget()
  const server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_DB_SCHEMA: 'busy',
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_STORE_DELAY_MS: '200',
    SPILLWAY_ACCEPT_WAIT_BUDGET_MS: '50',
  })
  const first = submit(server, `${target.origin}/1`, { queue: 'first' })
  let n = 0
  const busy = await until('one is queued for load', async () => {
    const answers = await Promise.all(
      Array.from({ length: 4 }, () => submit(server, `${target.origin}/n`, { queue: `busy${n++}` })),
    )
    for (const answer of answers) expect([201, 202]).toContain(answer.status)
    return answers.find((a) => a.body.reason === 'system_busy')
  })
  expect(busy.status).toBe(202)
  expect((await finishes(server, busy.body.operationId)).status).toBe('completed')
  expect([201, 202]).toContain((await first).status)
  await target.close()
}, 60_000)

it('estimatedWaitSeconds is within a factor of two under steady drain', async () => {
  const gate = latch()
  const stepMs = 60
  const target = await startTarget(async ({ path }, response) => {
    if (path === '/gate') await gate.opened
    setTimeout(() => response.end(), stepMs)
  })
  const server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_DB_SCHEMA: 'estimate',
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_DIRECT_WAIT_MS: '100',
  })
  gate.open()
  // The lane drains steadily; every tenth caller is told how long it takes, and times it.
  const ids: { id: string; told: number; at: number }[] = []
  for (let n = 0; n < 120; n++) {
    const { body } = await submit(server, `${target.origin}/n`, { queue: 'steady' }, { prefer: 'respond-async' })
    ids.push({ id: body.operationId, told: body.estimatedWaitSeconds, at: n })
  }
  await until('some are through', () => target.calls.length > 20, 30_000)
  const late = await submit(server, `${target.origin}/late`, { queue: 'steady' })
  expect(late.body.reason).toBe('maintaining_order')
  const done = await finishes(server, late.body.operationId, 60_000)
  const truth = done.latency_seconds
  expect(late.body.estimatedWaitSeconds).toBeGreaterThan(truth / 2)
  expect(late.body.estimatedWaitSeconds).toBeLessThan(truth * 2)
  expect(late.body.estimatedWait).toBe(`${Math.ceil(late.body.estimatedWaitSeconds)}s`)
  expect((await get(server, '/health')).status).toBe(200)
  expect(ids.length).toBe(120)
  await target.close()
}, 90_000)

it('estimatedWaitSeconds over many lanes that share few workers', async () => {
  const stepMs = 50
  const target = await startTarget((_, response) => void setTimeout(() => response.end(), stepMs))
  const server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_DB_SCHEMA: 'estimate_many',
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_CONCURRENCY: '2',
  })
  for (let n = 0; n < 200; n++) {
    await submit(server, `${target.origin}/n`, { queue: 'many', partition: `p${n}` }, { prefer: 'respond-async' })
  }
  await until('the drain rate is known', () => target.calls.length > 80, 30_000)
  const late = await submit(server, `${target.origin}/late`, { queue: 'many', partition: 'late' })
  expect(late.status).toBe(202)
  const truth = (await finishes(server, late.body.operationId, 60_000)).latency_seconds
  expect(late.body.estimatedWaitSeconds).toBeGreaterThan(truth / 2)
  expect(late.body.estimatedWaitSeconds).toBeLessThan(truth * 2)
  await target.close()
}, 90_000)
