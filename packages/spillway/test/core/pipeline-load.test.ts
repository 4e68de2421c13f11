import { createServer } from 'node:http'
import { setTimeout as delay } from 'node:timers/promises'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import type { Definition } from '../../src/index.js'
import type { ApplyOptions } from '../../src/intake/define.js'
import type { Intake } from '../../src/intake/intake.js'
import type { Store } from '../../src/store/port.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

const Body = Type.Object({ n: Type.Integer() })
const lane = (body: { n: number }) => ['q', String(body.n)] as const

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => {
  vi.restoreAllMocks()
  return b.close()
})

const poolAt = (state: { busy: number; waiting: number }) => (store: Store) =>
  overriding(store, { poolState: () => ({ max: 10, idle: 0, ...state }) })

/** The same effect in both forms: nothing, and 1 for each. */
const applies: Record<'apply' | 'effect', ApplyOptions<typeof Body, number>['apply']> = {
  apply: async (_, items) => items.map(() => 1),
  effect: { function: 'public.ones', values: () => [] },
}
const onesFunction = `CREATE FUNCTION public.ones(verdicts text[], seqs bigint[]) RETURNS json[] LANGUAGE sql AS
  $$ SELECT array_fill('1'::json, ARRAY[cardinality(verdicts)]) $$`

/** The status for a body that is no JSON: 400 from the code that reads it. */
const sendBroken = async (intake: Intake, op: Definition, headers = {}): Promise<number> => {
  const all = { 'content-type': 'application/json', ...headers }
  const request = new Request('http://local/', { method: 'POST', body: '{', headers: all })
  return (await intake.fetch(op)(request, { clientAddress: '127.0.0.1' })).status
}

