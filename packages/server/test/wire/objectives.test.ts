/** Objectives: exact over processes, and over windows by the database's clock. */
import type { ObjectiveName } from '@spillway/protocol/wire'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import type { Intake } from '../../../spillway/src/intake/intake.js'
import { type Bench, bench, eventually, loggingTo, overriding } from '../../../spillway/test/pipeline-fixture.js'
import { createMetrics, type Metrics } from '../../src/prometheus/metrics.js'
import { Objectives } from '../../src/workloads/objectives/index.js'
import { createObjectiveMetrics } from '../../src/workloads/objectives/metrics.js'
import { objectiveRoutes } from '../../src/workloads/objectives/routes.js'
import { listening } from '../alerts-fixture.js'
import { sample } from '../server-process.js'

let b: Bench
let metrics: Metrics
beforeEach(async () => {
  b = await bench()
  metrics = createMetrics({ runtime: false })
})
afterEach(() => b.close())

const hour = 3_600_000

async function counting(flushMs = 20, intake?: Intake): Promise<Objectives> {
  const own = createMetrics({ runtime: false })
  metrics = own
  const on = intake ?? (await b.intake())
  return new Objectives(on, {
    schema: '"spillway"',
    log: loggingTo(b.logged),
    metrics: createObjectiveMetrics(own.registry),
    timing: { flushMs, readMs: 20, sweepMs: 20 },
  })
}
/** The database's clock stands at so long after a full hour. */
const clockAt = (ms: number) =>
  b.sql(`CREATE OR REPLACE FUNCTION spillway.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS
    $$ SELECT timestamptz '2026-11-16T10:00:00Z' + ${ms} * interval '1 ms' $$`)
const of = async (objectives: Objectives, name: ObjectiveName) => {
  const found = (await objectives.read()).find((objective) => objective.name === name)
  if (found === undefined) throw new Error(`no objective ${name}`)
  return found
}
const counted = (objectives: Objectives, name: ObjectiveName, total: number) =>
  eventually(async () => {
    const found = await of(objectives, name)
    return found.total === total ? found : undefined
  }, `${name} of ${total}`)

