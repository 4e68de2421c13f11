/** `intake.on`: events of this process, after their commits. */
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, expectTypeOf, it } from 'vitest'
import { type Answer, capacity, FailOperation, type Tx } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

const Order = Type.Object({ item: Type.String() })

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const idOf = (answer: Answer): string => ('operationId' in answer ? answer.operationId : '')

/** Everything that the intake reports, in order. */
function heard(intake: Intake): [string, Record<string, unknown>][] {
  const events: [string, Record<string, unknown>][] = []
  for (const name of ['completed', 'retried', 'failed', 'dead', 'refused'] as const) {
    intake.on(name, (event) => events.push([name, event as unknown as Record<string, unknown>]))
  }
  return events
}

describe('events', () => {
  it('report completed, retried, failed and dead operations, with what is known of them', async () => {
    const intake = await b.intake()
    const events = heard(intake)
    const place = intake.define('orders.place', {
      body: Order,
      lane: ({ item }) => ['orders', item],
      maxRetries: 1,
      run: ({ item }, { attempt }) => {
        if (item === 'bad') throw new FailOperation('out of stock')
        if (item === 'flaky' && attempt === 1) throw new Error('not yet')
        return { shipped: item }
      },
    })
    const ids: string[] = []
    for (const item of ['tea', 'bad', 'flaky']) {
      ids.push(idOf(await intake.submit(place, { item }, { identity: 'ann', traceparent: '00-t', waitMs: 20_000 })))
    }
    const unheard = idOf(await intake.submit(place, { item: 'bad' }, { identity: 'ann', respondAsync: true }))
    await eventually(() => events.length >= 6 || undefined, 'the last one to fail')
    const about = (at: number, partition: string, attempt: number) => ({
      ...{ id: ids[at], type: 'orders.place', queue: 'orders', partition, identity: 'ann' },
      ...{ attempt, maxAttempts: 2, traceparent: '00-t' },
    })
    const failure = { ...about(1, 'bad', 1), error: 'out of stock', result: null }
    expect(events).toEqual([
      ['completed', { ...about(0, 'tea', 1), result: { shipped: 'tea' } }],
      // Its caller was answered with it, so there is no dead letter.
      ['failed', failure],
      ['retried', { ...about(2, 'flaky', 1), error: 'not yet', retryInMs: expect.any(Number) }],
      ['completed', { ...about(2, 'flaky', 2), result: { shipped: 'flaky' } }],
      ['failed', { ...failure, id: unheard, traceparent: expect.any(String) }],
      ['dead', { ...failure, id: unheard, traceparent: expect.any(String) }],
    ])
  })

  it('follow the commit: the ticket is finished, and rows of ctx.tx are there', async () => {
    await b.sql('CREATE TABLE shipped (item text)')
    const intake = await b.intake()
    const place = intake.define('orders.place', {
      body: Order,
      run: async ({ item }, { tx }) => {
        await tx.query('INSERT INTO shipped VALUES ($1)', [item])
      },
    })
    const seen = signal<unknown[]>()
    intake.on('completed', async ({ id }) => {
      const rows = await b.sql('SELECT item FROM shipped')
      seen.fire([(await intake.tickets.get(id))?.status, rows])
    })
    await intake.submit(place, { item: 'tea' })
    expect(await seen.promise).toEqual(['completed', [{ item: 'tea' }]])
  })

  it('report effects that are applied with their acceptance, but not in a transaction that may roll back', async () => {
    await b.sql('CREATE TABLE notes (text text)')
    const intake = await b.intake()
    const events = heard(intake)
    const write = async (tx: Tx, items: readonly { body: { text: string } }[]) => {
      await tx.query('INSERT INTO notes SELECT unnest($1::text[])', [items.map(({ body }) => body.text)])
      return items.map(({ body }) => body.text.length)
    }
    const note = intake.define('notes.add', { body: Type.Object({ text: Type.String() }), apply: write })
    const id = idOf(await intake.submit(note, { text: 'four' }))
    await intake
      .transaction(async (tx) => {
        await intake.enqueue(note, { text: 'never' }, { tx })
        throw new Error('rolled back')
      })
      .catch(() => undefined)
    expect(events).toMatchObject([['completed', { id, type: 'notes.add', attempt: 1, result: 4 }]])
    await intake.submitMany(note, [{ text: 'a' }, { text: 'bc' }])
    expect(events.slice(1).map(([name, { result }]) => [name, result])).toEqual([
      ['completed', 1],
      ['completed', 2],
    ])
  })

  it('report refusals, with the gate and the time to come back', async () => {
    const intake = await b.intake()
    const events = heard(intake)
    const open = signal()
    const place = intake.define('orders.place', {
      ...{ body: Order, gates: [capacity({ limit: 1 })], lane: () => 'orders', run: () => open.promise },
    })
    const first = intake.submit(place, { item: 'tea' })
    await eventually(async () => (await b.sql('SELECT FROM spillway.ops')).length === 1, 'the first to be accepted')
    expect(await intake.submit(place, { item: 'milk' })).toMatchObject({ kind: 'refused' })
    expect(events).toEqual([
      [
        'refused',
        {
          ...{ type: 'orders.place', code: 'capacity_exceeded', gate: 'capacity' },
          ...{ detail: expect.any(String), retryAfterMs: expect.any(Number) },
        },
      ],
    ])
    open.fire()
    await first
  })

  it('report nothing of an attempt whose settlement was refused: another process has its lane', async () => {
    const intake = await b.intake()
    const events = heard(intake)
    const open = signal()
    const started = signal()
    const place = intake.define('orders.place', {
      body: Order,
      run: async () => {
        started.fire()
        await open.promise
      },
    })
    const submitted = intake.submit(place, { item: 'tea' })
    await started.promise
    await b.sql('DELETE FROM spillway.leases')
    open.fire()
    await submitted
    expect(events).toEqual([])
    await b.sql('TRUNCATE spillway.ops, spillway.lanes')
  })

  it('are not harmed by listeners that throw, reject or take their time', async () => {
    const intake = await b.intake()
    const place = intake.define('orders.place', { body: Order, run: ({ item }) => item })
    intake.on('completed', () => {
      throw new Error('listener broke')
    })
    intake.on('completed', async () => {
      throw new Error('listener rejected')
    })
    intake.on('completed', () => new Promise(() => undefined))
    const events = heard(intake)
    expect(await intake.submit(place, { item: 'tea' })).toMatchObject({ kind: 'done', result: 'tea' })
    expect(events).toHaveLength(1)
    const logged = await eventually(() => {
      const found = b.logged.filter(({ message }) => message === 'a listener of intake.on failed')
      return found.length === 2 ? found : undefined
    }, 'both faults to be logged')
    expect(logged).toMatchObject([
      { level: 'error', fields: { err: { message: 'listener broke' }, event: 'completed', type: 'orders.place' } },
      { level: 'error', fields: { err: { message: 'listener rejected' } } },
    ])
  })

  it('end with their listener, each registration by itself; events of other processes are not reported', async () => {
    const [intake, other] = [await b.intake(), await b.intake()]
    const definition = { body: Order, run: ({ item }: { item: string }) => item }
    const place = intake.define('orders.place', definition)
    other.define('orders.place', definition)
    const seen: string[] = []
    const listener = () => seen.push('here')
    const [first, second] = [intake.on('completed', listener), intake.on('completed', listener)]
    other.on('completed', () => seen.push('there'))
    await intake.submit(place, { item: 'tea' })
    expect(seen).toEqual(['here', 'here'])
    first()
    first()
    await intake.submit(place, { item: 'tea' })
    expect(seen).toHaveLength(3)
    second()
    await intake.submit(place, { item: 'tea' })
    expect(seen).toHaveLength(3)
  })

  it('are typed by their names', async () => {
    const intake = await b.intake()
    intake.on('retried', (event) => expectTypeOf(event.retryInMs).toBeNumber())
    intake.on('completed', (event) => expectTypeOf(event.result).toBeUnknown())
    intake.on('refused', (event) => {
      expectTypeOf(event.gate).toEqualTypeOf<string | null>()
      // @ts-expect-error a refusal has no id
      void event.id
    })
    // @ts-expect-error there is no such event
    expect(() => intake.on('done', () => undefined)).toThrow('on: the event must be "completed" or "retried" or')
    expect(() => intake.on('dead', undefined as never)).toThrow('on: the listener must be a function')
  })

  it('wait for the settlement: while the store cannot be reached, nothing is reported', async () => {
    const gate = { isOpen: false }
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          step: (...given) => (gate.isOpen ? store.step(...given) : Promise.reject(new Error('cut off'))),
        }),
    })
    const events = heard(intake)
    const ran = signal()
    const place = intake.define('orders.place', { body: Order, run: () => ran.fire() })
    const submitted = intake.submit(place, { item: 'tea' }, { waitMs: 20_000 })
    await ran.promise
    for (let turn = 0; turn < 50; turn++) await new Promise((resolve) => setImmediate(resolve))
    expect(events).toEqual([])
    gate.isOpen = true
    await submitted
    expect(events).toMatchObject([['completed', { type: 'orders.place' }]])
  })
})
