/** The database fails in every way it can: each request gets an answer in time, and service resumes when it is back. */
import { chmod, mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { type EmbeddedServer, startEmbedded } from '@spillway/embedded-postgres'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { addressOf, type HalfOpenProxy, startHalfOpenProxy, through } from '../../../spillway/test/half-open-proxy.js'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  type Answer,
  call,
  endAll,
  finishes,
  get,
  latch,
  post,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
  until,
  untilReady,
} from '../server-process.js'

/** SPILLWAY_STORE_TIMEOUT_MS and a little for a busy machine. */
const answerMsMax = 2_600
const recoveryMsMax = 2_000 + 1_000

let database: TestDatabase
let target: Target
let proxy: HalfOpenProxy

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget()
})

afterEach(async () => {
  await endAll()
  await proxy?.close()
})

afterAll(async () => {
  await target.close()
  await database.drop()
})

async function startBehindProxy(options: { ready?: boolean } = {}): Promise<ServerProcess> {
  return startServer({ DATABASE_URL: through(proxy, database.url), SPILLWAY_FORWARD_ALLOW: target.origin }, options)
}

function expectStoreAway(answer: Answer): void {
  expect(answer.status).toBe(503)
  expect(answer.headers.get('content-type')).toContain('application/problem+json')
  expect(answer.body.code).toBe('store_unavailable')
  const retryAfter = Number(answer.headers.get('retry-after'))
  expect(retryAfter).toBeGreaterThanOrEqual(1)
  expect(retryAfter).toBe(answer.body.retry_after_seconds)
  expect(answer.text).not.toMatch(/ECONN|pg_|SELECT|postgres|at .*\.js/i)
  expect(answer.ms).toBeLessThan(answerMsMax)
}

const someId = '01890a5d-ac96-774b-bcce-b302099a8057'

/** Every kind of request that needs the database, at once. */
async function expectAllRefused(server: ServerProcess): Promise<void> {
  const answers = await Promise.all([
    submit(server, `${target.origin}/refused`),
    submit(server, `${target.origin}/refused`, {}, { 'idempotency-key': 'k', prefer: 'respond-async' }),
    get(server, `/api/v1/operations/${someId}`),
    get(server, `/api/v1/operations/${someId}?wait=5`),
    get(server, `/api/v1/operations/${someId}/stream`),
    get(server, '/api/v1/operations'),
    get(server, '/api/v1/operations/stats'),
    get(server, '/api/v1/dead-letters'),
    post(server, '/api/v1/dead-letters/redrive', { filter: {} }),
    post(server, `/api/v1/operations/${someId}/cancel`),
    post(server, '/api/v1/lanes/pause', { queue: 'q' }),
    call(server, 'DELETE', '/api/v1/dead-letters?all=true'),
  ])
  for (const answer of answers) expectStoreAway(answer)
}

async function expectDegraded(server: ServerProcess): Promise<void> {
  for (const path of ['/health', '/_health', '/health/live']) {
    const live = await get(server, path)
    expect(live.status).toBe(200)
    expect(live.body).toMatchObject({ status: 'degraded', checks: { store: { ok: false } } })
    expect(live.ms).toBeLessThan(500)
  }
  const ready = await get(server, '/health/ready')
  expect(ready.status).toBe(503)
  expect(ready.body.failing).toEqual(['store'])
  expect(Number(ready.headers.get('retry-after'))).toBeGreaterThanOrEqual(1)
  expect((await get(server, '/metrics')).status).toBe(200)
}

/** Work is accepted and run within two seconds of the database's return. */
async function expectRecovery(server: ServerProcess, queue: string, msMax = recoveryMsMax): Promise<void> {
  const began = performance.now()
  const accepted = await until(
    'work is accepted again',
    async () => {
      const answer = await submit(server, `${target.origin}/${queue}`, { queue })
      return answer.status < 300 && answer
    },
    10_000,
  )
  expect(performance.now() - began).toBeLessThan(msMax)
  await finishes(server, accepted.body.operationId)
  await untilReady(server, recoveryMsMax)
  expect((await get(server, '/health')).body.status).toBe('healthy')
}

