import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { FailOperation, RetryOperation, type RunContext } from '../../src/index.js'
import type { Store } from '../../src/store/port.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

const Body = Type.Object({ n: Type.Number() })

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const idOf = (answer: { kind: string; operationId?: string }): string => {
  if (answer.operationId === undefined) throw new Error(`expected an operation, not ${answer.kind}`)
  return answer.operationId
}

describe.each(['direct', 'queued'] as const)('a handler, %s', (path) => {
  const options = path === 'direct' ? {} : { respondAsync: true, waitMs: 10_000 }

  it('that returns nothing is done', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { body: Body, run: () => undefined })
    expect(await intake.submit(op, { n: 1 }, options)).toMatchObject({ kind: 'done', result: null })
  })

  it('that throws is tried again, its attempts counted, until it works', async () => {
    const intake = await b.intake()
    const attempts: number[] = []
    const op = intake.define('op', {
      body: Body,
      run: (_, ctx) => {
        attempts.push(ctx.attempt)
        if (ctx.attempt < 3) throw new Error('not yet')
        return 'at last'
      },
    })
    const answer = await intake.submit(op, { n: 1 }, options)
    if (path === 'direct') expect(answer).toMatchObject({ kind: 'queued', reason: 'retrying' })
    expect(await b.finished(idOf(answer))).toMatchObject({ status: 'completed', attempts: 3, result: 'at last' })
    expect(attempts).toEqual([1, 2, 3])
    expect(await b.audit()).toEqual([])
  })

  it('that uses up its attempts is a complete dead letter, and can be redriven', async () => {
    const intake = await b.intake()
    let works = false
    const op = intake.define('op', {
      body: Body,
      maxRetries: 1,
      run: (body, ctx) => {
        if (!works) throw new Error(`no ${ctx.attempt}`)
        return body.n
      },
    })
    const id = idOf(await intake.submit(op, { n: 7 }, options))
    expect(await b.finished(id)).toMatchObject({ status: 'failed', attempts: 2, maxAttempts: 2, error: 'no 2' })
    const [letter] = await intake.store.deadLetters({}, 10, null)
    expect(letter).toMatchObject({ id, payload: '{"n":7}', error: 'no 2' })
    works = true
    expect(await intake.store.redrive([id, '00000000-0000-7000-8000-000000000000'])).toMatchObject({ moved: 1 })
    intake.wakeAll()
    expect(await b.finished(id)).toMatchObject({ status: 'completed', attempts: 1, result: 7 })
    expect(await b.audit()).toEqual([])
  })

  it('that throws FailOperation is not tried again', async () => {
    const intake = await b.intake()
    let runs = 0
    const op = intake.define('op', {
      body: Body,
      run: () => {
        runs++
        throw new FailOperation('never', { result: { status: 404 } })
      },
    })
    expect(await intake.submit(op, { n: 1 }, options)).toMatchObject({
      kind: 'failed',
      error: 'never',
      result: { status: 404 },
    })
    expect(runs).toBe(1)
  })

  it('that asks for a time of its own is tried again then', async () => {
    const intake = await b.intake()
    const at: number[] = []
    const op = intake.define('op', {
      body: Body,
      run: () => {
        at.push(performance.now())
        if (at.length === 1) throw new RetryOperation('busy there', { afterMs: 400 })
      },
    })
    await b.finished(idOf(await intake.submit(op, { n: 1 }, options)))
    const [first = 0, second = 0] = at
    expect(second - first).toBeGreaterThanOrEqual(395)
  })

  it('that outlasts its timeout hears of it, is counted, and cannot write any more', async () => {
    const intake = await b.intake()
    await b.sql('CREATE TABLE effects (n int)')
    const late = signal<unknown>()
    const op = intake.define('op', {
      body: Body,
      timeoutMs: 150,
      run: async (body, ctx) => {
        if (ctx.attempt > 1) return 'second'
        await ctx.tx.query('INSERT INTO effects VALUES ($1)', [body.n])
        await new Promise<void>((resolve) => ctx.signal.addEventListener('abort', () => resolve()))
        late.fire(await ctx.tx.query('INSERT INTO effects VALUES (99)').catch((fault: unknown) => fault))
        return 'first'
      },
    })
    const id = idOf(await intake.submit(op, { n: 1 }, options))
    expect(await b.finished(id)).toMatchObject({ status: 'completed', attempts: 2, result: 'second' })
    expect(await late.promise).toBeInstanceOf(Error)
    expect(await b.sql('SELECT n FROM effects')).toEqual([])
  })

  it('that always outlasts its timeout ends as a dead letter', async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      body: Body,
      timeoutMs: 60,
      maxRetries: 1,
      run: () => new Promise(() => undefined),
    })
    const id = idOf(await intake.submit(op, { n: 1 }, options))
    expect(await b.finished(id)).toMatchObject({
      status: 'failed',
      attempts: 2,
      error: expect.stringContaining('timeout'),
    })
  })

  it('that writes with ctx.tx and then throws leaves nothing', async () => {
    const intake = await b.intake()
    await b.sql('CREATE TABLE effects (n int)')
    const op = intake.define('op', {
      body: Body,
      maxRetries: 0,
      run: async (body, ctx) => {
        await ctx.tx.query('INSERT INTO effects VALUES ($1)', [body.n])
        throw new Error('after the write')
      },
    })
    expect(await b.finished(idOf(await intake.submit(op, { n: 1 }, options)))).toMatchObject({ status: 'failed' })
    expect(await b.sql('SELECT n FROM effects')).toEqual([])
  })

  it('that writes with ctx.tx is settled by that commit', async () => {
    const intake = await b.intake()
    await b.sql('CREATE TABLE effects (n int)')
    const op = intake.define('op', {
      body: Body,
      run: async (body, ctx) => {
        const { rows } = await ctx.tx.query<{ n: number }>('INSERT INTO effects VALUES ($1) RETURNING n', [body.n])
        return rows[0]?.n
      },
    })
    expect(await intake.submit(op, { n: 5 }, options)).toMatchObject({ kind: 'done', result: 5 })
    expect(await b.sql('SELECT n FROM effects')).toEqual([{ n: 5 }])
    expect(await b.audit()).toEqual([])
  })

  it('whose result cannot be stored fails like one that throws, and the process continues', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { body: Body, maxRetries: 0, run: (body) => (body.n === 1 ? 10n : 'fine') })
    const id = idOf(await intake.submit(op, { n: 1 }, options))
    expect(await b.finished(id)).toMatchObject({ status: 'failed' })
    expect(await intake.submit(op, { n: 2 }, options)).toMatchObject({ kind: 'done', result: 'fine' })
  })

  it('gets its context', async () => {
    const intake = await b.intake()
    let seen: Partial<RunContext> = {}
    const op = intake.define('op', {
      body: Body,
      lane: () => ['queue', 'partition'],
      maxRetries: 5,
      run: (_, ctx) => {
        const { id, type, identity, queue, partition, attempt, maxAttempts, traceparent } = ctx
        seen = { id, type, identity, queue, partition, attempt, maxAttempts, traceparent }
      },
    })
    const traceparent = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'
    const answer = await intake.submit(op, { n: 1 }, { ...options, identity: 'ann', traceparent })
    expect(seen).toEqual({
      id: idOf(answer),
      type: 'op',
      identity: 'ann',
      queue: 'queue',
      partition: 'partition',
      attempt: 1,
      maxAttempts: 6,
      traceparent,
    })
  })
})

