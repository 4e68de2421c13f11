/** What the routing workload needs goes away and comes back: broker, database, the routers' metrics. */
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { startEmbedded } from '@spillway/embedded-postgres'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { freePort, type NatsServer, startNats } from '../../../spillway/test/setup/nats.js'
import { countOf, dishonest, load, metric, openParts, type Parts, patient } from '../routing-faults-fleet.js'
import {
  createdPolicy,
  deadLetters,
  deadLettersPath,
  decide,
  decidePath,
  decisionForm,
  expectRefused,
  hand,
  routeTask,
  unhurried,
} from '../routing-input-calls.js'
import {
  type Answer,
  endAll,
  finishes,
  get,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
  until,
} from '../server-process.js'

afterEach(endAll)

describe('a broker that is not there at the start', () => {
  let database: TestDatabase
  let port: number
  let server: ServerProcess
  let nats: NatsServer | undefined

  beforeAll(async () => {
    database = await freshDatabase()
  })

  afterEach(async () => {
    await nats?.stop()
    nats = undefined
  })

  afterAll(() => database.drop())

  const startAlone = async () => {
    port = await freePort()
    server = await startServer(
      {
        ...{ ...unhurried, DATABASE_URL: database.url, NATS_URL: `nats://127.0.0.1:${port}` },
        ...{ SPILLWAY_RETRY_BASE_MS: '100', SPILLWAY_RETRY_MAX_MS: '500' },
      },
      { ready: false },
    )
    await until('the store is there', async () => (await get(server, '/health')).body.checks.store?.ok)
  }

  it('is named by health, which is degraded; the rest can be accepted', async () => {
    await startAlone()
    expect((await get(server, '/health/ready')).status).toBe(200)
    const health = await get(server, '/health')
    expect({ status: health.status, is: health.body.status }).toEqual({ status: 200, is: 'degraded' })
  })

  it('is distinguished from one without JetStream', async () => {
    await startAlone()
    nats = await startNats({ port, jetstream: false })
    const detail = await until('health says what is wrong', async () => {
      const said = (await get(server, '/health')).body.checks.nats?.detail
      return said?.includes('JetStream') === true && said
    })
    expect(detail).toContain('NATS is reachable')
  })

  it('makes decide answer 503 with Retry-After', async () => {
    await startAlone()
    const answer = await decide(server, routeTask())
    expectRefused(answer, 503, 'broker_unavailable')
    expect([5, 6]).toContain(answer.body.retry_after_seconds)
  })

  it('does not keep anything else from working', async () => {
    await startAlone()
    await createdPolicy(server)
    expect((await submit(server, `${server.origin}/demo/echo`)).status).toBe(201)
    expect((await get(server, `${decidePath}/${String(routeTask().request_id)}`)).status).toBe(404)
    expect((await get(server, '/api/v1/slo')).status).toBe(200)
    expectRefused(await get(server, deadLettersPath), 503, 'broker_unavailable')
  })

  it('is found once it is available; work accepted meanwhile is done', async () => {
    await startAlone()
    const tenant_id = `tenant-${port}`
    const accepted = await Promise.all(Array.from({ length: 5 }, () => hand(server, routeTask({ tenant_id }))))
    expect(accepted.map(({ status }) => status)).toEqual(Array(5).fill(202))
    expect((await decide(server, routeTask({ tenant_id }))).status).toBe(503)
    nats = await startNats({ port })
    await until('the broker is there', async () => (await get(server, '/health')).body.checks.nats?.ok)
    const answer = await decide(server, routeTask({ tenant_id }))
    expect(answer.body.decision).toMatchObject(decisionForm)
    // The one that was refused has not been counted.
    expect(answer.headers.get('x-ratelimit-remaining')).toBe('49')
    for (const { body } of accepted) {
      expect(await finishes(server, body.operationId)).toMatchObject({ status: 'completed', result: { ok: true } })
    }
  }, 60_000)

  it('does not keep the server from ending', async () => {
    await startAlone()
    expect(await server.stop()).toEqual({ code: 0, signal: null })
  })
})

