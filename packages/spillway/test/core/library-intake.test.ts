import pg from 'pg'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, expectTypeOf, it } from 'vitest'
import { type Answer, connections, type Definition, type RunContext, type Tx } from '../../src/index.js'
import { addressOf, startHalfOpenProxy, through } from '../half-open-proxy.js'
import { type Bench, bench, eventually, signal } from '../pipeline-fixture.js'

const Order = Type.Object({ customer: Type.String(), total: Type.Number(), note: Type.Optional(Type.String()) })

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

describe('types from end to end', () => {
  it('infers body, context and result from the definition', async () => {
    const intake = await b.intake()
    const place = intake.define('orders.place', {
      body: Order,
      lane: (order, request) => {
        expectTypeOf(order).toEqualTypeOf<{ customer: string; total: number; note?: string }>()
        expectTypeOf(request.clientAddress).toBeString()
        return ['orders', order.customer]
      },
      run: (order, ctx) => {
        expectTypeOf(order.total).toBeNumber()
        expectTypeOf(ctx).toEqualTypeOf<RunContext>()
        return { charged: order.total }
      },
    })
    expectTypeOf(place).toEqualTypeOf<
      Definition<{ customer: string; total: number; note?: string }, { charged: number }>
    >()
    const answer = await intake.submit(place, { customer: 'ann', total: 3 })
    expectTypeOf(answer).toEqualTypeOf<Answer<{ charged: number }>>()
    expect(answer).toMatchObject({ kind: 'done', result: { charged: 3 } })
    // @ts-expect-error a number is missing
    void (() => intake.submit(place, { customer: 'ann' }))
    // @ts-expect-error the total is no text
    void (() => intake.submit(place, { customer: 'ann', total: '3' }))
    // @ts-expect-error neither run nor apply
    void (() => intake.define('nothing', { body: Order }))
    // @ts-expect-error not both
    void (() => intake.define('both', { body: Order, run: () => 1, apply: async () => [1] }))
  })

  it('takes any JSON value if the definition has no schema', async () => {
    const intake = await b.intake()
    const echo = intake.define('echo', {
      run: (body) => {
        expectTypeOf(body).toBeUnknown()
        return body
      },
    })
    for (const body of [{ value: [1, null] }, 'text', 7]) {
      expect(await intake.submit(echo, body)).toMatchObject({ kind: 'done', result: body })
    }
  })

  it('infers the items of a set-based definition', async () => {
    const intake = await b.intake()
    const note = intake.define('notes.add', {
      body: Type.Object({ text: Type.String() }),
      apply: async (tx, items) => {
        expectTypeOf(tx).toEqualTypeOf<Tx>()
        expectTypeOf(items[0]?.body).toEqualTypeOf<{ text: string } | undefined>()
        return items.map((item) => item.body.text.length)
      },
    })
    expect(await intake.submit(note, { text: 'four' })).toMatchObject({ kind: 'done', result: 4 })
  })
})

describe('define', () => {
  it('refuses a type that is defined already, is no name, or belongs to another intake', async () => {
    const intake = await b.intake()
    const options = { body: Order, run: () => null }
    const mine = intake.define('orders.place', options)
    expect(() => intake.define('orders.place', options)).toThrow(/defined already/)
    for (const type of ['', 'with space', '.dot', 'x'.repeat(101), 'a\0b']) {
      expect(() => intake.define(type, options)).toThrow('the name must be 1 to 100 letters')
    }
    expect(intake.find('orders.place')?.type).toBe(mine.type)
    expect(intake.find('other')).toBeUndefined()
    await expect(intake.submit({ type: 'other' }, {})).rejects.toThrow(/not defined/)
  })
})