describe('a direct run', () => {
  it('that outlasts the patience becomes a ticket and runs once', async () => {
    const intake = await b.intake({ directWaitMs: 100 })
    const release = signal()
    let runs = 0
    const op = intake.define('op', {
      body: Body,
      run: async () => {
        runs++
        await release.promise
        return 'slow'
      },
    })
    const answer = await intake.submit(op, { n: 1 })
    expect(answer).toMatchObject({ kind: 'queued', reason: 'still_running', position: 0 })
    expect(await b.ticket(idOf(answer))).toMatchObject({ status: 'processing' })
    release.fire()
    expect(await b.finished(idOf(answer))).toMatchObject({ status: 'completed', result: 'slow', attempts: 1 })
    expect(runs).toBe(1)
  })
})

describe('cancelling', () => {
  it('stops a running one whose handler can stop, asked from another instance', async () => {
    const intake = await b.intake({ directWaitMs: 50 })
    const other = await b.intake()
    const stopped = signal<unknown>()
    const options = {
      body: Body,
      abortable: true,
      run: (_: unknown, ctx: RunContext) =>
        new Promise<never>(() => {
          ctx.signal.addEventListener('abort', () => stopped.fire(ctx.signal.reason))
        }),
    }
    const op = intake.define('op', options)
    other.define('op', options)
    const id = idOf(await intake.submit(op, { n: 1 }))
    expect(await other.store.cancel(id, other.abortableTypes, 'by a test')).toBe('asked')
    other.wakeAll('cancel')
    expect(await stopped.promise).toMatchObject({ code: 'cancelled' })
    expect(await b.finished(id)).toMatchObject({ status: 'cancelled' })
    expect(await b.audit()).toEqual([])
  })

  it('leaves a running one alone whose handler cannot, and takes out one that waits', async () => {
    const intake = await b.intake({ directWaitMs: 50 })
    const release = signal()
    const ran: number[] = []
    const op = intake.define('op', {
      body: Body,
      lane: () => 'one',
      run: async (body) => {
        await release.promise
        ran.push(body.n)
      },
    })
    const first = idOf(await intake.submit(op, { n: 1 }))
    const second = idOf(await intake.submit(op, { n: 2 }))
    const third = idOf(await intake.submit(op, { n: 3 }))
    expect(await intake.store.cancel(first, intake.abortableTypes, 'why')).toBe('running')
    expect(await intake.store.cancel(second, [], 'why')).toBe('cancelled')
    expect(await intake.store.cancel(second, [], 'why')).toBe('gone')
    release.fire()
    await b.finished(third)
    expect(ran).toEqual([1, 3])
    expect(await b.ticket(second)).toMatchObject({ status: 'cancelled' })
    expect(await b.audit()).toEqual([])
  })

  it('answers a caller that waits for a cancelled operation', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { body: Body, delayMs: () => 60_000, run: () => 1 })
    const waiting = intake.submit(op, { n: 1 }, { waitMs: 20_000, idempotencyKey: 'k' })
    const id = await eventually(async () => (await intake.store.tickets({}, 1, null))[0]?.id, 'the operation')
    expect(await intake.store.cancel(id, [], 'why')).toBe('cancelled')
    expect(await waiting).toMatchObject({ kind: 'failed', operationId: id })
  })
})

