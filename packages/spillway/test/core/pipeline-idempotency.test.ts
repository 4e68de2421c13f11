import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { capacity, FailOperation } from '../../src/index.js'
import { type Bench, bench, eventually, signal } from '../pipeline-fixture.js'

const Body = Type.Object({ n: Type.Integer() })

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const key = { idempotencyKey: 'k', identity: 'ann' }

describe('an Idempotency-Key', () => {
  it('gives the stored answer again and runs nothing', async () => {
    const intake = await b.intake()
    let runs = 0
    const op = intake.define('op', { body: Body, run: () => ({ run: ++runs }) })
    const first = await intake.submit(op, { n: 1 }, key)
    expect(await intake.submit(op, { n: 1 }, key)).toEqual({ ...first, replayed: true })
    const other = await b.intake()
    const elsewhere = other.define('op', { body: Body, run: () => ({ run: ++runs }) })
    expect(await other.submit(elsewhere, { n: 1 }, key)).toEqual({ ...first, replayed: true })
    expect(runs).toBe(1)
  })

  it('is refused with another body', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { body: Body, run: () => 1 })
    await intake.submit(op, { n: 1 }, key)
    expect(await intake.submit(op, { n: 2 }, key)).toMatchObject({ refusal: { code: 'idempotency_mismatch' } })
  })

  it('belongs to one identity and one type', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { body: Body, run: (body) => body.n })
    const other = intake.define('other', { body: Body, run: (body) => -body.n })
    await intake.submit(op, { n: 1 }, key)
    expect(await intake.submit(op, { n: 2 }, { ...key, identity: 'bob' })).toMatchObject({ kind: 'done', result: 2 })
    expect(await intake.submit(other, { n: 3 }, key)).toMatchObject({ kind: 'done', result: -3 })
  })

  it('says that the first is in progress while it is', async () => {
    const intake = await b.intake()
    const started = signal()
    const release = signal()
    const op = intake.define('op', {
      body: Body,
      run: async () => {
        started.fire()
        await release.promise
        return 'once'
      },
    })
    const first = intake.submit(op, { n: 1 }, key)
    await started.promise
    expect(await intake.submit(op, { n: 1 }, key)).toMatchObject({ refusal: { code: 'idempotency_in_progress' } })
    release.fire()
    expect(await first).toMatchObject({ kind: 'done' })
    expect(await intake.submit(op, { n: 1 }, key)).toMatchObject({ kind: 'done', result: 'once', replayed: true })
  })

  it('runs once for many at the same time, on two instances', async () => {
    let runs = 0
    const intakes = await Promise.all([b.intake(), b.intake()])
    const submits = intakes.flatMap((intake) => {
      const op = intake.define('op', { body: Body, run: () => ++runs })
      return Array.from({ length: 25 }, () => intake.submit(op, { n: 1 }, key))
    })
    for (const answer of await Promise.all(submits)) {
      if (answer.kind === 'refused') expect(answer.refusal.code).toBe('idempotency_in_progress')
      else expect(answer).toMatchObject({ kind: 'done', result: 1 })
    }
    expect(runs).toBe(1)
  })

  it('is free again after a refusal', async () => {
    const intake = await b.intake()
    const release = signal()
    const op = intake.define('op', {
      body: Body,
      lane: (body) => ['q', String(body.n)],
      gates: [capacity({ limit: 1 })],
      run: (body) => (body.n === 1 ? release.promise : undefined),
    })
    const holding = intake.submit(op, { n: 1 })
    await eventually(
      async () => ((await b.sql('SELECT 1 FROM spillway.ops')).length === 1 ? true : undefined),
      'the place to be taken',
    )
    expect(await intake.submit(op, { n: 2 }, key)).toMatchObject({ refusal: { code: 'capacity_exceeded' } })
    release.fire()
    await holding
    const answer = await eventually(async () => {
      const answer = await intake.submit(op, { n: 2 }, key)
      return answer.kind === 'refused' ? undefined : answer
    }, 'the gate to open')
    expect(answer).toMatchObject({ kind: 'done', replayed: false })
  })

  it('keeps a failure too', async () => {
    const intake = await b.intake()
    let runs = 0
    const op = intake.define('op', {
      body: Body,
      run: () => {
        runs++
        throw new FailOperation('never', { result: { why: 1 } })
      },
    })
    const first = await intake.submit(op, { n: 1 }, key)
    expect(first).toMatchObject({ kind: 'failed', error: 'never', result: { why: 1 } })
    expect(await intake.submit(op, { n: 1 }, key)).toEqual({ ...first, replayed: true })
    expect(runs).toBe(1)
  })

  it('can be used again once it was freed of its operation', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { body: Body, run: (body) => body.n })
    const first = await intake.submit(op, { n: 1 }, key)
    const operationId = first.kind === 'done' ? first.operationId : ''
    const used = { identity: key.identity, key: key.idempotencyKey, operationId }
    await intake.forgetKey(op, used)
    expect(await intake.submit(op, { n: 2 }, key)).toMatchObject({ kind: 'done', result: 2, replayed: false })
    // By then it is another's.
    await intake.forgetKey(op, used)
    expect(await intake.submit(op, { n: 2 }, key)).toMatchObject({ result: 2, replayed: true })
  })

  it('keeps the ticket of a queued operation', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { body: Body, run: (body) => body.n })
    const first = await intake.submit(op, { n: 1 }, { ...key, respondAsync: true })
    expect(first).toMatchObject({ kind: 'queued', reason: 'requested' })
    expect(await intake.submit(op, { n: 1 }, { ...key, respondAsync: true })).toEqual({ ...first, replayed: true })
  })

  it('keeps the ticket of a run that became one', async () => {
    const intake = await b.intake({ directWaitMs: 100 })
    const release = signal()
    const op = intake.define('op', { body: Body, run: () => release.promise })
    const first = await intake.submit(op, { n: 1 }, key)
    expect(first).toMatchObject({ kind: 'queued', reason: 'still_running' })
    expect(await intake.submit(op, { n: 1 }, key)).toEqual({ ...first, replayed: true })
    release.fire()
    if (first.kind === 'queued') await b.finished(first.operationId)
    expect(await intake.submit(op, { n: 1 }, key)).toEqual({ ...first, replayed: true })
  })

  it('keeps the ticket of a run that is retried', async () => {
    const intake = await b.intake({ retryBaseMs: 100_000, retryMaxMs: 100_000 })
    const op = intake.define('op', {
      body: Body,
      run: () => {
        throw new Error('later')
      },
    })
    const first = await intake.submit(op, { n: 1 }, key)
    expect(first).toMatchObject({ kind: 'queued', reason: 'retrying' })
    const again = await intake.submit(op, { n: 1 }, key)
    if (first.kind !== 'queued') throw new Error('queued')
    expect(again).toEqual({ ...first, waitMs: expect.closeTo(first.waitMs, 0), replayed: true })
  })

  it('is answered when its operation is cancelled', async () => {
    const intake = await b.intake({ directWaitMs: 20_000 })
    const started = signal<string>()
    const op = intake.define('op', {
      body: Body,
      abortable: true,
      run: (_, ctx) => {
        started.fire(ctx.id)
        return new Promise(() => undefined)
      },
    })
    const first = intake.submit(op, { n: 1 }, key)
    await intake.store.cancel(await started.promise, ['op'], 'why')
    intake.wakeAll('cancel')
    expect(await first).toMatchObject({ kind: 'failed' })
    expect(await intake.submit(op, { n: 1 }, key)).toMatchObject({ kind: 'failed', replayed: true })
  })

  it('is forgotten after its time', async () => {
    const intake = await b.intake({ idempotencyTtlMs: 1 })
    let runs = 0
    const op = intake.define('op', { body: Body, run: () => ++runs })
    await intake.submit(op, { n: 1 }, key)
    expect(await intake.submit(op, { n: 2 }, key)).toMatchObject({ kind: 'done', result: 2, replayed: false })
  })
})

