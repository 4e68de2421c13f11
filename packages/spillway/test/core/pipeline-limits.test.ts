import { randomUUID } from 'node:crypto'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { type Answer, capacity, connections, halt, pressure, rate } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import type { Store } from '../../src/store/port.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

const Body = Type.Object({ n: Type.Integer() })
const lane = (body: { n: number }) => ['q', String(body.n)] as const

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const count = (answers: readonly Answer[], kind: Answer['kind']): number =>
  answers.filter((a) => a.kind === kind).length
const codes = (answers: readonly Answer[]): Set<string> =>
  new Set(answers.flatMap((a) => (a.kind === 'refused' ? [a.refusal.code] : [])))
const four = (options?: Parameters<Bench['intake']>[0]): Promise<Intake[]> =>
  Promise.all(Array.from({ length: 4 }, () => b.intake(options)))
const gateRow = async () =>
  (await b.sql<{ held: string; overflowing: boolean }>('SELECT held, overflowing FROM spillway.gates'))[0]

/** Counts what reaches the store. */
const counting = (calls: { accept: number }) => (store: Store) =>
  overriding(store, {
    accept: (items, context) => {
      calls.accept++
      return store.accept(items, context)
    },
  })

describe('capacity', () => {
  it('is open again at once in the process that freed its last places', async () => {
    const intake = await b.intake()
    const release = signal()
    const op = intake.define('op', {
      body: Body,
      lane: ({ n }) => ['op', `${n}`],
      gates: [capacity({ limit: 3 })],
      run: () => release.promise,
    })
    const running = [1, 2, 3].map((n) => intake.submit(op, { n }))
    await eventually(async () => (await b.sql('SELECT FROM spillway.ops')).length === 3 || undefined, 'three to run')
    expect(await intake.submit(op, { n: 4 })).toMatchObject({ refusal: { code: 'capacity_exceeded' } })
    release.fire()
    expect(count(await Promise.all(running), 'done')).toBe(3)
    expect(await intake.submit(op, { n: 5 })).toMatchObject({ kind: 'done' })
  })

  it('is known to the store before the first submission is', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { body: Body, gates: [capacity({ limit: 5 })], run: () => 1 })
    expect(await intake.submit(op, { n: 1 })).toMatchObject({ kind: 'done' })
  })

  it('holds exactly its limit over four instances with 2,000 at once', async () => {
    const intakes = await four({ role: 'direct' })
    const submits = intakes.flatMap((intake, i) => {
      const op = intake.define('op', { body: Body, lane, gates: [capacity({ limit: 100 })], run: () => undefined })
      return Array.from({ length: 500 }, (_, n) => intake.submit(op, { n: i * 500 + n }, { respondAsync: true }))
    })
    const answers = await Promise.all(submits)
    expect(count(answers, 'queued')).toBe(100)
    expect(count(answers, 'refused')).toBe(1_900)
    expect(codes(answers)).toEqual(new Set(['capacity_exceeded']))
    expect(await b.sql('SELECT 1 FROM spillway.ops')).toHaveLength(100)
    expect(await gateRow()).toMatchObject({ held: '100', overflowing: true })
    expect(await b.audit()).toEqual([])
  })

  it('takes nothing until fewer than the lower bound are held, then opens everywhere; nothing leaks', async () => {
    const [intake, other] = await four()
    if (intake === undefined || other === undefined) throw new Error('two intakes')
    const releases = Array.from({ length: 10 }, () => signal())
    const options = {
      body: Body,
      lane,
      gates: [capacity({ limit: 10, resumeBelow: 5, retryAfterSeconds: 1 })],
      run: (body: { n: number }) => releases[body.n]?.promise,
    }
    const op = intake.define('op', options)
    const elsewhere = other.define('op', options)
    const running = releases.map((_, n) => intake.submit(op, { n }))
    await eventually(async () => ((await gateRow())?.overflowing === true ? true : undefined), 'the gate to be full')
    for (const release of releases.slice(0, 5)) release.fire()
    await Promise.all(running.slice(0, 5))
    // Five are held: room for five more, but the gate is closed until there are fewer.
    expect(await other.submit(elsewhere, { n: 100 })).toMatchObject({ kind: 'refused' })
    expect(await gateRow()).toMatchObject({ held: '5', overflowing: true })
    releases[5]?.fire()
    await running[5]
    expect(await gateRow()).toMatchObject({ held: '4', overflowing: false })
    const opened = await eventually(async () => {
      const answer = await other.submit(elsewhere, { n: 101 })
      return answer.kind === 'refused' ? undefined : answer
    }, 'the gate to open elsewhere')
    expect(opened.kind).toBe('done')
    for (const release of releases) release.fire()
    await Promise.all(running)
    await eventually(async () => ((await gateRow())?.held === '0' ? true : undefined), 'all places to be free')
  })

  it('releases capacity for failed, dead and cancelled operations, and takes it again for redriven ones', async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      body: Body,
      lane,
      maxRetries: 0,
      gates: [capacity({ limit: 2 })],
      delayMs: (body) => (body.n === 2 ? 60_000 : 0),
      run: () => {
        throw new Error('no')
      },
    })
    const failed = await intake.submit(op, { n: 1 })
    const waiting = await intake.submit(op, { n: 2 })
    if (failed.kind !== 'failed' || waiting.kind !== 'queued') throw new Error('failed and queued')
    expect(await gateRow()).toMatchObject({ held: '1' })
    await intake.store.cancel(waiting.operationId, [], 'why')
    expect(await gateRow()).toMatchObject({ held: '0' })
    await intake.store.pause('q', null)
    await intake.store.redrive([failed.operationId])
    expect(await gateRow()).toMatchObject({ held: '1' })
  })

  it('refuses early without a query, once it knows', async () => {
    const calls = { accept: 0 }
    const intake = await b.intake({ wrap: counting(calls), role: 'direct' })
    const op = intake.define('op', { body: Body, lane, gates: [capacity({ limit: 1 })], run: () => undefined })
    await intake.submit(op, { n: 1 }, { respondAsync: true })
    await intake.submit(op, { n: 2 }, { respondAsync: true })
    const before = calls.accept
    const answers = await Promise.all(Array.from({ length: 100 }, (_, n) => intake.submit(op, { n: n + 3 })))
    expect(count(answers, 'refused')).toBe(100)
    expect(calls.accept).toBe(before)
  })
})