describe('submit', () => {
  it('runs at once and answers with the result; the ticket has it too', async () => {
    const intake = await b.intake()
    const place = intake.define('orders.place', { body: Order, run: (order) => ({ charged: order.total }) })
    const answer = await intake.submit(place, { customer: 'ann', total: 3 }, { identity: 'ann', traceparent: '00-x' })
    if (answer.kind !== 'done') throw new Error(`expected done, not ${answer.kind}`)
    expect(answer.result).toEqual({ charged: 3 })
    expect(await b.ticket(answer.operationId)).toMatchObject({
      status: 'completed',
      identity: 'ann',
      queue: 'orders.place',
      partition: 'Default',
      attempts: 1,
      result: { charged: 3 },
      trace: '00-x',
    })
    expect(await b.audit()).toEqual([])
  })

  it('queues on request, and waits for it where asked', async () => {
    const intake = await b.intake()
    const place = intake.define('orders.place', { body: Order, run: (order) => order.total })
    const queued = await intake.submit(place, { customer: 'ann', total: 3 }, { respondAsync: true })
    expect(queued).toMatchObject({ kind: 'queued', reason: 'requested', position: 0, replayed: false })
    if (queued.kind === 'queued') expect(await b.finished(queued.operationId)).toMatchObject({ result: 3 })
    const waited = await intake.submit(place, { customer: 'ann', total: 4 }, { respondAsync: true, waitMs: 5_000 })
    expect(waited).toMatchObject({ kind: 'done', result: 4 })
  })

  it('answers with the ticket when the caller’s signal fires while it runs', async () => {
    const intake = await b.intake()
    const [started, release] = [signal(), signal()]
    const place = intake.define('orders.place', {
      body: Order,
      run: async (order) => {
        started.fire()
        await release.promise
        return order.total
      },
    })
    const leaving = new AbortController()
    const asked = intake.submit(place, { customer: 'ann', total: 5 }, { signal: leaving.signal })
    await started.promise
    leaving.abort()
    const answer = await asked
    expect(answer).toMatchObject({ kind: 'queued', reason: 'still_running' })
    release.fire()
    if (answer.kind === 'queued') expect(await b.finished(answer.operationId)).toMatchObject({ result: 5 })
  })

  it('keeps every JSON value as it came', async () => {
    const intake = await b.intake()
    const echo = intake.define('echo', { body: Type.Unknown(), run: (body) => ({ body }) })
    for (const value of [null, 0, '', 'a\u2028\u{1F600}', [], { '': [1, null, { a: 1.5e300 }] }, false]) {
      const answer = await intake.submit(echo, value, { respondAsync: true, waitMs: 5_000 })
      expect(answer).toMatchObject({ kind: 'done', result: { body: value } })
    }
  })
})

describe('validation without HTTP', () => {
  const Note = Type.Object({ text: Type.String({ maxLength: 5 }) })
  const tooLong = {
    kind: 'refused',
    refusal: { code: 'invalid_request', errors: [{ path: '/text', message: expect.any(String) }] },
  }

  it('refuses a body that does not fit the schema, and stores nothing', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { body: Note, run: () => 1 })
    expect(await intake.submit(op, { text: 'too long' })).toMatchObject(tooLong)
    expect(await intake.submit(op, { text: 'ok', more: 1 } as { text: string })).toMatchObject({
      kind: 'refused',
      refusal: { code: 'invalid_request', errors: [{ path: '/more', message: 'is not a known member' }] },
    })
    const enqueued = await intake.transaction((tx) => intake.enqueue(op, { text: 'too long' }, { tx }))
    expect(enqueued).toMatchObject(tooLong)
    expect(await intake.submit(op, { text: 'ok' })).toMatchObject({ kind: 'done' })
    expect(await b.sql('SELECT 1 FROM spillway.ops UNION ALL SELECT 1 FROM spillway.history')).toHaveLength(1)
  })

  it('asks the check of the definition, at once or later', async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      body: Note,
      check: ({ text }, request) => {
        if (text === 'now') return { code: 'forbidden', detail: `not for ${request.user?.id}` }
        return Promise.resolve(text === 'later' ? { code: 'not_found', detail: 'gone' } : null)
      },
      run: () => 1,
    })
    expect(await intake.submit(op, { text: 'now' }, { identity: 'ann' })).toMatchObject({
      kind: 'refused',
      refusal: { code: 'forbidden', detail: 'not for ann' },
    })
    expect(await intake.submit(op, { text: 'later' })).toMatchObject({ refusal: { code: 'not_found' } })
    expect(await intake.submit(op, { text: 'ok' })).toMatchObject({ kind: 'done' })
  })

  it('refuses all items of a request when one is not valid', async () => {
    const intake = await b.intake()
    await b.sql(`CREATE FUNCTION public.ones(verdicts text[], seqs bigint[]) RETURNS json[] LANGUAGE sql AS
      $$ SELECT array_fill('1'::json, ARRAY[cardinality(verdicts)]) $$`)
    const op = intake.define('op', { body: Note, apply: { function: 'public.ones', values: () => [] } })
    expect(await intake.submitAll(op, [{ text: 'a' }, { text: 'too long' }])).toMatchObject([tooLong, tooLong])
    expect(await intake.submitAll(op, [{ text: 'a' }])).toMatchObject([{ kind: 'done' }])
  })

  it('gives back the permit of a body that is refused', async () => {
    const intake = await b.intake()
    const gates = [connections({ perIdentity: 1, total: 1 })]
    const op = intake.define('op', { body: Note, gates, run: () => 1 })
    expect(await intake.submit(op, { text: 'too long' })).toMatchObject(tooLong)
    expect(await intake.submit(op, { text: 'ok' })).toMatchObject({ kind: 'done' })
  })
})