describe('objectives', () => {
  it('have their full budget while nothing was counted', async () => {
    const objectives = await counting()
    expect(await objectives.read()).toEqual(
      [
        { name: 'availability', target: 0.999, window: '30d' },
        { name: 'latency', target: 0.99, window: '1h' },
        { name: 'depth', target: 0.99, window: '1h' },
      ].map((kind) => ({ ...kind, sli: null, good: 0, total: 0, error_budget_left: 1, burn_rate: 0, met: true })),
    )
    await objectives.close()
  })

  it('are exact over processes that count at once', async () => {
    const all = await Promise.all([counting(5), counting(5), counting(5)])
    for (let n = 0; n < 1_000; n++) {
      for (const objectives of all) objectives.count('latency', n % 50 === 0 ? 0 : 1, 1)
      if (n % 100 === 0) await new Promise(setImmediate)
    }
    await Promise.all(all.map((objectives) => objectives.close()))
    const [first] = all
    if (first === undefined) throw new Error('nobody counted')
    const found = await of(first, 'latency')
    expect(found).toMatchObject({ good: 2_940, total: 3_000, sli: 0.98, met: false })
    // 60 errors where 30 are allowed.
    expect(found.error_budget_left).toBeCloseTo(-1, 9)
    expect(found.burn_rate).toBeCloseTo(2, 9)
  })

  it('count a batch once whose answer was lost', async () => {
    let lost = 0
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          statements: {
            ...store.statements,
            release: async <R extends Record<string, unknown>>(text: string, values?: readonly unknown[]) => {
              const released = await store.statements.release<R>(text, values)
              if (lost++ < 2) throw Object.assign(new Error('the answer is lost'), { code: 'unavailable' })
              return released
            },
          },
        }),
    })
    const objectives = new Objectives(intake, {
      schema: '"spillway"',
      log: loggingTo(b.logged),
      metrics: createObjectiveMetrics(createMetrics({ runtime: false }).registry),
      timing: { flushMs: 10, readMs: 600_000, sweepMs: 600_000 },
    })
    objectives.count('availability', 3, 4)
    await eventually(() => lost > 2 || undefined, 'it to be sent again')
    objectives.count('availability', 1, 1)
    expect(await counted(objectives, 'availability', 5)).toMatchObject({ good: 4 })
    await objectives.close()
  })

  it('have parts of seconds', async () => {
    const objectives = await counting()
    objectives.count('depth', 0.25, 1)
    objectives.count('depth', 0.5, 0.5)
    expect(await counted(objectives, 'depth', 1.5)).toMatchObject({ good: 0.75, sli: 0.5 })
    await objectives.close()
  })

  it('forget the minute that leaves the hour, and keep it for 30 days where they count so long', async () => {
    const objectives = await counting()
    await clockAt(0)
    objectives.count('latency', 0, 10)
    objectives.count('availability', 0, 10)
    await counted(objectives, 'latency', 10)
    await clockAt(30 * 60_000)
    objectives.count('latency', 90, 90)
    objectives.count('availability', 90, 90)
    await counted(objectives, 'latency', 100)
    await clockAt(hour - 1)
    expect(await of(objectives, 'latency')).toMatchObject({ good: 90, total: 100 })
    await clockAt(hour)
    expect(await of(objectives, 'latency')).toMatchObject({ good: 90, total: 90, burn_rate: 0 })
    expect(await of(objectives, 'availability')).toMatchObject({ good: 90, total: 100, burn_rate: 0, met: false })
    await clockAt(30 * 24 * hour - 1)
    expect(await of(objectives, 'availability')).toMatchObject({ total: 100 })
    await clockAt(30 * 24 * hour)
    expect(await of(objectives, 'availability')).toMatchObject({ total: 0, sli: null, error_budget_left: 1 })
    await objectives.close()
  })

  it('remove buckets that no window can see any more', async () => {
    const objectives = await counting()
    await clockAt(0)
    objectives.count('latency', 1, 1)
    await counted(objectives, 'latency', 1)
    const spans = async () =>
      (await b.sql<{ span: string }>('SELECT span FROM spillway.objective_counts ORDER BY span')).map(
        ({ span }) => span,
      )
    expect(await spans()).toEqual(['hour', 'minute'])
    await clockAt(2 * hour + 1)
    await eventually(async () => (await spans()).length === 1 || undefined, 'the minute to go')
    expect(await spans()).toEqual(['hour'])
    await clockAt(31 * 24 * hour + 1)
    await eventually(async () => (await spans()).length === 0 || undefined, 'the hour to go')
    await objectives.close()
  })

  it('are returned to every caller, and shown as metrics', async () => {
    const objectives = await counting()
    const app = await listening(objectiveRoutes(objectives))
    objectives.count('latency', 995, 1_000)
    await counted(objectives, 'latency', 1_000)
    const { status, body } = await app.get('/api/v1/slo', 'consume')
    expect(status).toBe(200)
    expect(body.objectives.map(({ name }) => name)).toEqual(['availability', 'latency', 'depth'])
    expect(body.objectives[1]).toMatchObject({ sli: 0.995, good: 995, total: 1_000, met: true })
    const burns = async () => sample(await metrics.scrape(), 'spillway_slo_burn_rate', { objective: 'latency' })
    await eventually(async () => ((await burns()) ?? 0) > 0 || undefined, 'the gauge')
    expect(await burns()).toBeCloseTo(0.5, 9)
    const left = sample(await metrics.scrape(), 'spillway_slo_error_budget_left', {
      objective: 'latency',
    })
    expect(left).toBeCloseTo(0.5, 9)
    await app.close()
    await objectives.close()
  })
})