describe('the load decision', () => {
  it.each([
    [{ busy: 7, waiting: 0 }, 'done'],
    [{ busy: 8, waiting: 0 }, 'queued'],
    [{ busy: 5, waiting: 3 }, 'queued'],
  ] as const)('with the pool at %j: %s', async (state, kind) => {
    const intake = await b.intake({ wrap: poolAt(state) })
    const op = intake.define('op', { body: Body, run: () => 1 })
    const answer = await intake.submit(op, { n: 1 })
    expect(answer.kind).toBe(kind)
    if (answer.kind === 'queued') {
      expect(answer.reason).toBe('system_busy')
      expect(await b.finished(answer.operationId)).toMatchObject({ status: 'completed' })
    }
  })

  it('refuses instead where the definition says so, and takes it again when the load is gone', async () => {
    const state = { busy: 10, waiting: 0 }
    const intake = await b.intake({ wrap: poolAt(state) })
    const op = intake.define('op', { body: Body, whenBusy: 'refuse', run: () => 1 })
    expect(await intake.submit(op, { n: 1 })).toMatchObject({ refusal: { code: 'overloaded', retryAfterMs: 1_000 } })
    // Before the body is read; but who would be queued is not refused for want of a slot.
    expect(await sendBroken(intake, op)).toBe(503)
    expect(await sendBroken(intake, op, { prefer: 'respond-async' })).toBe(400)
    state.busy = 0
    expect(await intake.submit(op, { n: 1 })).toMatchObject({ kind: 'done' })
  })

  describe.each(['apply', 'effect'] as const)('of an %s that would not be queued', (kind) => {
    it('refuses before the body is read when the store is busy, but not a request that would be queued', async () => {
      const state = { busy: 10, waiting: 0 }
      const intake = await b.intake({ wrap: poolAt(state) })
      const op = intake.define('op', { body: Body, whenBusy: 'refuse', apply: applies[kind] })
      expect(await sendBroken(intake, op)).toBe(503)
      expect(await sendBroken(intake, op, { prefer: 'respond-async' })).toBe(400)
      state.busy = 0
      expect(await sendBroken(intake, op)).toBe(400)
    })

    it('refuses likewise when requests wait to be looked at, once that lasts and until they do not', async () => {
      const intake = await b.intake({ acceptWaitBudgetMs: 200, wrap: poolAt({ busy: 0, waiting: 0 }) })
      const op = intake.define('op', { body: Body, whenBusy: 'refuse', apply: applies[kind] })
      // The time is the work's alone: what else the machine does is no wait at the door.
      let now = performance.now()
      vi.spyOn(performance, 'now').mockImplementation(() => now)
      const work = (ms: number): void => {
        now += ms
      }
      /** One that waits at the door while others work for so long. */
      const behind = (ms: number): Promise<number> =>
        new Promise((resolve) => {
          intake.door.pass(() => work(1))
          intake.door.pass(() => resolve(sendBroken(intake, op)))
          work(ms)
        })
      // A tenth of the budget is the limit; a burst passes.
      expect([await behind(40), await behind(40), await behind(40)]).toEqual([400, 400, 400])
      expect(await behind(40)).toBe(503)
      expect(await behind(0)).toBe(400)
      expect(await behind(40)).toBe(503)
      // Half a second without one that waits for too long, and a burst passes again.
      work(501)
      expect(await behind(0)).toBe(400)
      expect(await behind(40)).toBe(400)
    })
  })

  it('has a door for a server of one’s own: requests wait at it, and are looked at', async () => {
    const intake = await b.intake()
    const asked: (string | undefined)[] = []
    const server = createServer(({ url }) => {
      asked.push(url)
    })
    intake.guard(server)
    intake.door.pass(() => {
      for (const since = performance.now(); performance.now() - since < 1; );
    })
    server.emit('request', { url: '/orders' }, { destroyed: false })
    expect(asked).toEqual([])
    await eventually(() => (asked.length > 0 ? true : undefined), 'it to be looked at')
    expect(asked).toEqual(['/orders'])
  })

  it.each(['run', 'apply', 'effect'] as const)('counts the age of the oldest write, %s', async (kind) => {
    const release = signal()
    if (kind === 'effect') await b.sql(onesFunction)
    const intake = await b.intake({
      acceptWaitBudgetMs: 50,
      wrap: (store) =>
        overriding(store, {
          accept: async (items, context) => {
            await release.promise
            return store.accept(items, context)
          },
          acceptAndApply: async (items, context, effect) => {
            await release.promise
            return store.acceptAndApply(items, context, effect)
          },
          acceptWithEffect: async (...given) => {
            await release.promise
            return store.acceptWithEffect(...given)
          },
        }),
    })
    const op =
      kind === 'run'
        ? intake.define('op', { body: Body, run: () => 1 })
        : intake.define('op', { body: Body, apply: applies[kind] })
    expect(intake.pipeline.busy).toBeLessThan(0.7)
    const slow = intake.submit(op, { n: 1 })
    await eventually(() => (intake.pipeline.busy > 1 ? true : undefined), 'the budget to be used up', 2_000).finally(
      release.fire,
    )
    expect(await slow).toMatchObject({ kind: 'done', result: 1 })
    expect(intake.pipeline.busy).toBeLessThan(0.7)
  })

  it('queues when every slot is taken', async () => {
    const intake = await b.intake({ concurrency: 1 })
    const release = signal()
    const op = intake.define('op', {
      body: Body,
      lane,
      run: async (body) => {
        if (body.n === 1) await release.promise
        return body.n
      },
    })
    const first = intake.submit(op, { n: 1 })
    await eventually(
      async () => ((await b.sql('SELECT 1 FROM spillway.leases')).length === 1 ? true : undefined),
      'the first to run',
    )
    const second = await intake.submit(op, { n: 2 })
    expect(second).toMatchObject({ kind: 'queued', reason: 'system_busy' })
    release.fire()
    await first
    if (second.kind === 'queued') expect(await b.finished(second.operationId)).toMatchObject({ result: 2 })
  })

  it('keeps no slot for a caller who only waits', async () => {
    const intake = await b.intake({ concurrency: 1 })
    const op = intake.define('op', {
      body: Body,
      lane: () => 'one',
      run: (body, ctx) => {
        if (body.n === 1 && ctx.attempt === 1) throw new Error('again')
        return body.n
      },
    })
    expect(await intake.submit(op, { n: 1 })).toMatchObject({ kind: 'queued', reason: 'retrying' })
    expect(await intake.submit(op, { n: 2 }, { waitMs: 5_000 })).toMatchObject({ kind: 'done', result: 2 })
  })

  it('reports that the queue is full, and accepts again once there is room', async () => {
    const intake = await b.intake({ pendingMax: 3, role: 'direct' })
    const op = intake.define('op', { body: Body, lane, run: () => 1 })
    const apply = intake.define('apply', { body: Body, apply: async (_, items) => items.map(() => 1) })
    const ids: string[] = []
    for (let n = 0; n < 3; n++) {
      const answer = await intake.submit(op, { n }, { respondAsync: true })
      if (answer.kind === 'queued') ids.push(answer.operationId)
    }
    expect(ids).toHaveLength(3)
    const refused = await intake.submit(op, { n: 4 })
    if (refused.kind !== 'refused') throw new Error('refused')
    expect(refused.refusal).toMatchObject({ code: 'queue_full' })
    expect(refused.refusal.retryAfterMs).toBeGreaterThanOrEqual(1_000)
    expect(refused.refusal.retryAfterMs).toBeLessThanOrEqual(60_000)
    // What leaves no operation does not need the queue.
    expect(await intake.submit(apply, { n: 4 })).toMatchObject({ kind: 'done' })
    await intake.store.cancel(ids[0] ?? '', [], 'why')
    await eventually(async () => {
      const answer = await intake.submit(op, { n: 5 }, { respondAsync: true })
      return answer.kind === 'queued' ? true : undefined
    }, 'the queue to have room')
  })
})