describe("enqueue inside a transaction of one's own", () => {
  const connected = async (run: (client: pg.Client) => Promise<void>): Promise<void> => {
    const client = new pg.Client({ connectionString: b.url })
    await client.connect()
    try {
      await run(client)
    } finally {
      await client.end()
    }
  }

  it('runs after the commit, and not before', async () => {
    const intake = await b.intake()
    const ran: number[] = []
    const place = intake.define('orders.place', { body: Order, run: (order) => void ran.push(order.total) })
    await connected(async (client) => {
      await client.query('CREATE TABLE mine (n int)')
      await client.query('BEGIN')
      await client.query('INSERT INTO mine VALUES (1)')
      const answer = await intake.enqueue(place, { customer: 'ann', total: 7 }, { tx: client })
      if (answer.kind !== 'queued') throw new Error(`expected queued, not ${answer.kind}`)
      // Numbers, whatever the caller's driver makes of a bigint.
      expect(answer).toMatchObject({ position: 0, reason: 'requested' })
      expect(typeof answer.waitMs).toBe('number')
      expect(await intake.store.ticket(answer.operationId)).toBeNull()
      expect(ran).toEqual([])
      await client.query('COMMIT')
      await b.finished(answer.operationId)
      expect(ran).toEqual([7])
    })
    expect(await b.audit()).toEqual([])
  })

  it('never existed after a rollback', async () => {
    const intake = await b.intake()
    const ran: number[] = []
    const place = intake.define('orders.place', { body: Order, run: (order) => void ran.push(order.total) })
    await connected(async (client) => {
      await client.query('BEGIN')
      const gone = await intake.enqueue(place, { customer: 'ann', total: 7 }, { tx: client, idempotencyKey: 'k' })
      await client.query('ROLLBACK')
      // The same lane goes on, and the key is free.
      const next = await intake.submit(place, { customer: 'ann', total: 8 }, { idempotencyKey: 'k', waitMs: 5_000 })
      expect(next).toMatchObject({ kind: 'done', replayed: false })
      expect(ran).toEqual([8])
      if (gone.kind === 'queued') expect(await intake.store.ticket(gone.operationId)).toBeNull()
    })
    expect(await b.audit()).toEqual([])
  })

  it('wakes an instance elsewhere that was idle', async () => {
    const gateway = await b.intake({ role: 'direct' })
    const worker = await b.intake()
    const done = signal<number>()
    const options = { body: Order, run: (order: { total: number }) => done.fire(order.total) }
    const place = gateway.define('orders.place', options)
    worker.define('orders.place', options)
    await connected(async (client) => {
      await client.query('BEGIN')
      await gateway.enqueue(place, { customer: 'ann', total: 9 }, { tx: client })
      await client.query('COMMIT')
    })
    expect(await done.promise).toBe(9)
  })
})

