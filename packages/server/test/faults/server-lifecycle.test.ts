/** Start, stop and sudden death of the real process. */
import { existsSync } from 'node:fs'
import { chmod, mkdtemp, readFile, rm } from 'node:fs/promises'
import { createServer } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  allFinish,
  endAll,
  finishes,
  get,
  latch,
  operation,
  post,
  runProgram,
  startServer,
  startTarget,
  submit,
  until,
} from '../server-process.js'

let database: TestDatabase
let dir: string

beforeAll(async () => {
  database = await freshDatabase({ empty: true })
})

beforeEach(async () => {
  dir = await mkdtemp(join(tmpdir(), 'spillway-life-'))
  await chmod(dir, 0o755)
})

afterEach(async () => {
  await endAll()
  await stopLeftover(join(dir, 'data'))
  await rm(dir, { recursive: true, force: true })
})

afterAll(() => database.drop())

async function postmasterOf(dataDir: string): Promise<number | undefined> {
  const file = join(dataDir, 'postgres', 'postmaster.pid')
  return existsSync(file) ? Number.parseInt(await readFile(file, 'utf8'), 10) : undefined
}

function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0)
    return true
  } catch (error) {
    if (error instanceof Error && 'code' in error && error.code === 'ESRCH') return false
    throw error
  }
}

async function stopLeftover(dataDir: string): Promise<void> {
  const pid = await postmasterOf(dataDir)
  if (pid === undefined || !isAlive(pid)) return
  process.kill(pid, 'SIGQUIT')
  await until('the leftover PostgreSQL is gone', () => !isAlive(pid))
}

/** Migrated already, one for each test of a block: what it leaves undone is nobody else's. */
function ownDatabase(): { readonly url: string } {
  let own: TestDatabase
  beforeEach(async () => {
    own = await freshDatabase()
  })
  afterEach(async () => {
    await endAll()
    await own.drop()
  })
  return {
    get url() {
      return own.url
    },
  }
}

