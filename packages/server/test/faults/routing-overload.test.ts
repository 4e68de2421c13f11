/** The overloads of the router's intake, scaled to seconds; in full size: `npm run chaos -- --routing`. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { findNats } from '../../../spillway/test/setup/nats.js'
import { statuses } from '../petitions-fleet.js'
import { drill } from '../routing-drill.js'
import type { Bounds, Evidence, Scenario } from '../routing-evidence.js'
import { type RoutingFleet, startRoutingFleet, task } from '../routing-fleet.js'
import { judge, type Rule, rules } from '../routing-verdict.js'
import { FleetWatch } from '../routing-watch.js'
import { type Answer, post, until } from '../server-process.js'

const found = await findNats()

const never = [1_000_000, 2_000_000, 3_000_000] as const
const bounds: Bounds = { backlog: [10, 40, 150], latency: [100, 400, 1_000], inflight: [10, 40, 80] }
const scaled = {
  ...{
    detectionMaxMs: 1_500,
    viaGateway: 10,
    hopeless: 5,
    checkIntervalSeconds: 0.2,
    checkTimeoutMs: 1_000,
    decidePerMinute: 50,
  },
} as const

/** Where one signal is tried, the others are out of its way. */
const scenarios: Scenario[] = [
  {
    ...{ ...scaled, name: 'backlog', messages: 300, delayMs: 50, concurrency: [3, 3] },
    ...{ bounds: { ...bounds, latency: never, inflight: never }, passes: ['backlog'] },
  },
  {
    ...{ ...scaled, name: 'latency', messages: 240, overMs: 1_000, delayMs: 200, concurrency: [8, 8] },
    ...{ bounds: { ...bounds, backlog: never, inflight: never }, passes: ['latency'] },
  },
  {
    ...{ ...scaled, name: 'in-flight', messages: 400, delayMs: 1_000, concurrency: [100, 100] },
    ...{ bounds: { ...bounds, backlog: never, latency: never }, passes: ['inflight'] },
  },
  {
    ...{ ...scaled, name: 'combined', messages: 800, delayMs: 500, concurrency: [100, 20] },
    ...{ bounds, passes: ['backlog', 'latency', 'inflight'] },
  },
]

/** Its backlog comes from the last heartbeat, which may be a second old. */
const withoutNats: Scenario = {
  ...{
    ...scaled,
    name: 'backlog of the operation queue',
    messages: 160,
    hopeless: 0,
    delayMs: 100,
    concurrency: [2, 2],
  },
  ...{ bounds: { backlog: [5, 15, 40], latency: never, inflight: never }, passes: ['backlog'], detectionMaxMs: 2_500 },
}

/** Beyond the waits of the drill itself, which tell what they waited for; and for those before it. */
const playMaxMs = 300_000

/**
 * One load at a time, each in the machine's whole time; meanwhile the one before recovers, which is ten seconds of
 * waiting for nothing but the clock.
 */
let lastLoad: Promise<void> = Promise.resolve()
async function inTurn<T>(play: (onLoadOver: () => void) => Promise<T>): Promise<T> {
  const before = lastLoad
  let onLoadOver = (): void => undefined
  lastLoad = new Promise((resolve) => {
    onLoadOver = resolve
  })
  await before
  return play(onLoadOver).finally(onLoadOver)
}

function judged(scenario: Scenario, nats: boolean): void {
  let database: TestDatabase
  let evidence: Evidence

  beforeAll(async () => {
    database = await freshDatabase()
    evidence = await inTurn((onLoadOver) => drill(scenario, { databaseUrl: database.url, nats, onLoadOver }))
  }, playMaxMs)
  afterAll(() => database?.drop())

  it.each(Object.entries(rules) as [Rule, string][])('never %s: %s', (rule) => {
    expect(judge(evidence).filter((finding) => finding.rule === rule)).toEqual([])
  })
}

describe.skipIf('missing' in found).each(scenarios.map((one) => [one.name, one] as const))(
  'an overload by %s',
  { concurrent: true },
  (_, one) => {
    judged(one, true)
  },
)

describe(`an overload by the ${withoutNats.name}`, { concurrent: true }, () => {
  judged(withoutNats, false)
})

/** Tightened: halved, but not below 10; what is below that already stays as it is. */
const limits = {
  decide: { calm: 30, tightened: 15 },
  messages: { calm: 12, tightened: 10 },
  registry: { calm: 4, tightened: 4 },
}

interface Adjusted {
  counted: number
  logged: number
}