describe('one that asks for a ticket', () => {
  /** What was not given out with its acceptance is never run. */
  const claimingNothing = (store: Store) =>
    overriding(store, { step: (worker, part, settlements) => store.step(worker, part, settlements, null) })

  it('runs at once without a claim', async () => {
    const intake = await b.intake({ wrap: claimingNothing })
    const op = intake.define('op', { body: Body, run: (body) => body.n })
    const answer = await intake.submit(op, { n: 7 }, { respondAsync: true })
    if (answer.kind !== 'queued') throw new Error(`expected a ticket, not ${answer.kind}`)
    expect(answer).toMatchObject({ position: 0, reason: 'requested', replayed: false })
    expect(await b.finished(answer.operationId)).toMatchObject({ status: 'completed', attempts: 1, result: 7 })
  })

  it('gets the same ticket again for its Idempotency-Key while it runs', async () => {
    const intake = await b.intake({ wrap: claimingNothing })
    const started = signal()
    const release = signal()
    let runs = 0
    const op = intake.define('op', {
      body: Body,
      run: async () => {
        runs++
        started.fire()
        await release.promise
      },
    })
    const send = async (headers: Record<string, string> = {}) => {
      const response = await intake.fetch(op)(
        new Request('http://local/', {
          method: 'POST',
          body: '{"n":1}',
          headers: { 'content-type': 'application/json', 'idempotency-key': 'k', ...headers },
        }),
        { clientAddress: '127.0.0.1' },
      )
      return {
        status: response.status,
        ticket: response.headers.get('location'),
        replayed: response.headers.get('idempotent-replayed'),
        body: (await response.json()) as { operationId: string },
      }
    }
    const first = await send({ prefer: 'respond-async' })
    expect(first).toMatchObject({ status: 202, ticket: expect.stringContaining('/operations/'), replayed: null })
    await started.promise
    const again = { status: 202, ticket: first.ticket, replayed: 'true', body: first.body }
    expect(await send({ prefer: 'respond-async' })).toEqual(again)
    // The answer belongs to the key, whatever is preferred now.
    expect(await send()).toEqual(again)
    release.fire()
    await b.finished(first.body.operationId)
    expect(runs).toBe(1)
  })
})