describe('a broker that is killed under load', () => {
  let parts: Parts

  beforeAll(async () => {
    parts = await openParts()
  })

  afterAll(() => parts.close())

  it('costs no accepted message, and decide is answered or honestly refused', async () => {
    const server = await parts.start()
    const running = load(server, decidePath, 64)
    await until('decisions come', () => countOf(running.answers, 200) > 200)
    const before = await Promise.all(Array.from({ length: 25 }, () => hand(server, routeTask())))
    await parts.nats.kill()
    const meanwhile = await Promise.all(Array.from({ length: 25 }, () => hand(server, routeTask())))
    await until('decide is refused', () => countOf(running.answers, 503) > 0)
    await parts.nats.restart()
    const seen = countOf(running.answers, 200)
    await until('decisions come again', () => countOf(running.answers, 200) > seen + 100, 20_000)
    const answers = await running.stop()
    expect(dishonest(answers)).toEqual([])
    const messages = [...before, ...meanwhile]
    expect(messages.map(({ status }) => status)).toEqual(Array(50).fill(202))
    for (const { body } of messages) {
      expect(await finishes(server, body.operationId, 40_000)).toMatchObject({
        ...{ status: 'completed', result: { ok: true, decision: decisionForm } },
      })
    }
    expect(await deadLetters(server)).toEqual([])
    expect((await get(server, '/api/v1/dead-letters')).body.items).toEqual([])
    expect(await server.stop()).toEqual({ code: 0, signal: null })
  }, 120_000)
})

describe('a database that is killed under load', () => {
  it('decide is answered or refused, and recovers by itself', async () => {
    const nats = await startNats()
    const dir = await mkdtemp(join(tmpdir(), 'spillway-routing-faults-'))
    const log = { debug() {}, info() {}, warn() {}, error() {} }
    const settings = { min_wal_size: '80MB', shared_buffers: '16MB' }
    const own = await startEmbedded({ dataDir: join(dir, 'data'), log, settings })
    try {
      const server = await startServer({ ...patient, DATABASE_URL: own.url, NATS_URL: nats.url })
      const running = load(server, decidePath, 16)
      await until('decisions come', () => countOf(running.answers, 200) > 50)
      const killed = own.pid
      process.kill(killed, 'SIGKILL')
      await until('PostgreSQL runs again', () => own.pid !== killed, 30_000)
      const seen = countOf(running.answers, 200)
      await until('decisions come again', () => countOf(running.answers, 200) > seen + 50, 30_000)
      expect(dishonest(await running.stop())).toEqual([])
      expect(await deadLetters(server)).toEqual([])
      expect(await server.stop()).toEqual({ code: 0, signal: null })
    } finally {
      await endAll()
      await own.stop()
      await nats.stop()
      await rm(dir, { recursive: true, force: true })
    }
  }, 120_000)
})