describe.skipIf('missing' in found)('a backlog at critical', { concurrent: true }, () => {
  let database: TestDatabase
  let fleet: RoutingFleet
  let watch: FleetWatch
  /** Of one tenant each, while the gateway says warning. */
  let decisions: Answer[]
  let message: Answer
  let others: Answer[]
  let afterwards: Answer
  let before: Adjusted

  const adjusted = async (): Promise<Adjusted> => ({
    counted: await watch.counted('gateway_rate_limit_backpressure_adjustment_total'),
    logged: fleet.gateway.logs().filter(({ msg }) => msg === 'Backpressure active: reducing rate limits').length,
  })

  beforeAll(() => inTurn(play), playMaxMs)
  afterAll(async () => {
    await watch?.stop()
    await fleet?.close()
    await database?.drop()
  })

  async function play(onLoadOver: () => void): Promise<void> {
    database = await freshDatabase()
    fleet = await startRoutingFleet({
      databaseUrl: database.url,
      nats: true,
      env: {
        ...{ ROUTER_QUEUE_WARN: '10', ROUTER_QUEUE_CRIT: '40', ROUTER_QUEUE_OVERLOAD: '100000' },
        ...{ ROUTER_LATENCY_CRIT_MS: '60000', ROUTER_LATENCY_OVERLOAD_MS: '90000' },
        ...{ ROUTER_SIMULATE_DELAY_MS: '50', GATEWAY_BACKPRESSURE_CHECK_INTERVAL_SECONDS: '0.2' },
        GATEWAY_RATE_LIMIT_ROUTES_DECIDE_LIMIT: `${limits.decide.calm}`,
        GATEWAY_RATE_LIMIT_MESSAGES_LIMIT: `${limits.messages.calm}`,
        GATEWAY_RATE_LIMIT_REGISTRY_LIMIT: `${limits.registry.calm}`,
      },
      routers: [{ ROUTER_CONCURRENCY: '3' }, { ROUTER_CONCURRENCY: '3' }],
    })
    watch = new FleetWatch(fleet)
    await until('all to be calm', () => watch.status === 'inactive')
    before = await adjusted()
    const { gateway, stranger } = fleet
    const publish = (): Promise<void> | undefined => stranger?.publish(task(), { answered: false })
    await Promise.all(Array.from({ length: 400 }, publish))
    await until('the gateway to say warning', () => watch.status === 'warning')
    const tenant = 'one of them'
    const ofTenant = Array.from({ length: limits.decide.tightened + 5 }, () => task({ tenant_id: tenant }))
    const block = { type: 'block', version: '1.0.0' }
    const policy = { policy_id: 'p', providers: [{ provider_id: 'a', expected_latency_ms: 1, expected_cost: 1 }] }
    const asked = Promise.all(ofTenant.map((one) => post(gateway, '/api/v1/routes/decide', one)))
    message = await post(gateway, '/api/v1/messages', task())
    others = [await post(gateway, '/api/v1/registry/blocks', block), await post(gateway, '/api/v1/policies', policy)]
    decisions = await asked
    onLoadOver()
    await until('the end of it', () => watch.status === 'inactive' && watch.level === 0)
    afterwards = await post(gateway, '/api/v1/routes/decide', task())
  }

  it('blocks nothing', () => {
    expect([message, ...others].map(({ status }) => status)).toEqual([202, 201, 201])
  })

  it('halves the limit of decisions, and enforces it', () => {
    const { tightened } = limits.decide
    expect(statuses(decisions)).toEqual({ 200: tightened, 429: decisions.length - tightened })
  })

  it.each([
    ['decisions', () => decisions[0], 'routes_decide', limits.decide.tightened],
    ['messages', () => message, 'messages', limits.messages.tightened],
    ['the registry', () => others[0], 'registry', limits.registry.tightened],
  ])('returns the tightened limit of %s', (_, answer, name, limit) => {
    expect(answer()?.headers.get('ratelimit-policy')).toBe(`"${name}";q=${limit};w=60`)
  })

  it('counts and logs one adjustment', async () => {
    expect(await adjusted()).toEqual({ counted: before.counted + 1, logged: before.logged + 1 })
  })

  it('restores the limits when it is over', () => {
    expect(afterwards.headers.get('ratelimit-policy')).toBe(`"routes_decide";q=${limits.decide.calm};w=60`)
  })

  it('is never active, neither at the routers nor at the gateway', () => {
    const active = Object.values(watch.intakes).flatMap((samples) => samples.map((sample) => sample.active))
    expect(new Set(active)).toEqual(new Set([0]))
    expect(watch.gateway.map(({ status }) => status)).not.toContain('active')
  })
})