describe('rate', () => {
  it('admits exactly its limit over four instances', async () => {
    const intakes = await four({ role: 'direct' })
    const submits = intakes.flatMap((intake) => {
      const op = intake.define('op', {
        body: Body,
        lane,
        gates: [rate({ limit: 10, per: '1h' })],
        run: () => undefined,
      })
      return Array.from({ length: 60 }, (_, n) => intake.submit(op, { n }, { identity: 'ann', respondAsync: true }))
    })
    const answers = await Promise.all(submits)
    expect(count(answers, 'queued')).toBe(10)
    expect(codes(answers)).toEqual(new Set(['rate_limited']))
    const [refused] = answers.filter((a) => a.kind === 'refused')
    expect(refused).toMatchObject({ refusal: { rate: { limit: 10, left: 0, windowSeconds: 3_600 } } })
  })

  it('counts each identity by itself and reports what is left', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { body: Body, gates: [rate({ limit: 3, per: '1h', name: 'hour' })], run: () => 1 })
    const left = []
    for (let n = 0; n < 3; n++) {
      const answer = await intake.submit(op, { n }, { identity: 'ann' })
      if (answer.kind === 'done') left.push(answer.rate?.left)
    }
    expect(left).toEqual([2, 1, 0])
    const refused = await intake.submit(op, { n: 4 }, { identity: 'ann' })
    if (refused.kind !== 'refused') throw new Error('refused')
    const wait = refused.refusal.retryAfterMs ?? 0
    // The bucket of this minute leaves the window an hour after it ends.
    expect(wait).toBeGreaterThan(60 * 60_000 - 10_000)
    expect(wait).toBeLessThanOrEqual(61 * 60_000)
    expect(await intake.submit(op, { n: 4 }, { identity: 'bob' })).toMatchObject({ kind: 'done', rate: { left: 2 } })
  })

  it('takes a request once from each of several tiers, and names the one that refused', async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      body: Body,
      gates: [
        rate({ limit: 4, per: '1h' }),
        rate({ limit: 6, per: '1d' }),
        rate({ limit: 9, per: '1h', name: 'all', by: () => '*' }),
      ],
      run: () => 1,
    })
    const answers = []
    for (let n = 0; n < 6; n++) answers.push(await intake.submit(op, { n }, { identity: 'ann' }))
    expect(answers.map((a) => a.kind)).toEqual(['done', 'done', 'done', 'done', 'refused', 'refused'])
    expect(answers[4]).toMatchObject({ refusal: { rate: { limit: 4 } } })
    for (let n = 0; n < 6; n++) answers.push(await intake.submit(op, { n }, { identity: 'bob' }))
    // Nine in all for everybody: five more would be bob's by the day, four by the hour.
    expect(count(answers, 'done')).toBe(8)
    expect(await intake.submit(op, { n: 1 }, { identity: 'carl' })).toMatchObject({ kind: 'done' })
    expect(await intake.submit(op, { n: 1 }, { identity: 'dora' })).toMatchObject({
      refusal: { rate: { name: 'all', limit: 9 } },
    })
  })

  it('releases the reservation of an item that could not be stored', async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      body: Body,
      gates: [rate({ limit: 2, per: '1h' })],
      run: () => 1,
    })
    // PostgreSQL's texts cannot hold NUL.
    expect(await intake.submit(op, { n: 1 }, { identity: 'ann', traceparent: '\0' })).toMatchObject({
      refusal: { code: 'internal_error' },
    })
    expect(await intake.submit(op, { n: 1 }, { identity: 'ann' })).toMatchObject({ kind: 'done', rate: { left: 1 } })
  })

  it('is not used up by what capacity refused', async () => {
    const intake = await b.intake({ role: 'direct' })
    const gates = [rate({ limit: 5, per: '1h' }), capacity({ limit: 1 })]
    const op = intake.define('op', { body: Body, lane, gates, run: () => 1 })
    const answers = await Promise.all(
      Array.from({ length: 4 }, (_, n) => intake.submit(op, { n }, { identity: 'ann', respondAsync: true })),
    )
    expect(count(answers, 'queued')).toBe(1)
    expect(codes(answers)).toEqual(new Set(['capacity_exceeded']))
    const rows = await b.sql<{ used: string }>('SELECT sums[cardinality(sums)] - sums[1] AS used FROM spillway.rates')
    expect(rows).toEqual([{ used: '1' }])
  })

  it('frees a slot when its bucket leaves the window', async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      body: Body,
      gates: [rate({ limit: 1, per: '90s', by: () => 'all' })],
      run: () => 1,
    })
    expect(await intake.submit(op, { n: 1 })).toMatchObject({ kind: 'done' })
    expect(await intake.submit(op, { n: 1 })).toMatchObject({ refusal: { code: 'rate_limited' } })
    await b.sql('UPDATE spillway.rates SET ends = (SELECT array_agg(e - 60000) FROM unnest(ends) e)')
    expect(await intake.submit(op, { n: 1 })).toMatchObject({ refusal: { code: 'rate_limited' } })
    await b.sql('UPDATE spillway.rates SET ends = (SELECT array_agg(e - 33000) FROM unnest(ends) e)')
    expect(await intake.submit(op, { n: 1 })).toMatchObject({ kind: 'done' })
  })
})

