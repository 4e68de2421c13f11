import { setTimeout as delay } from 'node:timers/promises'
import pg from 'pg'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import type { Answer } from '../../src/index.js'
import type { RunOptions } from '../../src/intake/define.js'
import type { Intake } from '../../src/intake/intake.js'
import type { Claimed, Settlement } from '../../src/store/port.js'
import { leave } from '../../src/work/attempt.js'
import { type Bench, bench, eventually, signal } from '../pipeline-fixture.js'

const Body = Type.Object({ key: Type.String(), n: Type.Integer() })
type Run = RunOptions<typeof Body, unknown>['run']

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(async () => {
  const faults = await b.audit()
  await b.close()
  expect(faults).toEqual([])
})

const define = (intake: Intake, concurrency: number, run: Run, rest: Partial<RunOptions<typeof Body, unknown>> = {}) =>
  intake.define('op', { body: Body, lane: { key: (body) => body.key, concurrency }, run, ...rest })

const idOf = (answer: Answer): string => {
  if (!('operationId' in answer)) throw new Error(`expected an operation, not ${answer.kind}`)
  return answer.operationId
}

const rows = async (table: string) =>
  Number((await b.sql<{ n: string }>(`SELECT count(*) AS n FROM spillway.${table}`))[0]?.n)
/** Nothing is held any more, and nothing stays behind. */
const empty = () =>
  eventually(
    async () => ((await rows('ops')) + (await rows('lanes')) + (await rows('turns')) === 0 ? true : undefined),
    'the queue to drain',
    25_000,
  )

/** Counts what runs at the same time, by key. */
function gauge() {
  const running = new Map<string, number>()
  const most = new Map<string, number>()
  return {
    most,
    enter: (key: string): void => {
      const n = (running.get(key) ?? 0) + 1
      running.set(key, n)
      most.set(key, Math.max(n, most.get(key) ?? 0))
    },
    leave: (key: string): void => void running.set(key, (running.get(key) ?? 0) - 1),
  }
}

