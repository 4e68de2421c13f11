/** Order within lanes; priority, fairness and honest estimates between them. */
import { afterEach, beforeEach, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  allFinish,
  endAll,
  finishes,
  inBatches,
  latch,
  post,
  startServer,
  startTarget,
  submit,
  until,
} from '../server-process.js'

let database: TestDatabase

/** A copy that is migrated already for each: with a schema each, they would be migrated one after the other. */
beforeEach(async () => {
  database = await freshDatabase()
})
afterEach(async () => {
  await endAll()
  await database.drop()
})

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
        expect([201, 202], `seed ${seed}: ${JSON.stringify(body)}`).toContain(status)
        reasons.add(body.reason)
        ids.push(body.operationId)
      }
    }),
  )
  for (const { status } of await allFinish(servers[0], ids, 60_000)) expect(status).toBe('completed')
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

/** One worker, kept busy until everything is queued: what it takes next is the queue's choice alone. */
async function withOneWorker(
  queue: string,
  fill: (send: (path: string, order: object, headers?: Record<string, string>) => Promise<string>) => Promise<void>,
): Promise<string[]> {
  const gate = latch()
  const target = await startTarget(async ({ path }, response) => {
    if (path === '/gate') await gate.opened
    response.end()
  })
  const server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_CONCURRENCY: '1',
    SPILLWAY_DIRECT_WAIT_MS: '100',
  })
  const ids: string[] = []
  await submit(server, `${target.origin}/gate`, { queue: 'gate' })
  await fill(async (path, order, headers = {}) => {
    const { status, body } = await submit(server, `${target.origin}${path}`, { queue, ...order }, headers)
    expect(status).toBe(202)
    ids.push(body.operationId)
    return body.operationId
  })
  gate.open()
  await allFinish(server, ids)
  await target.close()
  return target.calls.slice(1).map((c) => c.path)
}

const meanRank = (paths: readonly string[], path: string): number => {
  const ranks = paths.flatMap((p, rank) => (p === path ? [rank] : []))
  return ranks.reduce((sum, rank) => sum + rank, 0) / ranks.length
}

it('priority acts between lanes: lower first, and the highest number is not starved', async () => {
  const paths = await withOneWorker('priority', async (send) => {
    for (const priority of [10, 5, 1]) {
      await inBatches(20, (n) => send(`/${priority}`, { partition: `${priority}-${n}`, priority }))
    }
  })
  expect(paths).toHaveLength(60)
  expect(meanRank(paths, '/1')).toBeLessThan(meanRank(paths, '/5'))
  expect(meanRank(paths, '/5')).toBeLessThan(meanRank(paths, '/10'))
}, 60_000)

it('priority does not act within a lane', async () => {
  const paths = await withOneWorker('within', async (send) => {
    for (const priority of [10, 5, 1]) await send(`/${priority}`, { partition: 'one', priority })
  })
  expect(paths).toEqual(['/10', '/5', '/1'])
}, 60_000)

it('fairness: one identity with a hundred lanes does not starve one with a single lane', async () => {
  const paths = await withOneWorker('fair', async (send) => {
    await inBatches(100, (n) => send('/greedy', { partition: `g${n}` }, { 'x-user-id': 'greedy' }))
    await send('/modest', { partition: 'm' }, { 'x-user-id': 'modest' })
  })
  expect(paths).toHaveLength(101)
  expect(paths.indexOf('/modest')).toBeLessThan(10)
}, 60_000)

it('resume: every lane continues at once, by priority', async () => {
  const target = await startTarget()
  const server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_CONCURRENCY: '1',
  })
  await post(server, '/api/v1/lanes/pause', { queue: 'prio' })
  for (const priority of [10, 5, 1]) {
    await inBatches(20, (n) =>
      submit(server, `${target.origin}/${priority}`, { queue: 'prio', partition: `${priority}-${n}`, priority }),
    )
  }
  await post(server, '/api/v1/lanes/resume', { queue: 'prio' })
  await until('all were called', () => target.calls.length === 60, 10_000)
  const paths = target.calls.map((c) => c.path)
  expect(meanRank(paths, '/1')).toBeLessThan(meanRank(paths, '/5'))
  expect(meanRank(paths, '/5')).toBeLessThan(meanRank(paths, '/10'))
  await target.close()
}, 60_000)

it('system_busy: slow writes queue what could not be run in time, and nothing is refused', async () => {
  const target = await startTarget()
  const server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_STORE_DELAY_MS: '200',
    SPILLWAY_ACCEPT_WAIT_BUDGET_MS: '50',
  })
  // Callers that do not wait for each other: some come while a write has waited for most of its budget.
  const seen: { status: number; reason: string; id: string }[] = []
  let enough = false
  const callers = Array.from({ length: 12 }, async (_, caller) => {
    for (let n = 0; !enough; n++) {
      const { status, body } = await submit(server, `${target.origin}/n`, { queue: `busy ${caller} ${n}` })
      seen.push({ status, reason: body.reason, id: body.operationId })
    }
  })
  const busy = await until('one is queued for load', () => seen.find((s) => s.reason === 'system_busy'))
  enough = true
  await Promise.all(callers)
  for (const { status } of seen) expect([201, 202]).toContain(status)
  expect((await finishes(server, busy.id)).status).toBe('completed')
  await target.close()
}, 60_000)

it('estimatedWaitSeconds is within a factor of two under steady drain', async () => {
  const stepMs = 60
  const target = await startTarget((_, response) => void setTimeout(() => response.end(), stepMs))
  const server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_DIRECT_WAIT_MS: '100',
  })
  for (let n = 0; n < 80; n++) {
    await submit(server, `${target.origin}/n`, { queue: 'steady' }, { prefer: 'respond-async' })
  }
  await until('some are through', () => target.calls.length > 20, 30_000)
  const late = await submit(server, `${target.origin}/late`, { queue: 'steady' })
  expect(late.body.reason).toBe('maintaining_order')
  const truth = (await finishes(server, late.body.operationId, 60_000)).latency_seconds
  expect(late.body.estimatedWaitSeconds).toBeGreaterThan(truth / 2)
  expect(late.body.estimatedWaitSeconds).toBeLessThan(truth * 2)
  expect(late.body.estimatedWait).toBe(`${Math.ceil(late.body.estimatedWaitSeconds)}s`)
  await target.close()
}, 90_000)

it.each([1, 2])(
  'estimatedWaitSeconds over many lanes that share few workers, %i instances',
  async (instances) => {
    const stepMs = 50
    const target = await startTarget((_, response) => void setTimeout(() => response.end(), stepMs))
    const env = {
      DATABASE_URL: database.url,
      SPILLWAY_FORWARD_ALLOW: target.origin,
      SPILLWAY_CONCURRENCY: '2',
    }
    const [server] = await Promise.all([startServer(env), ...(instances === 2 ? [startServer(env)] : [])])
    const asynchronous = { prefer: 'respond-async' }
    const count = 240 * instances
    await inBatches(count, (n) =>
      submit(server, `${target.origin}/n`, { queue: 'many', partition: `p${n}` }, asynchronous),
    )
    await until('the drain is steady', () => target.calls.length > count * 0.65, 60_000)
    const late = await submit(server, `${target.origin}/late`, { queue: 'many', partition: 'late' }, asynchronous)
    const truth = (await finishes(server, late.body.operationId, 60_000)).latency_seconds
    expect(late.body.estimatedWaitSeconds).toBeGreaterThan(truth / 2)
    expect(late.body.estimatedWaitSeconds).toBeLessThan(truth * 2)
    await target.close()
  },
  90_000,
)
