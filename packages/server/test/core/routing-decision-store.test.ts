/** Decisions by request and by idempotency key: stored once, returned exactly, swept in time. */
import { randomUUID } from 'node:crypto'
import type { RouteDecision } from '@spillway/protocol/wire'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import type { Intake } from '../../../spillway/src/intake/intake.js'
import type { SweptBatch } from '../../../spillway/src/maintenance/sweeps.js'
import { type Bench, bench, eventually, overriding } from '../../../spillway/test/pipeline-fixture.js'
import {
  DecisionStore,
  type DecisionStoreOptions,
  type NewDecision,
} from '../../src/workloads/routing/decision-store.js'

const schema = '"spillway"'

let b: Bench
let here: Intake
let there: Intake
/** Closed when the test ends. */
const opened: DecisionStore[] = []

beforeAll(async () => {
  b = await bench()
  here = await b.intake()
  there = await b.intake()
})
afterEach(async () => {
  await Promise.all(opened.splice(0).map((one) => one.close()))
  await b.sql('TRUNCATE spillway.rt_decisions, spillway.rt_keys')
})
afterAll(() => b.close())

const decision = (provider_id = 'a'): RouteDecision => ({
  ...{ provider_id, priority: 50, expected_latency_ms: 1.5, expected_cost: 0.001, reason: 'weighted' },
})
const storeOf = (intake: Intake, options: Partial<DecisionStoreOptions> = {}) => {
  const decisions = new DecisionStore({ intake, schema, keyTtlMs: 60_000, ...options })
  opened.push(decisions)
  return decisions
}
const decided = (changes: Partial<NewDecision> = {}): NewDecision => ({
  ...{ tenant: 'acme', requestId: randomUUID(), decision: decision(), traceId: 'a'.repeat(32) },
  ...changes,
})
const digest = randomUUID()
const keyed = (key: string, of = digest, scope = 'acme') => ({ key, scope, digest: of })
/** As if so much time had passed. */
const pass = (ms: number) =>
  Promise.all(
    ['rt_decisions', 'rt_keys'].map((table) =>
      b.sql(`UPDATE spillway.${table} SET expires_at = expires_at - $1 * interval '1 ms'`, [ms]),
    ),
  )
const rows = async (table: 'rt_decisions' | 'rt_keys') =>
  Number((await b.sql<{ n: string }>(`SELECT count(*) AS n FROM spillway.${table}`))[0]?.n)

