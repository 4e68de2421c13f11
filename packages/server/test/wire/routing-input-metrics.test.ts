/** What routing shows of itself: its description, its settings, its metrics. */
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { type NatsServer, startNats } from '../../../spillway/test/setup/nats.js'
import { openTables } from '../petition-calls.js'
import { bytesOf, decide, routeTask, stranger, unhurried } from '../routing-input-calls.js'
import { endAll, get, runProgram, sample, startServer, until } from '../server-process.js'

let nats: NatsServer
let database: TestDatabase

beforeAll(async () => {
  nats = await startNats()
  database = await freshDatabase()
})

// A server that a failed test left would take the messages of the next.
afterEach(endAll)

afterAll(async () => {
  await nats.stop()
  await database.drop()
})

describe('what routing shows of itself', () => {
  it('the description lists every route', async () => {
    const server = await startServer({ DATABASE_URL: database.url })
    const { paths } = (await get(server, '/openapi.json')).body
    const listed = Object.entries(paths).flatMap(([path, methods]) => Object.keys(methods).map((m) => `${m} ${path}`))
    expect(listed).toEqual(
      expect.arrayContaining([
        ...['post /api/v1/routes/decide', 'get /api/v1/routes/decide/{messageId}', 'post /api/v1/messages'],
        ...['post /api/v1/policies', 'get /api/v1/policies', 'post /api/v1/policies/dry-run'],
        ...['get /api/v1/policies/{policyId}', 'delete /api/v1/policies/{policyId}'],
        ...['post /api/v1/registry/blocks', 'get /api/v1/registry/blocks'],
        ...['get', 'put', 'delete'].map((method) => `${method} /api/v1/registry/blocks/{type}/{version}`),
        ...['get /api/v1/routes/dead-letters', 'delete /api/v1/routes/dead-letters'],
        ...['post /api/v1/routes/dead-letters/redrive', 'get /api/v1/alerts', 'get /api/v1/slo'],
      ]),
    )
  })

  it('`spillway config` lists the settings, and hides the address of the broker', async () => {
    const { stdout } = await runProgram({ NATS_URL: 'nats://me:hush@localhost' }, { args: ['config', '--json'] })
    const names = (JSON.parse(stdout) as { name: string }[]).map(({ name }) => name)
    expect(names).toEqual(
      expect.arrayContaining([
        ...['NATS_URL', 'ROUTER_MAX_DELIVER', 'ROUTER_CONCURRENCY', 'ROUTER_SIMULATE_DELAY_MS'],
        ...['ROUTER_BACKPRESSURE_POLICY', 'ROUTER_BACKPRESSURE_RETRY_AFTER_SECONDS'],
        ...['WARN', 'CRIT', 'OVERLOAD'].flatMap((level) => [
          ...[`ROUTER_QUEUE_${level}`, `ROUTER_LATENCY_${level}_MS`, `ROUTER_INFLIGHT_${level}`],
        ]),
        ...['GATEWAY_ROUTER_METRICS_URL', 'GATEWAY_BACKPRESSURE_CHECK_INTERVAL_SECONDS'],
        ...['GATEWAY_BACKPRESSURE_TIMEOUT_MS', 'GATEWAY_RATE_LIMIT_ROUTES_DECIDE_LIMIT'],
        ...['GATEWAY_RATE_LIMIT_MESSAGES_LIMIT', 'GATEWAY_RATE_LIMIT_REGISTRY_LIMIT'],
        ...['BACKPRESSURE_RATE_LIMIT_REDUCTION', 'BACKPRESSURE_RATE_LIMIT_MIN'],
        ...['ALERT_WEBHOOK_URL', 'ALERT_WEBHOOK_SECRET'],
      ]),
    )
    expect(stdout).not.toContain('hush')
  })

  it.each([
    ['ROUTER_QUEUE_WARN', { ROUTER_QUEUE_WARN: '100', ROUTER_QUEUE_CRIT: '100' }],
    ['ROUTER_QUEUE_CRIT', { ROUTER_QUEUE_CRIT: '2000' }],
    ['ROUTER_LATENCY_WARN_MS', { ROUTER_LATENCY_WARN_MS: '2000' }],
    ['ROUTER_INFLIGHT_OVERLOAD', { ROUTER_INFLIGHT_OVERLOAD: '200' }],
    ['ROUTER_MAX_DELIVER', { ROUTER_MAX_DELIVER: '0' }],
    ['NATS_URL', { NATS_URL: 'http://localhost' }],
    ['BACKPRESSURE_RATE_LIMIT_REDUCTION', { BACKPRESSURE_RATE_LIMIT_REDUCTION: '2' }],
    ['ROUTER_QUEUE_WARM', { ROUTER_QUEUE_WARM: '1' }],
  ])('a wrong %s does not start, and is named', async (name, env) => {
    const { code, stderr } = await runProgram({ ...(env as Record<string, string>) }, { args: ['config'] })
    expect(code).not.toBe(0)
    expect(stderr).toContain(name)
  })
})

