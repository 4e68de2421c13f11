/** /health/ready: yes while a write can be accepted, and only then. */
import { randomBytes } from 'node:crypto'
import pg from 'pg'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { findNats, freePort, startNats } from '../../../spillway/test/setup/nats.js'
import { endAll, get, post, type ServerProcess, startServer, submit, until, untilReady } from '../server-process.js'

let database: TestDatabase
let role: string
let url: string
let admin: pg.Client

beforeAll(async () => {
  database = await freshDatabase({ empty: true })
  admin = new pg.Client({ connectionString: database.url })
  await admin.connect()
  // Not a superuser: those may connect and write when others may not.
  role = `role_${process.pid}_${randomBytes(4).toString('hex')}`
  await admin.query(`CREATE ROLE ${role} LOGIN PASSWORD 'x'`)
  const name = new URL(database.url).pathname.slice(1)
  await admin.query(`GRANT CREATE ON DATABASE ${name} TO ${role}`)
  const as = new URL(database.url)
  as.username = role
  as.password = 'x'
  url = as.href
})
beforeEach(() => admin.query(`ALTER ROLE ${role} RESET ALL`))
afterEach(async () => {
  await endAll()
  await admin.query(`ALTER ROLE ${role} CONNECTION LIMIT -1`)
})
afterAll(async () => {
  await admin.query(`DROP OWNED BY ${role} CASCADE`)
  await admin.query(`DROP ROLE ${role}`)
  await admin.end()
  await database.drop()
})

const push = (server: ServerProcess) =>
  post(server, '/api/v1/push', { items: [{ queue: 'q', payload: { n: 1 } }] }).then(({ status }) => status)

/** Ends sessions of the server under test, by a pattern of their names. */
const terminate = (names: string) =>
  admin.query(
    `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1 AND application_name LIKE $2`,
    [role, names],
  )

async function expectUnready(server: ServerProcess, detail: RegExp): Promise<void> {
  const ready = await until('it is not ready', async () => {
    const answer = await get(server, '/health/ready')
    return answer.status === 503 && answer
  })
  expect(ready.body.failing).toEqual(['store'])
  expect(ready.body.checks.store).toEqual({
    ok: false,
    detail: expect.stringMatching(detail),
    routes: ['/api/v1/*', '/v1/*'],
  })
}

describe('the store', () => {
  it('others hold all connections: not ready while nothing can be accepted, and ready again with the first that can', async () => {
    const server = await startServer({ DATABASE_URL: url })
    expect(await push(server)).toBe(201)
    const worker = await workerOf()
    await admin.query(`ALTER ROLE ${role} CONNECTION LIMIT 0`)
    await terminate('spillway')
    await expectUnready(server, /not available/)
    expect(await push(server)).toBe(503)
    await admin.query(`ALTER ROLE ${role} CONNECTION LIMIT -1`)
    await untilReady(server, 10_000)
    expect(await push(server)).toBe(201)
    // The heartbeat had a connection of its own all the time.
    expect(await workerOf()).toBe(worker)
  })

  it('a database that has become read-only', async () => {
    const server = await startServer({ DATABASE_URL: url })
    await admin.query(`ALTER ROLE ${role} SET default_transaction_read_only = on`)
    await terminate('spillway%')
    await expectUnready(server, /not available/)
    expect(await push(server)).toBe(503)
    await admin.query(`ALTER ROLE ${role} RESET default_transaction_read_only`)
    await terminate('spillway%')
    await untilReady(server, 10_000)
    expect(await push(server)).toBe(201)
  })

  it('a halt is no reason', async () => {
    const server = await startServer({ DATABASE_URL: url })
    expect((await post(server, '/api/v1/admin/halt', { reason: 'drill' })).status).toBeLessThan(300)
    expect((await get(server, '/health/ready')).status).toBe(200)
    await fetch(`${server.origin}/api/v1/admin/halt`, { method: 'DELETE' })
  })

  async function workerOf(): Promise<unknown> {
    const { rows } = await admin.query('SELECT id FROM spillway.workers WHERE until > now()')
    expect(rows).toHaveLength(1)
    return rows[0]?.id
  }
})

describe('NATS', () => {
  const checksOf = async (server: ServerProcess) => (await get(server, '/health')).body.checks
  const brokerRoutes = ['/api/v1/routes/decide', '/api/v1/routes/dead-letters']

  it('fails only routes that need it, and they are named', async () => {
    const found = await findNats()
    expect(found).toHaveProperty('program')
    const port = await freePort()
    const env = { DATABASE_URL: url, NATS_URL: `nats://127.0.0.1:${port}` }
    const all = await startServer(env, { ready: false })
    await untilReady(all)
    expect((await checksOf(all)).nats).toMatchObject({ ok: false, routes: brokerRoutes })
    expect((await submit(all, `${all.origin}/demo/echo`)).status).toBe(201)
    const router = await startServer({ ...env, SPILLWAY_ROLES: 'router' }, { ready: false })
    await until('its store is there', async () => (await checksOf(router)).store?.ok)
    const ready = await get(router, '/health/ready')
    expect({ status: ready.status, failing: ready.body.failing }).toEqual({ status: 503, failing: ['nats'] })
    const nats = await startNats({ port })
    await untilReady(router)
    expect((await checksOf(router)).nats).toEqual({ ok: true })
    await Promise.all([all.stop(), router.stop()])
    await nats.stop()
  }, 60_000)
})