describe('start', () => {
  it('takes a free port for 0 and prints the address; the first request is answered', async () => {
    const server = await startServer({ SPILLWAY_DATA_DIR: join(dir, 'data') }, { ready: false })
    expect(server.port).toBeGreaterThan(0)
    // Its own origin is a target by default, on loopback.
    const { status, body } = await submit(server, `${server.origin}/demo/echo`, {
      payload: { body: { hello: 'world' } },
    })
    expect(status).toBe(201)
    expect(body.result.body).toMatchObject({
      body: { hello: 'world' },
      headers: { 'idempotency-key': body.operationId },
    })
    const byName = await submit(server, `${server.origin.replace('127.0.0.1', 'localhost')}/demo/echo`)
    expect(byName.status).toBe(201)
    const second = await runProgram({ SPILLWAY_DATA_DIR: join(dir, 'data'), SPILLWAY_PORT: '0' })
    expect(second.code).not.toBe(0)
    expect(second.stderr).toContain(join(dir, 'data'))
    expect(second.stderr).toMatch(/in use|another|already|running/i)
    expect(second.stderr).not.toMatch(/\n\s+at /)
    expect((await get(server, '/health')).status).toBe(200)
    const postmaster = await postmasterOf(join(dir, 'data'))
    expect(await server.stop()).toEqual({ code: 0, signal: null })
    expect(postmaster).toBeDefined()
    expect(isAlive(postmaster ?? 0)).toBe(false)
    expect(await postmasterOf(join(dir, 'data'))).toBeUndefined()
  }, 60_000)

  it('a port that is taken: says so, names the setting, and leaves no database behind', async () => {
    const other = createServer()
    await new Promise<void>((resolve) => other.listen(0, '127.0.0.1', resolve))
    const port = (other.address() as { port: number }).port
    const { code, stderr } = await runProgram({
      SPILLWAY_DATA_DIR: join(dir, 'data'),
      SPILLWAY_PORT: String(port),
    })
    other.close()
    expect(code).toBe(1)
    expect(stderr).toContain(String(port))
    expect(stderr).toContain('SPILLWAY_PORT')
    expect(stderr).not.toMatch(/\n\s+at /)
    expect(await postmasterOf(join(dir, 'data'))).toBeUndefined()
  }, 60_000)

  it.each([
    ['a host that is not loopback without authentication', { SPILLWAY_HOST: '0.0.0.0' }, /SPILLWAY_HOST/],
    ['a host of ::', { SPILLWAY_HOST: '::' }, /SPILLWAY_HOST/],
    ['an unknown name', { SPILLWAY_LAESE_SECONDS: '3' }, /SPILLWAY_LAESE_SECONDS[\s\S]*SPILLWAY_LEASE_SECONDS/],
    ['an unknown name of a workload', { PETITION_QUEUE_TRESHOLD: '3' }, /PETITION_QUEUE_TRESHOLD/],
    ['no number', { SPILLWAY_CONCURRENCY: 'many' }, /SPILLWAY_CONCURRENCY/],
    ['a number out of range', { SPILLWAY_PORT: '65536' }, /SPILLWAY_PORT/],
    ['a number with more behind it', { SPILLWAY_LEASE_SECONDS: '3s' }, /SPILLWAY_LEASE_SECONDS/],
    ['an empty number', { SPILLWAY_LEASE_SECONDS: ' ' }, /SPILLWAY_LEASE_SECONDS/],
    ['no URL', { DATABASE_URL: 'nonsense' }, /DATABASE_URL/],
    ['another database', { DATABASE_URL: 'mysql://localhost/x' }, /DATABASE_URL/],
    ['no origin', { SPILLWAY_FORWARD_ALLOW: 'localhost' }, /SPILLWAY_FORWARD_ALLOW/],
    ['no network', { SPILLWAY_TRUSTED_PROXIES: '10.0.0.0/99' }, /SPILLWAY_TRUSTED_PROXIES/],
    ['a key file that is not there', { SPILLWAY_API_KEYS: '/nowhere/keys.json' }, /\/nowhere\/keys\.json/],
    [
      'a contradiction',
      { SPILLWAY_RETRY_BASE_MS: '2000', SPILLWAY_RETRY_MAX_MS: '1000' },
      /SPILLWAY_RETRY_(BASE|MAX)_MS/,
    ],
    ['no role', { SPILLWAY_ROLES: 'janitor' }, /SPILLWAY_ROLES[\s\S]*gateway/],
  ])('refuses %s, naming it', async (_, env, named) => {
    const { code, stderr, stdout } = await runProgram({ DATABASE_URL: database.url, SPILLWAY_PORT: '0', ...env })
    expect(code).not.toBe(0)
    expect(stderr).toMatch(named)
    expect(stderr).not.toMatch(/\n\s+at /)
    expect(stderr + stdout).not.toContain(new URL(database.url).password)
  })

  it('reports all invalid settings at once', async () => {
    const { stderr } = await runProgram({ SPILLWAY_PORT: 'x', SPILLWAY_CONCURRENCY: '0', SPILLWAY_NONSENSE: '1' })
    for (const name of ['SPILLWAY_PORT', 'SPILLWAY_CONCURRENCY', 'SPILLWAY_NONSENSE']) expect(stderr).toContain(name)
  })

  it('ignores what Kubernetes injects, with a warning, and says loudly that writes are slowed', async () => {
    const server = await startServer(
      {
        DATABASE_URL: database.url,
        PORT: '0',
        SPILLWAY_PORT: 'tcp://10.0.0.1:7745',
        SPILLWAY_SERVICE_HOST: '10.0.0.1',
        SPILLWAY_PORT_7745_TCP_ADDR: '10.0.0.1',
        SPILLWAY_STORE_DELAY_MS: '1',
      },
      {},
    )
    const warned = server
      .logs()
      .filter((line) => line.level === 'warn')
      .map((line) => String(line.msg))
    expect(warned.join('\n')).toContain('SPILLWAY_PORT')
    expect(warned.join('\n')).toContain('SPILLWAY_STORE_DELAY_MS')
    expect(await server.stop()).toEqual({ code: 0, signal: null })
  })

  it('does what its roles say: one takes in, the other runs', async () => {
    const target = await startTarget()
    const shared = { DATABASE_URL: database.url, SPILLWAY_FORWARD_ALLOW: target.origin }
    const gateway = await startServer({ ...shared, SPILLWAY_ROLES: 'gateway' })
    const { body, status } = await submit(gateway, `${target.origin}/roles`, {}, { prefer: 'respond-async' })
    expect(status).toBe(202)
    const worker = await startServer({ ...shared, SPILLWAY_ROLES: 'worker' })
    expect((await submit(worker, target.origin)).status).toBe(404)
    expect((await get(worker, `/api/v1/operations/${body.operationId}`)).status).toBe(404)
    expect((await get(worker, '/metrics')).status).toBe(200)
    expect(await finishes(gateway, body.operationId)).toMatchObject({ status: 'completed' })
    await target.close()
  })

  it('two share one database by schema, without seeing each other', async () => {
    const [one, two] = await Promise.all(
      ['one', 'two'].map((schema) => startServer({ DATABASE_URL: database.url, SPILLWAY_DB_SCHEMA: schema })),
    )
    if (one === undefined || two === undefined) throw new Error('both were started')
    const { body } = await submit(one, `${one.origin}/demo/echo`)
    expect((await get(one, `/api/v1/operations/${body.operationId}`)).status).toBe(200)
    expect((await get(two, `/api/v1/operations/${body.operationId}`)).status).toBe(404)
  })
})