describe('metrics of the router and the gateway', () => {
  const names = [
    ...['router_jetstream_pending_messages', 'router_jetstream_ack_pending_messages'],
    ...['p50', 'p95', 'p99'].map((p) => `router_intake_processing_latency_${p}`),
    ...['router_jetstream_delivered_messages_total', 'router_jetstream_redelivered_messages_total'],
    ...['router_intake_processing_latency_seconds_count', 'router_intake_backpressure_active'],
    ...['router_intake_inflight_messages', 'router_intake_inflight_messages_max'],
    ...['router_intake_backpressure_triggered_total', 'router_intake_backpressure_rejections_total'],
    'gateway_rate_limit_backpressure_adjustment_total',
  ]

  /** Waits until this can be said of each of them, at whatever time. */
  async function eachIs(server: { origin: string }, isSo: (value: number | undefined) => boolean): Promise<void> {
    const left = new Set(names)
    const look = async (): Promise<boolean> => {
      const { text } = await get(server, '/metrics')
      for (const name of left) if (isSo(sample(text, name))) left.delete(name)
      return left.size === 0
    }
    // Not the error of the wait: what is left says more.
    await until('it is so of all', look, 5_000).catch(() => expect([...left]).toEqual([]))
  }

  it('exist before the first message', async () => {
    const server = await startServer({ ...unhurried, DATABASE_URL: database.url, NATS_URL: nats.url })
    await eachIs(server, (value) => value === 0)
    const { text } = await get(server, '/metrics')
    expect(sample(text, 'gateway_backpressure_status', { status: 'inactive' })).toBe(1)
  })

  it('move', async () => {
    const server = await startServer({
      ...{ ...unhurried, DATABASE_URL: database.url, NATS_URL: nats.url },
      ...{ ROUTER_SIMULATE_DELAY_MS: '150', ROUTER_CONCURRENCY: '2' },
      ...{ ROUTER_QUEUE_WARN: '4', ROUTER_QUEUE_CRIT: '8', ROUTER_QUEUE_OVERLOAD: '16' },
    })
    const tables = openTables(database.url)
    const outside = await stranger(nats.url)
    // What cannot be kept is handed out again.
    await tables.query('ALTER TABLE rt_keys RENAME TO rt_keys_away')
    await outside.publish(bytesOf(routeTask({ idempotency_key: 'again' })))
    await until('it failed once', () => server.stdout().includes('a message failed'))
    await tables.query('ALTER TABLE rt_keys_away RENAME TO rt_keys')
    // Work for as long as anybody looks.
    await Promise.all(Array.from({ length: 400 }, () => outside.publish(bytesOf(routeTask()))))
    const text = await until('the gateway says that the routers are overloaded', async () => {
      const { text } = await get(server, '/metrics')
      return sample(text, 'gateway_backpressure_status', { status: 'active' }) === 1 && text
    })
    expect(sample(text, 'gateway_backpressure_status', { status: 'inactive' })).toBe(0)
    expect((await decide(server, routeTask())).status).toBe(503)
    await eachIs(server, (value) => (value ?? 0) > 0)
    await tables.close()
    await outside.close()
  }, 60_000)
})