describe("a gateway that cannot read the routers' metrics", () => {
  let parts: Parts
  let target: Target
  let isHanging: boolean

  beforeAll(async () => {
    parts = await openParts({ GATEWAY_RATE_LIMIT_ROUTES_DECIDE_LIMIT: '50' })
  })

  afterEach(() => target?.close())
  afterAll(() => parts.close())

  const isShown = (server: ServerProcess, status: string) =>
    until(`the status is ${status}`, async () => {
      return (await metric(server, 'gateway_backpressure_status', { status })) === 1
    })
  const gatewayOn = (url: string, env: Record<string, string> = {}) =>
    parts.start({
      ...{ SPILLWAY_ROLES: 'gateway,worker', GATEWAY_ROUTER_METRICS_URL: url },
      ...{ GATEWAY_BACKPRESSURE_CHECK_INTERVAL_SECONDS: '0.2', GATEWAY_BACKPRESSURE_TIMEOUT_MS: '200', ...env },
    })
  const startRouter = () => parts.start({ SPILLWAY_ROLES: 'router' })
  const limitOf = (answer: Answer) => answer.headers.get('x-ratelimit-limit')

  it('takes it for a warning after three intervals, halves the limits, and restores them when it is back', async () => {
    await startRouter()
    isHanging = false
    target = await startTarget((_, response) => {
      if (!isHanging) response.end('router_intake_backpressure_active{subject="x"} 0\n')
    })
    const gateway = await gatewayOn(`${target.origin}/metrics`)
    await isShown(gateway, 'inactive')
    expect(limitOf(await decide(gateway, routeTask()))).toBe('50')
    isHanging = true
    const began = performance.now()
    await isShown(gateway, 'unknown')
    // Three intervals, and the last answer may have come as long before as one lasts.
    expect(performance.now() - began).toBeGreaterThan(400)
    const answer = await decide(gateway, routeTask())
    expect({ status: answer.status, limit: limitOf(answer) }).toEqual({ status: 200, limit: '25' })
    expect(await metric(gateway, 'gateway_rate_limit_backpressure_adjustment_total')).toBeGreaterThanOrEqual(1)
    expect(gateway.stdout()).toContain('Backpressure active: reducing rate limits')
    isHanging = false
    await isShown(gateway, 'inactive')
    expect(limitOf(await decide(gateway, routeTask()))).toBe('50')
  }, 60_000)

  it.each(['is refused', 'answers with something else', 'answers with an error'])(
    'says unknown where the address %s',
    async (how) => {
      target = await startTarget((_, response) => {
        if (how === 'answers with an error') response.statusCode = 500
        response.end('router_intake_backpressure_active 0'.slice(how === 'answers with something else' ? 1 : 0))
      })
      const url = how === 'is refused' ? `http://127.0.0.1:${await freePort()}/metrics` : target.origin
      const gateway = await gatewayOn(url)
      // It is unknown before anybody was asked, too.
      await until('it was asked', () => gateway.stdout().includes('cannot read the metrics of the router'))
      await isShown(gateway, 'unknown')
      expect(await metric(gateway, 'gateway_backpressure_status', { status: 'inactive' })).toBe(0)
    },
  )

  it('says unknown where it has no address to ask, and keeps its limits', async () => {
    const gateway = await parts.start({ SPILLWAY_ROLES: 'gateway,worker' })
    await isShown(gateway, 'unknown')
    expect(limitOf(await hand(gateway, routeTask()))).toBe('1000000')
  })

  it('is as fast as one that can', async () => {
    await startRouter()
    target = await startTarget((call, response) => {
      if (call.path !== '/hangs') response.end('router_intake_backpressure_active{subject="x"} 0\n')
    })
    const env = { GATEWAY_RATE_LIMIT_ROUTES_DECIDE_LIMIT: '1000000' }
    const cut = await gatewayOn(`${target.origin}/hangs`, env)
    const whole = await gatewayOn(`${target.origin}/metrics`, env)
    await isShown(cut, 'unknown')
    await isShown(whole, 'inactive')
    // In turns, so that whatever else the machine does slows both alike.
    const took: Record<'cut' | 'whole', number[]> = { cut: [], whole: [] }
    for (let round = 0; round < 110; round++) {
      for (const [name, server] of [['cut', cut] as const, ['whole', whole] as const]) {
        const answers = await Promise.all(Array.from({ length: 4 }, () => decide(server, routeTask())))
        expect(dishonest(answers)).toEqual([])
        if (round >= 10) took[name].push(...answers.map(({ ms }) => ms))
      }
    }
    const p99 = (all: number[]) => all.sort((a, b) => a - b)[Math.floor(all.length * 0.99)] ?? 0
    // One that waited for the address would take at least as long as the timeout, 200 ms.
    expect(p99(took.cut)).toBeLessThan(2 * p99(took.whole) + 100)
  }, 60_000)
})