describe('SIGTERM', () => {
  const own = ownDatabase()

  it('answers open requests, finishes running work, keeps the rest, and refuses new requests', async () => {
    const gate = latch()
    const target = await startTarget(async ({ path }, response) => {
      if (path.startsWith('/held')) await gate.opened
      response.end('ok')
    })
    const env = { DATABASE_URL: own.url, SPILLWAY_FORWARD_ALLOW: target.origin }
    const server = await startServer({ ...env, SPILLWAY_DIRECT_WAIT_MS: '10000' })
    const direct = submit(server, `${target.origin}/held/direct`, { queue: 'direct' })
    await until('it is called', () => target.calls.length === 1)
    const behind = await submit(server, `${target.origin}/behind`, { queue: 'direct' })
    expect(behind.status).toBe(202)
    const polled = get(server, `/api/v1/operations/${behind.body.operationId}?wait=30`)
    const stream = await fetch(`${server.origin}/api/v1/operations/${behind.body.operationId}/stream`)
    const streamed = stream.text()
    const ended = server.stop()
    await until('it drains', () => server.logs().some((line) => String(line.msg).includes('draining')))
    const refused = await submit(server, `${target.origin}/new`, { queue: 'new' })
    expect(refused.status).toBe(503)
    expect(refused.body.code).toBe('draining')
    expect(Number(refused.headers.get('retry-after'))).toBeGreaterThanOrEqual(1)
    expect((await get(server, '/health')).status).toBe(200)
    // So that nobody sends more.
    expect((await get(server, '/health/ready')).status).toBe(503)
    gate.open()
    const answer = await direct
    expect(answer.status).toBe(201)
    expect(answer.body.status).toBe('executed')
    expect((await polled).status).toBe(200)
    expect(await streamed).toContain('event: status')
    expect(await ended).toEqual({ code: 0, signal: null })
    const next = await startServer(env)
    expect((await finishes(next, behind.body.operationId)).status).toBe('completed')
    expect(await operation(next, answer.body.operationId)).toMatchObject({ status: 'completed', attempt: 1 })
    expect(target.calls.map((c) => c.path)).toEqual(['/held/direct', '/behind'])
    await target.close()
  }, 60_000)

  it('returns operations that do not finish in SPILLWAY_DRAIN_SECONDS, uncounted, and others run them at once', async () => {
    const target = await startTarget((call, response) => {
      if (target.calls.length > 1) response.end(call.path)
    })
    const env = {
      DATABASE_URL: own.url,
      SPILLWAY_FORWARD_ALLOW: target.origin,
      SPILLWAY_DIRECT_WAIT_MS: '200',
    }
    const server = await startServer({ ...env, SPILLWAY_DRAIN_SECONDS: '1' })
    const { body } = await submit(server, `${target.origin}/never-ends`, { timeout_seconds: 600 })
    expect(body.reason).toBe('still_running')
    const began = performance.now()
    expect(await server.stop()).toEqual({ code: 0, signal: null })
    expect(performance.now() - began).toBeLessThan(6_000)
    const next = await startServer(env)
    const done = await finishes(next, body.operationId, 5_000)
    expect(done).toMatchObject({ status: 'completed', attempt: 1 })
    await target.close()
  }, 60_000)

  it('a second signal ends at once', async () => {
    const target = await startTarget(() => undefined)
    const server = await startServer({
      DATABASE_URL: own.url,
      SPILLWAY_FORWARD_ALLOW: target.origin,
      SPILLWAY_DIRECT_WAIT_MS: '100',
    })
    await submit(server, target.origin)
    const ended = server.stop()
    await until('it drains', () => server.logs().some((line) => String(line.msg).includes('draining')))
    process.kill(server.pid, 'SIGTERM')
    expect(await ended).toEqual({ code: 143, signal: null })
    await target.close()
  })

  it('loses nothing that was answered, under load', async () => {
    const target = await startTarget()
    const env = { DATABASE_URL: own.url, SPILLWAY_FORWARD_ALLOW: target.origin }
    const server = await startServer(env)
    const accepted: string[] = []
    const statuses = new Set<number>()
    let stopping = false
    const load = Array.from({ length: 16 }, async (_, n) => {
      for (;;) {
        const answer = await submit(
          server,
          `${target.origin}/l`,
          { queue: `l${n % 5}` },
          n % 2 === 0 ? { prefer: 'respond-async' } : {},
        ).catch((fault: unknown) => {
          // Only a server that is stopping may refuse connections.
          if (!stopping) throw fault
        })
        if (answer === undefined) return
        statuses.add(answer.status)
        if (answer.status < 300) accepted.push(answer.body.operationId)
        else if (stopping) return
      }
    })
    await until('some are accepted', () => accepted.length > 200)
    stopping = true
    expect(await server.stop()).toEqual({ code: 0, signal: null })
    await Promise.all(load)
    expect([...statuses].every((s) => [201, 202, 503].includes(s))).toBe(true)
    const next = await startServer(env)
    for (const { status } of await allFinish(next, accepted)) expect(status).toBe('completed')
    const made = new Map<unknown, number>()
    for (const c of target.calls)
      made.set(c.headers['idempotency-key'], (made.get(c.headers['idempotency-key']) ?? 0) + 1)
    expect(accepted.filter((id) => made.get(id) !== 1)).toEqual([])
    await target.close()
  }, 60_000)
})