describe('lane: { key, concurrency }', () => {
  it('never runs more of a key at once, over four instances, direct and queued, and all of them run', async () => {
    const intakes = await Promise.all([1, 2, 3, 4].map(() => b.intake()))
    const { most, enter, leave } = gauge()
    const ran = new Set<number>()
    const ops = intakes.map((intake) =>
      define(intake, 3, async ({ key, n }, ctx) => {
        enter(key)
        await delay(2)
        leave(key)
        if (n % 10 === 0 && ctx.attempt === 1) throw new Error('once')
        ran.add(n)
      }),
    )
    const answers = await Promise.all(
      Array.from({ length: 200 }, (_, n) => {
        const [intake, op] = [intakes[n % 4], ops[n % 4]]
        if (intake === undefined || op === undefined) throw new Error('an intake')
        return intake.submit(op, { key: n < 150 ? 'hot' : 'other', n }, n % 3 === 0 ? { respondAsync: true } : {})
      }),
    )
    for (const answer of answers) expect(['done', 'queued']).toContain(answer.kind)
    await empty()
    expect(ran.size).toBe(200)
    expect(most).toEqual(
      new Map([
        ['hot', 3],
        ['other', 3],
      ]),
    )
  })

  it('starts in the order of acceptance, and lets no newcomer pass', async () => {
    const intake = await b.intake()
    const started: number[] = []
    const gates = new Map<number, ReturnType<typeof signal<void>>>()
    const op = define(intake, 2, async ({ n }) => {
      started.push(n)
      const gate = signal()
      gates.set(n, gate)
      await gate.promise
    })
    const answers = []
    for (let n = 1; n <= 2; n++) answers.push(intake.submit(op, { key: 'k', n }))
    await eventually(() => started.length === 2 || undefined, 'two to start')
    const places = []
    for (let n = 3; n <= 6; n++) {
      const answer = await intake.submit(op, { key: 'k', n })
      expect(answer).toMatchObject({ kind: 'queued', reason: 'maintaining_order' })
      places.push([answer.kind === 'queued' && answer.position, (await b.ticket(idOf(answer))).position])
      const [report] = await intake.tickets.statusOf([idOf(answer)])
      expect(report).toMatchObject({ status: 'pending', position: n - 3 })
      expect(await b.ticket(idOf(answer))).toMatchObject({ queue: 'op', partition: 'k' })
    }
    expect(places).toEqual([0, 1, 2, 3].map((place) => [place, place]))
    // Another key is free.
    const other = intake.submit(op, { key: 'l', n: 9 })
    await eventually(() => started.includes(9) || undefined, 'the other key to start')
    for (let n = 1; n <= 6; n++) {
      await eventually(() => gates.has(n) || undefined, `${n} to start`)
      expect(started.filter((x) => x < 9)).toEqual(Array.from({ length: Math.min(6, n + 1) }, (_, i) => i + 1))
      gates.get(n)?.fire()
      await eventually(
        () => started.filter((x) => x < 9).length >= Math.min(6, n + 2) || undefined,
        'the next to start',
      )
    }
    gates.get(9)?.fire()
    await Promise.all([...answers, other])
    await empty()
  })

  it('gives the permit back while one waits for its retry', async () => {
    const intake = await b.intake({ retryBaseMs: 60_000, retryMaxMs: 60_000 })
    const ran: number[] = []
    const op = define(intake, 1, ({ n }, ctx) => {
      ran.push(n)
      if (n === 1 && ctx.attempt === 1) throw new Error('again')
    })
    const first = await intake.submit(op, { key: 'k', n: 1 })
    expect(first).toMatchObject({ kind: 'queued', reason: 'retrying' })
    expect(await intake.submit(op, { key: 'k', n: 2 })).toMatchObject({ kind: 'done' })
    await b.sql('UPDATE spillway.ops SET not_before = NULL')
    await b.sql('UPDATE spillway.parked SET until = now()')
    intake.wakeAll()
    expect(await b.finished(idOf(first))).toMatchObject({ status: 'completed', attempts: 2 })
    expect(ran).toEqual([1, 2, 1])
    await empty()
  })

  it('lets one whose retry is due start before those that were accepted later', async () => {
    const gateway = await b.intake({ role: 'direct' })
    const op = define(gateway, 1, () => undefined)
    const ids = []
    for (let n = 0; n < 3; n++) ids.push(idOf(await gateway.submit(op, { key: 'k', n }, { respondAsync: true })))
    const worker = '00000000-0000-4000-8000-0000000000aa'
    await gateway.store.enlist(worker, 'by hand', 60_000, {})
    const claim = { lanes: 10, budget: 10, each: 1, turn: 1 }
    let held: Claimed | undefined
    const order: string[] = []
    for (let step = 0; step < 4; step++) {
      const settlements: Settlement[] = []
      if (held !== undefined) {
        const { fence, lane, seq } = held
        const retry = step === 1 ? { delayMs: 0, error: 'again' } : null
        const leaving = retry === null ? [leave(held, { kind: 'completed', result: null }, 0, 0)] : []
        settlements.push({ fence, lane, from: seq - 1, leaving, retry, release: true })
      }
      const { claimed, lost } = await gateway.store.step(worker, 0, settlements, claim)
      expect(lost).toEqual([])
      expect(claimed).toHaveLength(1)
      expect(await b.audit()).toEqual([])
      held = claimed[0]
      order.push(held?.id ?? '')
    }
    expect(order).toEqual([ids[0], ids[1], ids[0], ids[2]])
    await gateway.store.retire(worker)
    for (const id of ids) await gateway.cancel(id, 'over')
    await empty()
  })

  it('passes the permit on when one that waits, or holds a permit and waits for a slot, is cancelled', async () => {
    const gateway = await b.intake({ role: 'direct' })
    const op = define(gateway, 2, () => undefined)
    const ids = []
    for (let n = 0; n < 5; n++) ids.push(idOf(await gateway.submit(op, { key: 'k', n }, { respondAsync: true })))
    const ready = async () =>
      (await b.sql<{ lane: string }>('SELECT lane FROM spillway.ready ORDER BY lane')).map(({ lane }) => lane)
    expect(await ready()).toEqual(ids.slice(0, 2))
    expect(await gateway.cancel(ids[3] ?? '', 'why')).toBe('cancelled')
    expect(await ready()).toEqual(ids.slice(0, 2))
    expect(await gateway.cancel(ids[0] ?? '', 'why')).toBe('cancelled')
    expect(await ready()).toEqual(ids.slice(1, 3))
    expect(await b.audit()).toEqual([])
    for (const id of [1, 2, 4]) expect(await gateway.cancel(ids[id] ?? '', 'why')).toBe('cancelled')
    await empty()
  })

  it('takes its turn again when it is redriven, with the limit that it had', async () => {
    const intake = await b.intake()
    let works = false
    const { most, enter, leave } = gauge()
    const op = define(
      intake,
      2,
      async ({ key }) => {
        if (!works) throw new Error('no')
        enter(key)
        await delay(5)
        leave(key)
      },
      { maxRetries: 0 },
    )
    const ids = await Promise.all(
      [1, 2, 3, 4, 5, 6].map(async (n) => idOf(await intake.submit(op, { key: 'k', n }, { respondAsync: true }))),
    )
    for (const id of ids) expect(await b.finished(id)).toMatchObject({ status: 'failed' })
    await empty()
    works = true
    expect(await intake.store.redrive(ids)).toEqual({ moved: 6, skipped: 0 })
    expect(await b.audit()).toEqual([])
    intake.wakeAll()
    for (const id of ids) expect(await b.finished(id)).toMatchObject({ status: 'completed' })
    expect(most).toEqual(new Map([['k', 2]]))
    await empty()
  })

  it('holds its permits for a process that dies until the lease is over, then they are free', async () => {
    const gateway = await b.intake({ role: 'direct' })
    const op = define(gateway, 2, () => undefined)
    const ids = []
    for (let n = 0; n < 4; n++) ids.push(idOf(await gateway.submit(op, { key: 'k', n }, { respondAsync: true })))
    const dead = '00000000-0000-4000-8000-0000000000dd'
    await gateway.store.enlist(dead, 'dead', 15_000, {})
    const claim = { lanes: 10, budget: 10, each: 1, turn: 1 }
    expect((await gateway.store.step(dead, 0, [], claim)).claimed.map(({ id }) => id)).toEqual(ids.slice(0, 2))
    expect(await b.audit()).toEqual([])
    const ran: number[] = []
    const worker = await b.intake({ concurrency: 1 })
    define(worker, 2, ({ n }) => void ran.push(n))
    await worker.refresh()
    expect(ran).toEqual([])
    await b.sql("UPDATE spillway.workers SET until = now() - interval '1 s' WHERE id = $1", [dead])
    for (const id of ids) await b.finished(id)
    expect(ran).toEqual([0, 1, 2, 3])
    await empty()
  })

  it('waits while the key is paused, and other keys run', async () => {
    const intake = await b.intake()
    const op = define(intake, 2, ({ n }) => n)
    await intake.store.pause('op', 'k')
    const ids = []
    for (let n = 0; n < 5; n++) ids.push(idOf(await intake.submit(op, { key: 'k', n })))
    expect(await intake.submit(op, { key: 'l', n: 9 })).toMatchObject({ kind: 'done' })
    await eventually(
      async () => (await b.sql("SELECT 1 FROM spillway.parked WHERE reason = 'pause'")).length === 5 || undefined,
      'all to be held',
    )
    expect(await b.audit()).toEqual([])
    await intake.store.resume('op', 'k')
    intake.wakeAll()
    for (const id of ids) expect(await b.finished(id)).toMatchObject({ status: 'completed' })
    await empty()
  })

  it('follows the last acceptance where instances disagree, and lets more start when the limit is raised', async () => {
    const [low, high] = await Promise.all([b.intake({ role: 'direct' }), b.intake({ role: 'direct' })])
    const one = define(low, 1, () => undefined)
    const three = define(high, 3, () => undefined)
    const submit = async (n: number) =>
      n < 4
        ? low.submit(one, { key: 'k', n }, { respondAsync: true })
        : high.submit(three, { key: 'k', n }, { respondAsync: true })
    for (let n = 0; n < 4; n++) await submit(n)
    expect(await rows('ready')).toBe(1)
    await submit(4)
    expect(await rows('ready')).toBe(3)
    expect(await b.audit()).toEqual([])
    // Lowered: what runs goes on, and no more start.
    await low.submit(one, { key: 'k', n: 5 }, { respondAsync: true })
    expect(await rows('ready')).toBe(3)
    const worker = await b.intake()
    worker.define('op', { body: Body, run: () => undefined })
    await empty()
  })

  it('is kept for delayed operations, and for those of a transaction', async () => {
    const intake = await b.intake()
    const { most, enter, leave } = gauge()
    const op = define(
      intake,
      1,
      async ({ key }) => {
        enter(key)
        await delay(5)
        leave(key)
      },
      { delayMs: ({ n }) => (n < 3 ? 30 : 0) },
    )
    const client = new pg.Client({ connectionString: b.url })
    await client.connect()
    await client.query('BEGIN')
    for (let n = 0; n < 5; n++) idOf(await intake.enqueue(op, { key: 'k', n }, { tx: client }))
    await client.query('COMMIT')
    await client.end()
    await intake.submit(op, { key: 'k', n: 9 })
    await empty()
    expect(most).toEqual(new Map([['k', 1]]))
  })

  it('names the key with a queue of its own, and refuses a wrong name', async () => {
    const intake = await b.intake({ role: 'direct' })
    const own = intake.define('own', {
      body: Body,
      lane: { key: ({ key }) => ['shops', key], concurrency: 1 },
      run: () => undefined,
    })
    const ticket = await b.ticket(idOf(await intake.submit(own, { key: 'k', n: 1 }, { respondAsync: true })))
    expect(ticket).toMatchObject({ queue: 'shops', partition: 'k', position: 0 })
    expect(await intake.submit(own, { key: '', n: 1 })).toMatchObject({ refusal: { code: 'invalid_request' } })
    const wrong = intake.define('wrong', {
      lane: { key: () => undefined as never, concurrency: 1 },
      run: () => undefined,
    })
    await expect(intake.submit(wrong, 1)).rejects.toThrow('what lane.key returns must be a text, or [queue, key]')
  })
})
