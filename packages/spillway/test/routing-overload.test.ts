/** The overloads of the router's intake, scaled to seconds; in full size: `npm run chaos -- --routing`. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { drill } from './routing-drill.js'
import type { Bounds, Evidence, Scenario } from './routing-evidence.js'
import { figures, judge, type Rule, rules } from './routing-verdict.js'
import { freshDatabase, type TestDatabase } from './setup/database.js'
import { findNats } from './setup/nats.js'

const found = await findNats()

const never = [1_000_000, 2_000_000, 3_000_000] as const
const bounds: Bounds = { backlog: [10, 40, 150], latency: [100, 400, 1_000], inflight: [10, 40, 80] }
const scaled = {
  ...{ viaGateway: 10, hopeless: 5, checkIntervalSeconds: 0.2, checkTimeoutMs: 1_000, decidePerMinute: 50 },
} as const

/** Where one signal is tried, the others are out of its way. */
const scenarios: Scenario[] = [
  {
    ...{ ...scaled, name: 'backlog', messages: 400, delayMs: 50, concurrency: [3, 3] },
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

const withoutNats: Scenario = {
  ...{
    ...scaled,
    name: 'backlog of the operation queue',
    messages: 400,
    hopeless: 0,
    delayMs: 50,
    concurrency: [3, 3],
  },
  ...{ bounds: { ...bounds, latency: never, inflight: never }, passes: ['backlog'] },
}

const playMaxMs = 90_000

function judged(scenario: Scenario, nats: boolean): void {
  let database: TestDatabase
  let evidence: Evidence

  beforeAll(async () => {
    database = await freshDatabase()
    evidence = await drill(scenario, { databaseUrl: database.url, nats })
    if (process.env.SPILLWAY_TEST_FIGURES) console.log(scenario.name, figures(evidence))
  }, playMaxMs)
  afterAll(() => database?.drop())

  it.each(Object.entries(rules) as [Rule, string][])('never %s: %s', (rule) => {
    expect(judge(evidence).filter((finding) => finding.rule === rule)).toEqual([])
  })
}

describe.skipIf('missing' in found).each(scenarios.map((one) => [one.name, one] as const))(
  'an overload by %s',
  (_, one) => {
    judged(one, true)
  },
)

describe(`an overload by the ${withoutNats.name}`, () => {
  judged(withoutNats, false)
})