describe('connections', () => {
  const held = async () =>
    (await b.sql<{ held: number }>('SELECT coalesce(sum(held), 0)::int AS held FROM spillway.connections'))[0]?.held

  it('bounds open requests per identity and in total, over two instances, and returns every permit', async () => {
    const [one, two] = await Promise.all([b.intake(), b.intake()])
    const release = signal()
    const options = {
      body: Body,
      lane,
      gates: [connections({ perIdentity: 2, total: 3 })],
      run: () => release.promise,
    }
    const first = one.define('op', options)
    const second = two.define('op', options)
    const open = [one.submit(first, { n: 1 }, { identity: 'ann' }), two.submit(second, { n: 2 }, { identity: 'ann' })]
    await eventually(async () => ((await held()) === 2 ? true : undefined), 'two places to be taken')
    expect(await one.submit(first, { n: 3 }, { identity: 'ann' })).toMatchObject({
      refusal: { code: 'connection_limit' },
    })
    open.push(one.submit(first, { n: 4 }, { identity: 'bob' }))
    await eventually(async () => ((await held()) === 3 ? true : undefined), 'three places to be taken')
    expect(await two.submit(second, { n: 5 }, { identity: 'carl' })).toMatchObject({ refusal: { code: 'overloaded' } })
    release.fire()
    expect((await Promise.all(open)).map((a) => a.kind)).toEqual(['done', 'done', 'done'])
    await eventually(async () => ((await held()) === 0 ? true : undefined), 'all places to be free')
    expect(await one.submit(first, { n: 6 }, { identity: 'ann' })).toMatchObject({ kind: 'done' })
  })

  it('is exact with many at once', async () => {
    const [one, two] = await Promise.all([b.intake(), b.intake()])
    const release = signal()
    const options = {
      body: Body,
      lane,
      gates: [connections({ perIdentity: 100, total: 7 })],
      run: () => release.promise,
    }
    const submits = [one, two].flatMap((intake, i) => {
      const op = intake.define('op', options)
      return Array.from({ length: 30 }, (_, n) => intake.submit(op, { n: i * 30 + n }))
    })
    const refusals = { n: 0 }
    for (const submit of submits) void submit.then((a) => a.kind === 'refused' && refusals.n++)
    await eventually(() => (refusals.n === 53 ? true : undefined), 'all others to be refused')
    expect(await held()).toBe(7)
    release.fire()
    expect(count(await Promise.all(submits), 'done')).toBe(7)
  })

  it('frees the places of a process that died', async () => {
    const alive = await b.intake()
    const op = alive.define('op', {
      body: Body,
      lane,
      gates: [connections({ perIdentity: 1, total: 1 })],
      run: () => 1,
    })
    const dead = randomUUID()
    await alive.store.enlist(dead, 'dead', 60_000)
    await alive.store.changeConnections(dead, 'op', {
      ...{ seq: 1, held: null, gives: [] },
      takes: [{ identity: 'ann', perIdentity: 1, total: 1 }],
    })
    expect(await alive.submit(op, { n: 1 }, { identity: 'ann' })).toMatchObject({
      refusal: { code: 'connection_limit' },
    })
    await b.sql("UPDATE spillway.workers SET until = now() - interval '1 minute' WHERE id = $1", [dead])
    await eventually(async () => {
      const answer = await alive.submit(op, { n: 1 }, { identity: 'ann' })
      return answer.kind === 'done' ? true : undefined
    }, 'the place to be free')
  })

  it('answers 503, not with an exception, when the store cannot give a place', async () => {
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          changeConnections: () => Promise.reject(Object.assign(new Error('away'), { code: 'unavailable' })),
        }),
    })
    const op = intake.define('op', { body: Body, gates: [connections({ perIdentity: 1, total: 1 })], run: () => 1 })
    expect(await intake.submit(op, { n: 1 })).toMatchObject({
      refusal: { code: 'store_unavailable', retryAfterMs: 2_000 },
    })
  })

  it('tries again to give a place back', async () => {
    const faults = { left: 1 }
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          changeConnections: (worker, pool, change) =>
            change.takes.length === 0 && faults.left-- > 0
              ? Promise.reject(new Error('away'))
              : store.changeConnections(worker, pool, change),
        }),
    })
    const op = intake.define('op', { body: Body, gates: [connections({ perIdentity: 1, total: 1 })], run: () => 1 })
    await intake.submit(op, { n: 1 })
    expect(await held()).toBe(1)
    await eventually(async () => ((await held()) === 0 ? true : undefined), 'the place to be given back')
  })
})