describe('kill -9', () => {
  const own = ownDatabase()

  it('another instance takes over what ran, in order, and counts the attempt', async () => {
    let dying = true
    const target = await startTarget(({ path }, response) => {
      if (dying && path === '/first') return
      response.end(path)
    })
    const env = {
      DATABASE_URL: own.url,
      SPILLWAY_FORWARD_ALLOW: target.origin,
      SPILLWAY_LEASE_SECONDS: '2',
      SPILLWAY_DIRECT_WAIT_MS: '200',
    }
    const [doomed, heir] = await Promise.all([startServer(env), startServer(env)])
    const first = await submit(doomed, `${target.origin}/first`, { queue: 'k', timeout_seconds: 60 })
    expect(first.body.reason).toBe('still_running')
    const rest = []
    for (const n of [1, 2, 3]) rest.push(await submit(doomed, `${target.origin}/rest?${n}`, { queue: 'k' }))
    dying = false
    await doomed.kill()
    const began = performance.now()
    const done = await finishes(heir, first.body.operationId, 30_000)
    expect(performance.now() - began).toBeLessThan(10_000)
    expect(done).toMatchObject({ status: 'completed', attempt: 2 })
    for (const { body } of rest) expect((await finishes(heir, body.operationId)).status).toBe('completed')
    expect(target.calls.map((c) => c.path)).toEqual(['/first', '/first', '/rest?1', '/rest?2', '/rest?3'])
    await target.close()
  }, 60_000)

  it('the embedded database survives its server and is taken over by the next start', async () => {
    const env = { SPILLWAY_DATA_DIR: join(dir, 'data'), SPILLWAY_LEASE_SECONDS: '2' }
    const server = await startServer(env)
    await post(server, '/api/v1/lanes/pause', { queue: 'q' })
    const ids = []
    for (let n = 0; n < 20; n++) ids.push((await submit(server, `${server.origin}/demo/echo`)).body.operationId)
    await server.kill()
    const next = await startServer({
      ...env,
      SPILLWAY_FORWARD_ALLOW: server.origin,
      SPILLWAY_PORT: String(server.port),
    })
    await post(next, '/api/v1/lanes/resume', { queue: 'q' })
    for (const { status } of await allFinish(next, ids)) expect(status).toBe('completed')
    expect(await next.stop()).toEqual({ code: 0, signal: null })
  }, 60_000)

  it('of one instance under load: whatever it had answered with 2xx is done', async () => {
    const target = await startTarget()
    const env = {
      DATABASE_URL: own.url,
      SPILLWAY_FORWARD_ALLOW: target.origin,
      SPILLWAY_LEASE_SECONDS: '2',
    }
    const [doomed, heir] = await Promise.all([startServer(env), startServer(env)])
    const accepted: string[] = []
    const load = Array.from({ length: 16 }, async (_, n) => {
      for (;;) {
        const answer = await submit(doomed, `${target.origin}/l`, { queue: `l${n % 4}` }).catch(() => undefined)
        if (answer === undefined) return
        if (answer.status < 300) accepted.push(answer.body.operationId)
      }
    })
    await until('some are accepted', () => accepted.length > 300)
    await doomed.kill()
    await Promise.all(load)
    for (const { status } of await allFinish(heir, accepted, 30_000)) expect(status).toBe('completed')
    await target.close()
  }, 60_000)
})