describe('a claim under way', () => {
  it('takes no slots from requests while there is no backlog', async () => {
    const claiming = signal()
    const claimed = signal()
    const intake = await b.intake({
      concurrency: 2,
      wrap: (store) =>
        overriding(store, {
          step: async (worker, part, settlements, claim) => {
            const result = await store.step(worker, part, settlements, null)
            // Settlements are answered; a claim by itself hangs.
            if (claim !== null && settlements.length === 0) {
              claiming.fire()
              await claimed.promise
            }
            return result
          },
        }),
    })
    const release = signal()
    const running = new Set<number>()
    const op = intake.define('op', {
      body: Body,
      lane,
      run: async (body) => {
        running.add(body.n)
        await release.promise
        running.delete(body.n)
        return body.n
      },
    })
    await claiming.promise
    const both = [1, 2].map((n) => intake.submit(op, { n }))
    await eventually(() => (running.size === 2 ? true : undefined), 'both to run at the same time')
    release.fire()
    expect(await Promise.all(both)).toMatchObject([
      { kind: 'done', result: 1 },
      { kind: 'done', result: 2 },
    ])
    claimed.fire()
  })

  it('forgets no wake-up', async () => {
    const looked = signal<number>()
    const submitted = signal()
    let claims = 0
    const intake = await b.intake({
      wrap: (store) =>
        overriding(poolAt({ busy: 10, waiting: 0 })(store), {
          // Only what this process says to itself can show it that there is work.
          listen: () => Promise.resolve(),
          pulse: async (...given) => ({ ...(await store.pulse(...given)), waiting: false, nextDueMs: null }),
          step: async (worker, part, settlements, claim) => {
            const result = await store.step(worker, part, settlements, claim)
            if (claim !== null && ++claims === 1) {
              looked.fire(result.claimed.length)
              await submitted.promise
            }
            return result
          },
        }),
    })
    const op = intake.define('op', { body: Body, run: (body) => body.n })
    expect(await looked.promise).toBe(0)
    const answer = await intake.submit(op, { n: 7 })
    if (answer.kind !== 'queued') throw new Error(`expected a ticket, not ${answer.kind}`)
    submitted.fire()
    expect(await b.finished(answer.operationId)).toMatchObject({ status: 'completed', result: 7 })
  })
})

describe('slots', () => {
  /** Every acceptance takes so long, until it is let go altogether. */
  const slowToAccept = (held: Promise<void>, ms: number) => (store: Store) =>
    overriding(store, {
      accept: async (items, context) => {
        const accepted = await store.accept(items, context)
        await Promise.race([delay(ms), held])
        return accepted
      },
    })

  it('that become free while an acceptance is written are given away meanwhile, and never more run than there are', async () => {
    const quick = signal()
    const intake = await b.intake({ concurrency: 2, wrap: slowToAccept(quick.promise, 40) })
    const started: number[] = []
    let running = 0
    let most = 0
    const release = signal()
    const op = intake.define('op', {
      body: Body,
      lane,
      whenBusy: 'refuse',
      run: async ({ n }) => {
        started.push(n)
        most = Math.max(most, ++running)
        if (n >= 100) await release.promise
        running--
        return n
      },
    })
    // Acceptances last many times as long as runs: that is learnt one by one.
    for (let n = 0; n < 20; n++) expect(await intake.submit(op, { n })).toMatchObject({ kind: 'done' })
    const three = [100, 101, 102].map((n) => intake.submit(op, { n }))
    quick.fire()
    await eventually(() => (started.length === 22 ? true : undefined), 'two of the three to run')
    release.fire()
    expect(await Promise.all(three)).toMatchObject([{ kind: 'done' }, { kind: 'done' }, { kind: 'done' }])
    expect(started.slice(20)).toEqual([100, 101, 102])
    expect(most).toBe(2)
  })

  it('are given back when an operation ends, not when it is settled, and what ends meanwhile is settled together', async () => {
    const settling = signal()
    const settled = signal()
    const sizes: number[] = []
    const intake = await b.intake({
      concurrency: 3,
      wrap: (store) =>
        overriding(store, {
          step: async (worker, part, settlements, claim) => {
            if (settlements.length > 0) {
              sizes.push(settlements.length)
              settling.fire()
              await settled.promise
            }
            return store.step(worker, part, settlements, claim)
          },
        }),
    })
    const ran = new Set<number>()
    const op = intake.define('op', {
      body: Body,
      lane,
      run: ({ n }) => {
        ran.add(n)
        return n
      },
    })
    const first = intake.submit(op, { n: 1 })
    await settling.promise
    const others = [2, 3, 4].map((n) => intake.submit(op, { n }))
    await eventually(() => (ran.size === 4 ? true : undefined), 'all to have run before the first is settled')
    settled.fire()
    expect(await Promise.all([first, ...others])).toMatchObject(
      [1, 2, 3, 4].map((result) => ({ kind: 'done', result })),
    )
    expect(sizes[0]).toBe(1)
    expect(sizes.length).toBeLessThan(4)
  })
})