describe('close', () => {
  it('refuses new work, finishes running work, and leaves the rest to others', async () => {
    const intake = await b.intake({ concurrency: 1 })
    const started = signal()
    const release = signal()
    const place = intake.define('orders.place', {
      body: Order,
      lane: (order) => ['orders', order.customer],
      run: async (order) => {
        started.fire()
        await release.promise
        return order.total
      },
    })
    const running = intake.submit(place, { customer: 'ann', total: 1 })
    await started.promise
    const behind = await intake.submit(place, { customer: 'ann', total: 2 })
    if (behind.kind !== 'queued') throw new Error(`expected queued, not ${behind.kind}`)
    const closing = intake.close()
    expect(intake.isDraining).toBe(true)
    expect(await intake.submit(place, { customer: 'bob', total: 3 })).toMatchObject({
      kind: 'refused',
      refusal: { code: 'draining' },
    })
    release.fire()
    expect(await running).toMatchObject({ kind: 'done', result: 1 })
    await closing
    await intake.close()
    expect(await b.ticket(behind.operationId)).toMatchObject({ status: 'pending', attempts: 0 })
    const next = await b.intake()
    next.define('orders.place', { body: Order, run: (order) => order.total })
    expect(await b.finished(behind.operationId)).toMatchObject({ status: 'completed', attempts: 1 })
    expect(await b.audit()).toEqual([])
  })

  it('gives up on a handler that does not end, uncounted, and another runs it', async () => {
    const intake = await b.intake({ drainMs: 100 })
    const started = signal<AbortSignal>()
    const place = intake.define('orders.place', {
      body: Order,
      run: (_, ctx) => {
        started.fire(ctx.signal)
        return new Promise<number>(() => undefined)
      },
    })
    const stuck = intake.submit(place, { customer: 'ann', total: 1 })
    const aborted = await started.promise
    await intake.close()
    expect(aborted.reason).toMatchObject({ code: 'stopping' })
    const answer = await stuck
    if (answer.kind !== 'queued') throw new Error(`expected queued, not ${answer.kind}`)
    expect(answer.reason).toBe('still_running')
    const next = await b.intake()
    next.define('orders.place', { body: Order, run: () => 2 })
    expect(await b.finished(answer.operationId)).toMatchObject({ status: 'completed', attempts: 1, result: 2 })
  })

  it('takes drainMs and a second at most, although a handler ignores its signal', async () => {
    const intake = await b.intake({ drainMs: 300 })
    const stubborn = intake.define('stubborn', { run: () => new Promise(() => undefined) })
    void intake.submit(stubborn, 1)
    await eventually(async () => (await b.sql('SELECT FROM spillway.ops'))[0], 'it to run')
    const began = performance.now()
    await intake.close()
    expect(performance.now() - began).toBeLessThan(1_300)
  })

  it('takes drainMs and a second at most, although the database does not answer', async () => {
    const proxy = await startHalfOpenProxy(addressOf(b.url))
    const intake = await b.intake({ drainMs: 300, postgres: { url: through(proxy, b.url) } })
    intake.define('idle', { run: () => 1 })
    proxy.stall()
    const began = performance.now()
    await intake.close()
    expect(performance.now() - began).toBeLessThan(1_500)
    await proxy.close()
  })

  it('answers before the store is reachable, and starts when it is', async () => {
    const intake = await b.intake({ waitForStore: false })
    const place = intake.define('orders.place', { body: Order, run: () => 1 })
    expect(await intake.submit(place, { customer: 'ann', total: 1 })).toMatchObject({
      kind: 'refused',
      refusal: { code: 'store_unavailable', retryAfterMs: expect.any(Number) },
    })
    await eventually(() => intake.isReady || undefined, 'the intake to be ready')
    expect(await intake.submit(place, { customer: 'ann', total: 1 })).toMatchObject({ kind: 'done' })
  })
})