describe('waiting for a queued one', () => {
  it('answers with its result, also when another instance ran it', async () => {
    const gateway = await b.intake({ role: 'direct' })
    const worker = await b.intake()
    const op = gateway.define('op', { body: Body, run: () => 0 })
    worker.define('op', { body: Body, run: (body) => body.n })
    const answer = await gateway.submit(op, { n: 5 }, { respondAsync: true, waitMs: 10_000 })
    expect(answer).toMatchObject({ kind: 'done', result: 5, replayed: false })
  })

  it('reports a failure', async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      body: Body,
      run: () => {
        throw new FailOperation('never')
      },
    })
    expect(await intake.submit(op, { n: 5 }, { respondAsync: true, waitMs: 10_000 })).toMatchObject({
      kind: 'failed',
      error: 'never',
    })
  })

  it('gives the ticket when the time is up, or the caller gone', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { body: Body, delayMs: () => 60_000, run: () => 1 })
    expect(await intake.submit(op, { n: 1 }, { waitMs: 50 })).toMatchObject({ kind: 'queued', reason: 'requested' })
    const gone = new AbortController()
    const waiting = intake.submit(op, { n: 2 }, { waitMs: 60_000, signal: gone.signal })
    await eventually(() => (intake.waiters.size === 1 ? true : undefined), 'the wait to begin')
    gone.abort()
    expect(await waiting).toMatchObject({ kind: 'queued' })
  })
})