describe('PostgreSQL behind a network that fails', () => {
  it('down at start: says so, answers, and recovers by itself', async () => {
    proxy = await startHalfOpenProxy(addressOf(database.url))
    await proxy.refuse()
    const server = await startBehindProxy({ ready: false })
    await expectDegraded(server)
    await expectAllRefused(server)
    await until('it is said', () => server.logs().some((line) => /database not reachable/.test(String(line.msg))))
    expect(server.stdout()).not.toContain(new URL(database.url).password)
    await proxy.pass()
    await expectRecovery(server, 'down-at-start')
  })

  it('connections cut and refused later: 503 in time, then recovery', async () => {
    proxy = await startHalfOpenProxy(addressOf(database.url))
    const server = await startBehindProxy()
    expect((await submit(server, `${target.origin}/before`)).status).toBe(201)
    await proxy.refuse()
    await expectAllRefused(server)
    await until('health is degraded', async () => (await get(server, '/health')).body.status === 'degraded', 5_000)
    await expectDegraded(server)
    await proxy.pass()
    await expectRecovery(server, 'cut')
  })

  it('half-open connections: 503 in time, no hang, then recovery', async () => {
    proxy = await startHalfOpenProxy(addressOf(database.url))
    const server = await startBehindProxy()
    expect((await submit(server, `${target.origin}/before`)).status).toBe(201)
    proxy.stall()
    await expectAllRefused(server)
    await until('health is degraded', async () => (await get(server, '/health')).body.status === 'degraded', 5_000)
    await expectAllRefused(server)
    await expectDegraded(server)
    await proxy.pass()
    await expectRecovery(server, 'half-open')
  })

  it('half-open connections that are never closed: they are dropped, not waited for', async () => {
    proxy = await startHalfOpenProxy(addressOf(database.url))
    const server = await startBehindProxy()
    proxy.stall()
    await expectAllRefused(server)
    // What hangs stays hanging, new connections work: each of the pool's is found out by its own timeout.
    proxy.resumeNew()
    await expectRecovery(server, 'hanging', 3 * answerMsMax)
  })

  it('operations accepted before the outage run after it, once', async () => {
    proxy = await startHalfOpenProxy(addressOf(database.url))
    const server = await startBehindProxy()
    const ids = []
    for (let n = 0; n < 10; n++) {
      const { body } = await submit(server, `${target.origin}/kept?${n}`, {
        queue: 'kept',
        delay_seconds: n === 0 ? 1 : 0,
      })
      ids.push(body.operationId)
    }
    await proxy.refuse()
    await until('health is degraded', async () => (await get(server, '/health')).body.status === 'degraded', 5_000)
    await proxy.pass()
    for (const id of ids) expect((await finishes(server, id)).status).toBe('completed')
    const kept = target.calls.filter((c) => c.path.startsWith('/kept')).map((c) => c.path)
    expect(kept).toEqual(ids.map((_, n) => `/kept?${n}`))
  })

  it.each(['stall', 'refuse'] as const)(
    'stops in time while the database is away (%s)',
    async (fault) => {
      proxy = await startHalfOpenProxy(addressOf(database.url))
      const gate = latch()
      const slow = await startTarget(async (_, response) => {
        await gate.opened
        response.end()
      })
      const server = await startServer({
        DATABASE_URL: through(proxy, database.url),
        SPILLWAY_FORWARD_ALLOW: slow.origin,
        SPILLWAY_DIRECT_WAIT_MS: '100',
        SPILLWAY_DRAIN_SECONDS: '2',
        SPILLWAY_LEASE_SECONDS: '5',
      })
      const { body } = await submit(server, slow.origin, { queue: `stop-${fault}` })
      expect(body.reason).toBe('still_running')
      await proxy[fault]()
      // Finished, but it cannot be written down.
      gate.open()
      const began = performance.now()
      expect(await server.stop()).toEqual({ code: 0, signal: null })
      expect(performance.now() - began).toBeLessThan(15_000)
      await proxy.pass()
      const next = await startServer({
        DATABASE_URL: through(proxy, database.url),
        SPILLWAY_FORWARD_ALLOW: slow.origin,
      })
      expect((await finishes(next, body.operationId, 25_000)).attempt).toBeGreaterThan(1)
      await slow.close()
    },
    60_000,
  )
})