describe('when things are due', () => {
  it('a short delay is not held up by a long one elsewhere', async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      body: Body,
      lane: (body) => ['lane', String(body.n)],
      delayMs: (body) => body.n,
      run: (body) => body.n,
    })
    const long = await intake.submit(op, { n: 50_000 })
    expect(long).toMatchObject({ kind: 'queued', reason: 'requested' })
    await eventually(() => (intake.queueDepth > 0 ? true : undefined), 'the pulse to report it')
    // Long enough for a pulse to have set its timer for the long one.
    const pulsed = await b.intake()
    pulsed.define('op', { body: Body, run: (body) => body.n })
    const short = await intake.submit(op, { n: 300 })
    const finished = await b.finished(idOf(short), 3_000)
    expect((finished.startedAt?.getTime() ?? 0) - finished.createdAt.getTime()).toBeGreaterThanOrEqual(299)
  })

  it('a paused lane waits and continues when it is resumed', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { body: Body, lane: () => ['held', 'a'], run: (body) => body.n })
    await intake.store.pause('held', null)
    const answer = await intake.submit(op, { n: 1 })
    expect(answer).toMatchObject({ kind: 'queued' })
    expect(await intake.submit(op, { n: 2 }, { waitMs: 300 })).toMatchObject({ kind: 'queued' })
    await intake.store.resume('held', null)
    intake.wakeAll()
    expect(await b.finished(idOf(answer))).toMatchObject({ status: 'completed' })
  })

  it('a lane that is resumed just as a worker gives it back is not left for half a minute', async () => {
    const resumed = signal()
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          // The worker has claimed the lane while it was paused; the operator resumes it before it is given back.
          step: async (worker, part, settlements, claim) => {
            if (settlements.length > 0 && settlements[0]?.leaving.length === 0) {
              await store.resume('held', null)
              resumed.fire()
            }
            return store.step(worker, part, settlements, claim)
          },
        }),
    })
    const op = intake.define('op', { body: Body, lane: () => ['held', 'a'], run: (body) => body.n })
    await intake.store.pause('held', null)
    const answer = await intake.submit(op, { n: 1 })
    await resumed.promise
    expect(await b.finished(idOf(answer), 5_000)).toMatchObject({ status: 'completed' })
  })
})