describe('decisions', () => {
  it('are found by their request, by callers of the same tenant and by operators', async () => {
    const decisions = storeOf(here)
    const one = decided()
    expect(await decisions.record(one)).toEqual({ kind: 'stored' })
    const found = { decision: one.decision, traceId: one.traceId, tenant: 'acme', requestId: one.requestId }
    expect(await decisions.find('acme', one.requestId)).toMatchObject(found)
    expect(await decisions.find(null, one.requestId.toUpperCase())).toMatchObject(found)
    expect(await decisions.find('other', one.requestId)).toBeNull()
    expect(await decisions.find('acme', randomUUID())).toBeNull()
  })

  it('of two tenants with one request id are two', async () => {
    const decisions = storeOf(here)
    const one = decided()
    await decisions.record(one)
    await decisions.record({ ...one, tenant: 'other', decision: decision('b') })
    expect((await decisions.find('acme', one.requestId))?.decision.provider_id).toBe('a')
    expect((await decisions.find('other', one.requestId))?.decision.provider_id).toBe('b')
  })

  it('of one request are the latest, also when both come in one commit', async () => {
    const decisions = storeOf(here)
    const one = decided()
    await Promise.all([decisions.record(one), decisions.record({ ...one, decision: decision('b') })])
    expect((await decisions.find('acme', one.requestId))?.decision.provider_id).toBe('b')
  })

  it('can be asked for until they expire', async () => {
    const decisions = storeOf(here, { decisionTtlMs: 10_000 })
    const one = decided()
    await decisions.record(one)
    await pass(9_000)
    expect(await decisions.find('acme', one.requestId)).not.toBeNull()
    await pass(1_000)
    expect(await decisions.find('acme', one.requestId)).toBeNull()
  })

  it('are repeated for a used key with the same task', async () => {
    const decisions = storeOf(here)
    await decisions.record(decided({ keyed: keyed('k') }))
    const retry = decided({ decision: decision('b'), keyed: keyed('k') })
    expect(await decisions.record(retry)).toEqual({ kind: 'replay', decision: decision('a') })
    expect(await decisions.find('acme', retry.requestId)).toMatchObject({ decision: decision('a') })
  })

  it('do not come for a key of another task, and nothing is kept of it', async () => {
    const decisions = storeOf(here)
    await decisions.record(decided({ keyed: keyed('k') }))
    const wrong = decided({ decision: decision('b'), keyed: keyed('k', randomUUID()) })
    expect(await decisions.record(wrong)).toEqual({ kind: 'violation' })
    expect(await decisions.find('acme', wrong.requestId)).toBeNull()
    expect(await decisions.replay(keyed('k', digest))).toEqual({ kind: 'replay', decision: decision('a') })
  })

  it('are another tenant’s own, for the same key', async () => {
    const decisions = storeOf(here)
    await decisions.record(decided({ keyed: keyed('k') }))
    expect(await decisions.record(decided({ tenant: 'other', keyed: keyed('k', randomUUID(), 'other') }))).toEqual({
      kind: 'stored',
    })
  })

  it('of many at once with one key, in two processes, are exactly one', async () => {
    const both = [storeOf(here), storeOf(there)]
    const outcomes = await Promise.all(
      Array.from({ length: 60 }, async (_, n) => {
        const one = decided({ decision: decision(`p${n}`), keyed: keyed('k') })
        const recorded = await both[n % 2]?.record(one)
        return recorded?.kind === 'stored' ? { ...one, isStored: true } : { ...recorded, isStored: false }
      }),
    )
    const stored = outcomes.filter(({ isStored }) => isStored)
    expect(stored).toHaveLength(1)
    const decisions = outcomes.map((outcome) => ('decision' in outcome ? outcome.decision : undefined))
    expect(new Set(decisions.map((one) => one?.provider_id)).size).toBe(1)
    expect(await both[0]?.replay(keyed('k', digest))).toEqual({ kind: 'replay', decision: decisions[0] })
  })

  it('of many keys in two processes at once are recorded without a deadlock', async () => {
    const both = [storeOf(here), storeOf(there)]
    const keys = Array.from({ length: 200 }, (_, n) => `k${n}`)
    const each = (turned: boolean) => (turned ? [...keys].reverse() : keys)
    const outcomes = await Promise.all(
      both.flatMap((decisions, n) => each(n === 1).map((key) => decisions.record(decided({ keyed: keyed(key) })))),
    )
    expect(outcomes.filter(({ kind }) => kind === 'stored')).toHaveLength(200)
    expect(outcomes.filter(({ kind }) => kind === 'replay')).toHaveLength(200)
  })

  it('tell each of one commit what became of it', async () => {
    const decisions = storeOf(here)
    await decisions.record(decided({ keyed: keyed('old') }))
    const outcomes = await Promise.all([
      decisions.record(decided()),
      decisions.record(decided({ keyed: keyed('new') })),
      decisions.record(decided({ keyed: keyed('old') })),
      decisions.record(decided({ keyed: keyed('new') })),
      decisions.record(decided({ keyed: keyed('new', randomUUID()) })),
      decisions.record(decided({ keyed: keyed('old', randomUUID()) })),
      decisions.record(decided()),
    ])
    expect(outcomes.map(({ kind }) => kind)).toEqual([
      'stored',
      'stored',
      'replay',
      'replay',
      'violation',
      'violation',
      'stored',
    ])
  })

  it('free their key when it expires', async () => {
    const decisions = storeOf(here, { keyTtlMs: 10_000 })
    await decisions.record(decided({ keyed: keyed('k') }))
    await pass(10_000)
    const other = randomUUID()
    expect(await decisions.replay(keyed('k', digest))).toBeNull()
    expect(await decisions.record(decided({ decision: decision('b'), keyed: keyed('k', other) }))).toEqual({
      kind: 'stored',
    })
    expect(await decisions.replay(keyed('k', other))).toEqual({ kind: 'replay', decision: decision('b') })
  })

  it('are looked up before the work: not used, used, used otherwise', async () => {
    const decisions = storeOf(here)
    expect(await decisions.replay(keyed('k', digest))).toBeNull()
    await decisions.record(decided({ keyed: keyed('k') }))
    expect(
      await Promise.all([
        decisions.replay(keyed('k', digest)),
        decisions.replay(keyed('k', randomUUID())),
        decisions.replay(keyed('k', digest, 'other')),
      ]),
    ).toEqual([{ kind: 'replay', decision: decision('a') }, { kind: 'violation' }, null])
  })

  it('are committed together', async () => {
    let statements = 0
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          statements: {
            ...store.statements,
            release: (text, values) => {
              statements++
              return store.statements.release(text, values)
            },
          },
        }),
    })
    const decisions = storeOf(intake)
    await Promise.all(Array.from({ length: 300 }, () => decisions.record(decided())))
    expect(await rows('rt_decisions')).toBe(300)
    expect(statements).toBeLessThan(10)
  })

  it('are written before closing ends', async () => {
    const decisions = storeOf(here)
    const recorded = Array.from({ length: 20 }, () => decisions.record(decided()))
    await decisions.close()
    expect(await rows('rt_decisions')).toBe(20)
    await Promise.all(recorded)
  })

  it('are reported as failed when the store rejects them', async () => {
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          statements: {
            ...store.statements,
            release: () => Promise.reject(Object.assign(new Error(), { code: 'timeout' })),
          },
        }),
    })
    await expect(storeOf(intake).record(decided())).rejects.toMatchObject({ code: 'timeout' })
  })

  it('are swept once they have expired, in steps, and no others', async () => {
    await b.sql(
      `INSERT INTO spillway.rt_decisions (request, tenant, decision, trace_id, decided_at, expires_at)
       SELECT gen_random_uuid(), 't', '{}', '', now(), now() - interval '1 second' FROM generate_series(1, 5001)`,
    )
    const decisions = storeOf(here)
    const kept = decided({ keyed: keyed('k') })
    await decisions.record(kept)
    const batches: SweptBatch[] = []
    do batches.push(await decisions.sweep())
    while (batches.at(-1)?.isFull)
    expect(batches.map(({ removed }) => removed.rt_decisions)).toEqual([2_000, 2_000, 1_001])
    expect([await rows('rt_decisions'), await rows('rt_keys')]).toEqual([1, 1])
    await pass(3_600_000)
    expect(await decisions.sweep()).toMatchObject({ removed: { rt_decisions: 1, rt_keys: 1 }, isFull: false })
  })

  it('are swept by themselves', async () => {
    const decisions = storeOf(here, { decisionTtlMs: 1, sweepEveryMs: 10 })
    await decisions.record(decided())
    decisions.start()
    await eventually(async () => ((await rows('rt_decisions')) === 0 ? true : undefined), 'the sweep')
  })

  it('are swept by one process at a time', async () => {
    const [mine, theirs] = [storeOf(here), storeOf(there)]
    await Promise.all([mine.record(decided()), mine.record(decided())])
    await pass(3_600_000)
    const swept = await here.transaction(async (tx) => {
      await tx.query('SELECT spillway.rt_sweep(1)')
      return theirs.sweep()
    })
    expect([swept.removed.rt_decisions, await rows('rt_decisions')]).toEqual([0, 1])
    expect((await theirs.sweep()).removed.rt_decisions).toBe(1)
  })
})