describe('PostgreSQL itself', () => {
  let dir: string
  let own: EmbeddedServer
  const log = { info: () => undefined, warn: () => undefined, error: () => undefined }

  beforeAll(async () => {
    dir = await mkdtemp(join(tmpdir(), 'spillway-faults-'))
    await chmod(dir, 0o755)
    own = await startEmbedded({
      dataDir: join(dir, 'data'),
      log,
      settings: { min_wal_size: '80MB', shared_buffers: '16MB' },
    })
  })

  afterAll(async () => {
    await own.stop()
    await rm(dir, { recursive: true, force: true })
  })

  it('killed while it is used: nothing accepted is lost, and it continues after the restart', async () => {
    const server = await startServer({ DATABASE_URL: own.url, SPILLWAY_FORWARD_ALLOW: target.origin })
    const killed = own.pid
    const accepted: string[] = []
    const refused: Answer[] = []
    let stop = false
    const load = Array.from({ length: 8 }, async (_, n) => {
      while (!stop) {
        const answer = await submit(server, `${target.origin}/pg-kill`, { queue: `k${n}` })
        if (answer.status < 300) accepted.push(answer.body.operationId)
        else refused.push(answer)
      }
    })
    await until('some are accepted', () => accepted.length > 50)
    process.kill(killed, 'SIGKILL')
    // Whether anybody is refused meanwhile is luck: all may be waiting for a run when it goes, and it comes back quickly.
    await until('PostgreSQL runs again', () => own.pid !== killed, 30_000)
    const seen = accepted.length
    await until('more are accepted', () => accepted.length > seen + 20, 20_000)
    stop = true
    await Promise.all(load)
    for (const answer of refused) expectStoreAway(answer)
    for (const id of accepted) expect((await finishes(server, id)).status).toBe('completed')
    expect(await server.stop()).toEqual({ code: 0, signal: null })
  }, 90_000)

  it('stopped with SIGSTOP: 503 in time, and service resumes after SIGCONT', async () => {
    const server = await startServer({ DATABASE_URL: own.url, SPILLWAY_FORWARD_ALLOW: target.origin })
    expect((await submit(server, `${target.origin}/before`)).status).toBe(201)
    const pids = await postgresProcesses(own.pid)
    expect(pids.length).toBeGreaterThan(5)
    for (const pid of pids) process.kill(pid, 'SIGSTOP')
    try {
      await expectAllRefused(server)
      await until('health is degraded', async () => (await get(server, '/health')).body.status === 'degraded', 5_000)
      await expectDegraded(server)
    } finally {
      for (const pid of pids) process.kill(pid, 'SIGCONT')
    }
    await expectRecovery(server, 'sigstop')
    expect(await server.stop()).toEqual({ code: 0, signal: null })
  }, 60_000)
})

/** The postmaster and its backends. */
async function postgresProcesses(postmaster: number): Promise<number[]> {
  const { readdir, readFile } = await import('node:fs/promises')
  const found = [postmaster]
  for (const name of await readdir('/proc')) {
    if (!/^\d+$/.test(name)) continue
    const stat = await readFile(`/proc/${name}/stat`, 'utf8').catch(() => '')
    if (Number(stat.slice(stat.lastIndexOf(')') + 2).split(' ')[1]) === postmaster) found.push(Number(name))
  }
  return found
}