describe('effect and completion', () => {
  /** A store whose handlers' transactions commit, but whose word of it is lost. */
  const losingCommits = (times: { left: number }) => (store: Store) =>
    overriding(store, {
      begin: async () => {
        const tx = await store.begin(30_000)
        return {
          query: tx.query,
          rollback: tx.rollback,
          commit: async () => {
            await tx.commit()
            if (times.left-- > 0) throw Object.assign(new Error('the connection was lost'), { code: 'unavailable' })
          },
        }
      },
    })

  it.each([0, 3])('happen once when the answer to the commit is lost (%i retries left)', async (maxRetries) => {
    const times = { left: 1 }
    const intake = await b.intake({ wrap: losingCommits(times) })
    await b.sql('CREATE TABLE effects (n int)')
    const op = intake.define('op', {
      body: Body,
      maxRetries,
      lane: () => ['one', 'lane'],
      run: async (body, ctx) => {
        await ctx.tx.query('INSERT INTO effects VALUES ($1)', [body.n])
        return body.n
      },
    })
    const first = idOf(await intake.submit(op, { n: 1 }))
    const second = idOf(await intake.submit(op, { n: 2 }))
    expect(await b.finished(first)).toMatchObject({ status: 'completed', attempts: 1 })
    // The one behind it is neither charged for it nor stuck.
    expect(await b.finished(second)).toMatchObject({ status: 'completed', attempts: 1 })
    expect(times.left).toBeLessThan(0)
    expect(await b.sql('SELECT n FROM effects ORDER BY n')).toEqual([{ n: 1 }, { n: 2 }])
    expect(await b.audit()).toEqual([])
  })

  it('are both undone when the lease was lost meanwhile', async () => {
    const intake = await b.intake({ directWaitMs: 100 })
    await b.sql('CREATE TABLE effects (n int)')
    const written = signal()
    const release = signal()
    let runs = 0
    const op = intake.define('op', {
      body: Body,
      run: async (body, ctx) => {
        runs++
        await ctx.tx.query('INSERT INTO effects VALUES ($1)', [body.n])
        if (runs > 1) return 'second'
        written.fire()
        await release.promise
        return 'first'
      },
    })
    const answer = intake.submit(op, { n: 1 })
    await written.promise
    // Another process found this one dead.
    await b.sql("UPDATE spillway.workers SET until = now() - interval '1 minute'")
    await b.sql('SELECT * FROM spillway.recover()')
    release.fire()
    const id = idOf(await answer)
    expect(await b.finished(id)).toMatchObject({ status: 'completed', result: 'second', attempts: 2 })
    expect(await b.sql('SELECT n FROM effects')).toEqual([{ n: 1 }])
    expect(await b.audit()).toEqual([])
  })
})