describe('halt', () => {
  it('refuses from the moment it is set, early once known, and ends', async () => {
    const calls = { accept: 0 }
    const intake = await b.intake({ wrap: counting(calls) })
    const op = intake.define('op', { body: Body, gates: [halt({ retryAfterSeconds: 30 })], run: () => 1 })
    await intake.store.halt('system', 'drill')
    expect(await intake.submit(op, { n: 1 }, { idempotencyKey: 'k' })).toMatchObject({
      refusal: { code: 'halted', retryAfterMs: 30_000 },
    })
    const before = calls.accept
    await intake.submit(op, { n: 1 })
    expect(calls.accept).toBe(before)
    expect(await intake.store.unhalt('system')).toBe(true)
    const answer = await eventually(async () => {
      const answer = await intake.submit(op, { n: 1 }, { idempotencyKey: 'k' })
      return answer.kind === 'refused' ? undefined : answer
    }, 'the halt to end')
    expect(answer).toMatchObject({ kind: 'done', replayed: false })
  })
})

describe('pressure', () => {
  it('refuses while the process cannot keep up, and opens by itself', async () => {
    const intake = await b.intake({ pressureInflightMax: 2 })
    const op = intake.define('op', { body: Body, gates: [pressure()], run: () => 1 })
    const leave = [intake.pipeline.enter(), intake.pipeline.enter()]
    await eventually(() => (intake.pressure.level === 'active' ? true : undefined), 'pressure')
    expect(await intake.submit(op, { n: 1 })).toMatchObject({ refusal: { code: 'overloaded', retryAfterMs: 2_000 } })
    for (const exit of leave) {
      exit()
      exit()
    }
    await eventually(() => (intake.pressure.level === 'inactive' ? true : undefined), 'pressure to go')
    expect(await intake.submit(op, { n: 1 })).toMatchObject({ kind: 'done' })
  })
})

describe('the order of gates', () => {
  it('is pressure, connections, capacity, halt, rate, whatever the definition says', async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      body: Body,
      gates: [
        rate({ limit: 1, per: '1h' }),
        halt(),
        capacity({ limit: 1 }),
        connections({ perIdentity: 1, total: 1 }),
        pressure(),
      ],
      run: () => 1,
    })
    expect(intake.bound(op).gates.map((g) => g.kind)).toEqual(['pressure', 'connections', 'capacity', 'halt', 'rate'])
  })
})
