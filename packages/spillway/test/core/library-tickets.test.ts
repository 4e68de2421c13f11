/** `intake.tickets`, `deadLetters` and `lanes`: what the ticket routes do, as calls. */
import { randomUUID } from 'node:crypto'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, expectTypeOf, it } from 'vitest'
import { type Answer, capacity, type Definition, FailOperation, type OperationReport } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

const Order = Type.Object({ item: Type.String(), customer: Type.Optional(Type.String()) })
type Order = { item: string; customer?: string }
type Shipped = { shipped: string }

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const idOf = (answer: Answer): string => {
  if (!('operationId' in answer)) throw new Error(`expected an operation, not ${JSON.stringify(answer)}`)
  return answer.operationId
}

/** Orders of 'bad' items fail; 'held' ones run until `open` fires or they are asked to stop. */
function orders(intake: Intake, name = 'orders.place', options: object = {}): Definition<Order, Shipped> {
  const run = ({ item }: Order): Shipped => {
    if (item === 'bad') throw new FailOperation('out of stock')
    return { shipped: item }
  }
  const lane = ({ customer = 'ann' }: Order) => ['orders', customer] as const
  return intake.define(name, { body: Order, lane, maxRetries: 0, run, ...options })
}

const later = { respondAsync: true }

describe('tickets', () => {
  it('gives the report of an operation, with the result of its definition as type', async () => {
    const intake = await b.intake()
    const [place, other] = [orders(intake), orders(intake, 'orders.other')]
    const id = idOf(await intake.submit(place, { item: 'tea' }, { identity: 'ann', traceparent: '00-t' }))
    const report = await intake.tickets.get(id, place)
    expectTypeOf(report).toEqualTypeOf<OperationReport<Shipped> | null>()
    expectTypeOf(await intake.tickets.get(id)).toEqualTypeOf<OperationReport | null>()
    expect(report).toEqual({
      ...{ id, type: 'orders.place', queue: 'orders', partition: 'ann', priority: 5, identity: 'ann' },
      ...{ status: 'completed', attempt: 1, maxAttempts: 1, place: null, error: null, result: { shipped: 'tea' } },
      ...{ createdAt: expect.any(Date), startedAt: expect.any(Date), finishedAt: expect.any(Date) },
      traceparent: '00-t',
    })
    expect(await intake.tickets.get(id, other)).toBeNull()
    for (const unknown of [randomUUID(), 'no id']) expect(await intake.tickets.get(unknown)).toBeNull()
  })

  it('waits for the end, for a time, and until the signal', async () => {
    const intake = await b.intake()
    const open = signal()
    const started = signal()
    const run = async (): Promise<Shipped> => {
      started.fire()
      await open.promise
      return { shipped: 'late' }
    }
    const place = orders(intake, 'orders.place', { run })
    const id = idOf(await intake.submit(place, { item: 'tea' }, later))
    await started.promise
    const seen = await intake.tickets.wait(id, { timeoutMs: 20 })
    expect(seen).toMatchObject({ id, result: null })
    expect(['pending', 'processing']).toContain(seen?.status)
    const leaving = new AbortController()
    const left = intake.tickets.wait(id, { signal: leaving.signal })
    leaving.abort(new Error('enough'))
    await expect(left).rejects.toThrow('enough')
    await expect(intake.tickets.wait(id, { signal: leaving.signal })).rejects.toThrow('enough')
    const waited = intake.tickets.wait(id, {}, place)
    open.fire()
    expect((await waited)?.result?.shipped).toBe('late')
    expect(await intake.tickets.wait(randomUUID())).toBeNull()
    expect(intake.waiters.size).toBe(0)
  })

  it('cancels one that waits; one that ran, and an unknown one, are reported as that', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = orders(intake)
    const id = idOf(await intake.submit(place, { item: 'tea' }, later))
    const waited = intake.tickets.wait(id)
    const cancelled = await intake.tickets.cancel(id, { why: 'the customer changed his mind' })
    expect(cancelled).toMatchObject({
      outcome: 'cancelled',
      report: { status: 'cancelled', error: 'the customer changed his mind' },
    })
    expect(await waited).toMatchObject({ status: 'cancelled' })
    expect(await intake.tickets.cancel(id)).toMatchObject({ outcome: 'finished', report: { status: 'cancelled' } })
    expect(await intake.tickets.cancel(randomUUID())).toEqual({ outcome: 'unknown', report: null })
  })

  it.each([
    [true, 'cancelled'],
    [false, 'running'],
  ])('cancels one that runs if it is abortable: %s', async (abortable, outcome) => {
    const intake = await b.intake()
    const open = signal()
    const started = signal()
    const run = async (_: unknown, { signal: stop }: { signal: AbortSignal }) => {
      started.fire()
      await Promise.race([open.promise, new Promise((resolve) => stop.addEventListener('abort', resolve))])
      stop.throwIfAborted()
    }
    const place = orders(intake, 'orders.place', { run, abortable })
    const id = idOf(await intake.submit(place, { item: 'tea' }, { waitMs: 0 }))
    await started.promise
    expect(await intake.tickets.cancel(id)).toMatchObject({ outcome, report: { id } })
    open.fire()
    await b.finished(id)
  })

  it('retries a failed one, unless its capacity gate is full', async () => {
    const intake = await b.intake()
    const isBad = { value: true }
    const run = ({ item }: Order): Shipped => {
      if (isBad.value) throw new FailOperation('out of stock')
      return { shipped: item }
    }
    const place = orders(intake, 'orders.place', { run, gates: [capacity({ limit: 1 })] })
    const answered = idOf(await intake.submit(place, { item: 'tea' }))
    expect(await intake.tickets.retry(answered)).toMatchObject({ outcome: 'answered', report: { status: 'failed' } })
    const failed = async (item: string): Promise<string> => {
      const { id } = await b.finished(idOf(await intake.submit(place, { item }, later)))
      return id
    }
    const id = await failed('tea')
    const more = await failed('milk')
    isBad.value = false
    // Takes the only place.
    await intake.lanes.pause({ queue: 'orders' })
    expect(await intake.tickets.retry(more)).toMatchObject({
      outcome: 'retried',
      report: { status: 'pending', attempt: 0 },
    })
    expect(await intake.tickets.retry(more)).toMatchObject({ outcome: 'not_failed' })
    expect(await intake.tickets.retry(id)).toMatchObject({ outcome: 'capacity_full', report: { status: 'failed' } })
    expect(await intake.tickets.retry(randomUUID())).toEqual({ outcome: 'unknown', report: null })
    await intake.lanes.resume({ queue: 'orders' })
    expect(await intake.tickets.wait(more)).toMatchObject({ status: 'completed', result: { shipped: 'milk' } })
  })

  it('lists by filter, in pages', async () => {
    const intake = await b.intake({ role: 'direct' })
    const [place, other] = [orders(intake), orders(intake, 'orders.other')]
    const before = new Date(Date.now() - 60_000)
    const ids: string[] = []
    for (const customer of ['ann', 'bob', 'ann']) {
      ids.unshift(idOf(await intake.submit(place, { item: 'tea', customer }, { ...later, identity: customer })))
    }
    const more = idOf(await intake.submit(other, { item: 'tea', customer: 'carl' }, later))
    const { tickets } = intake
    const idsOf = async (...args: Parameters<typeof tickets.list>) =>
      (await tickets.list(...args)).items.map(({ id }) => id)
    expect(await idsOf()).toEqual([more, ...ids])
    expect(await idsOf({}, place)).toEqual(ids)
    expect(await idsOf({ type: 'orders.other' })).toEqual([more])
    expect(await idsOf({ queue: 'orders', partition: 'bob' })).toEqual(ids.slice(1, 2))
    expect(await idsOf({ identity: 'ann', status: 'pending' })).toEqual([ids[0], ids[2]])
    expect(await idsOf({ status: 'completed' })).toEqual([])
    expect(await idsOf({ from: before })).toHaveLength(4)
    expect(await idsOf({ to: before.toISOString() })).toEqual([])
    const first = await tickets.list({ limit: 3 }, undefined)
    expect(first.items.map(({ id }) => id)).toEqual([more, ...ids.slice(0, 2)])
    const second = await tickets.list({ limit: 3, cursor: first.nextCursor })
    expect(second).toMatchObject({ items: [{ id: ids[2] }], nextCursor: null })
    expect((await tickets.list({ limit: 4 })).nextCursor).toBeNull()
    expectTypeOf(await tickets.list({}, place)).toEqualTypeOf<{
      items: OperationReport<Shipped>[]
      nextCursor: string | null
    }>()
  })
})

describe('dead letters', () => {
  async function withDead(items: readonly string[]) {
    const intake = await b.intake()
    const broken = { is: true }
    const run = ({ item }: Order): Shipped => {
      if (broken.is) throw new FailOperation('out of stock')
      return { shipped: item }
    }
    const place = orders(intake, 'orders.place', { run })
    const ids: string[] = []
    for (const item of items) ids.push(idOf(await intake.submit(place, { item }, later)))
    for (const id of ids) await b.finished(id)
    return { intake, place, ids, broken }
  }

  it('are listed and read with their bodies, typed by the definition', async () => {
    const { intake, place, ids } = await withDead(['tea', 'x'.repeat(5_000)])
    const { items, nextCursor } = await intake.deadLetters.list({ queue: 'orders' }, place)
    expect(nextCursor).toBeNull()
    expectTypeOf(items[0]?.body).toEqualTypeOf<Order | null | undefined>()
    expect(items).toMatchObject([
      { id: ids[1], body: null, bodyBytes: expect.any(Number), error: 'out of stock', status: 'failed' },
      { id: ids[0], body: { item: 'tea' }, attempt: 1 },
    ])
    expect(await intake.deadLetters.get(ids[1] ?? '')).toMatchObject({ body: { item: 'x'.repeat(5_000) } })
    expect(await intake.deadLetters.get(randomUUID())).toBeNull()
    expect(await intake.deadLetters.get('no id')).toBeNull()
  })

  it('are redriven by ids, in the order of acceptance, whatever the order of the ids', async () => {
    const { intake, ids, broken } = await withDead(['a', 'b', 'c'])
    await intake.lanes.pause({ queue: 'orders' })
    broken.is = false
    const asked = [...ids].reverse()
    expect(await intake.deadLetters.redrive({ ids: [...asked, randomUUID(), 'no id'] })).toEqual({
      moved: 3,
      skipped: 2,
      nextCursor: null,
    })
    expect((await intake.tickets.statusOf(ids)).map(({ place }) => place)).toEqual([0, 1, 2])
    await intake.lanes.resume({ queue: 'orders' })
    for (const id of ids) expect(await intake.tickets.wait(id)).toMatchObject({ status: 'completed' })
  })

  it('are redriven by a filter, each once, in steps', async () => {
    const { intake, ids } = await withDead(['a', 'b', 'c'])
    const first = await intake.deadLetters.redrive({ filter: { queue: 'orders' }, limit: 2 })
    expect(first).toEqual({ moved: 2, skipped: 0, nextCursor: expect.any(String) })
    for (const id of ids) await b.finished(id)
    // They fail again; the next step continues behind them.
    const second = await intake.deadLetters.redrive({ filter: { queue: 'orders' }, limit: 2, cursor: first.nextCursor })
    expect(second).toEqual({ moved: 1, skipped: 0, nextCursor: null })
    expect(await intake.deadLetters.redrive({ filter: { queue: 'none' } })).toEqual({
      moved: 0,
      skipped: 0,
      nextCursor: null,
    })
  })

  it('are purged by ids and by a filter', async () => {
    const { intake, ids } = await withDead(['a', 'b', 'c', 'd'])
    expect(await intake.deadLetters.purge({ ids: [ids[3] ?? '', randomUUID()] })).toEqual({ purged: 1 })
    expect(await intake.deadLetters.purge({ filter: { type: 'orders.other' } })).toEqual({ purged: 0 })
    expect(await intake.deadLetters.purge({ filter: {}, limit: 2 })).toEqual({ purged: 2 })
    expect((await intake.deadLetters.list()).items.map(({ id }) => id)).toEqual([ids[2]])
    expect(await intake.tickets.get(ids[0] ?? '')).toBeNull()
  })
})

describe('lanes', () => {
  const laneNames = (items: readonly { partition: string }[]): string[] =>
    items.map(({ partition }) => partition).sort()

  it('report how much waits in each, since when, and that no process runs it', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = orders(intake)
    const ids: string[] = []
    for (const customer of ['ann', 'bob', 'ann'])
      ids.push(idOf(await intake.submit(place, { item: 'tea', customer }, later)))
    await b.sql("UPDATE spillway.ops SET accepted_at = accepted_at - interval '1 hour'")
    await intake.refresh()
    const { items, nextCursor } = await intake.lanes.list({ queue: 'orders' })
    expect(nextCursor).toBeNull()
    const ann = items.find(({ partition }) => partition === 'ann')
    expect(laneNames(items)).toEqual(['ann', 'bob'])
    expect(ann).toEqual({
      ...{ queue: 'orders', partition: 'ann', depth: 2, oldestAgeSeconds: expect.any(Number) },
      ...{ paused: false, pausedBy: null },
      head: {
        ...{ id: ids[0], type: 'orders.place', status: 'pending' },
        ...{ attempt: 0, maxAttempts: 1, nextAttemptAt: null },
      },
      waitingBecause: 'no running process has reported that it runs operations of type orders.place',
    })
    expect(Math.round((ann?.oldestAgeSeconds ?? 0) / 3_600)).toBe(1)
    expect((await intake.lanes.list({ queue: 'none' })).items).toEqual([])
    expect(await intake.lanes.depths([['orders', 'bob'], 'none', ['orders', 'ann']])).toEqual([1, 0, 2])
  })

  it('say that they are paused, by what', async () => {
    const intake = await b.intake()
    const place = orders(intake)
    const because = async () => {
      const [lane] = (await intake.lanes.list()).items
      return [lane?.paused, lane?.pausedBy, lane?.waitingBecause]
    }
    expect(await intake.lanes.pause({ type: place.type })).toEqual({ paused: true, pausedBy: 'type' })
    const id = idOf(await intake.submit(place, { item: 'tea' }))
    expect(await because()).toEqual([true, 'type', 'operations of type orders.place are paused'])
    expect(await intake.lanes.pause({ queue: 'orders', partition: 'ann' })).toEqual({
      paused: true,
      pausedBy: 'partition',
    })
    expect(await intake.lanes.resume({ type: place.type })).toEqual({ paused: false, pausedBy: null })
    expect(await because()).toEqual([true, 'partition', 'the lane is paused'])
    expect(await intake.lanes.pause({ queue: 'orders' })).toEqual({ paused: true, pausedBy: 'queue' })
    expect(await intake.lanes.resume({ queue: 'orders', partition: 'ann' })).toEqual({
      paused: true,
      pausedBy: 'queue',
    })
    expect(await because()).toEqual([true, 'queue', 'the queue is paused'])
    expect(await intake.lanes.resume({ queue: 'orders' })).toEqual({ paused: false, pausedBy: null })
    expect(await intake.tickets.wait(id)).toMatchObject({ status: 'completed' })
    expect(await intake.lanes.list()).toEqual({ items: [], nextCursor: null })
  })

  it('say that the first operation runs, is retried later, is delayed, or waits for a slot', async () => {
    const intake = await b.intake({ concurrency: 1 })
    const open = signal()
    const started = signal()
    const run = async ({ item }: Order): Promise<Shipped> => {
      if (item === 'bad') throw new Error('out of stock')
      if (item === 'held') {
        started.fire()
        await open.promise
      }
      return { shipped: item }
    }
    const retry = { baseMs: 600_000, maxMs: 600_000 }
    const place = orders(intake, 'orders.place', {
      ...{ run, maxRetries: 3, retry, delayMs: ({ item }: Order) => (item === 'slow' ? 600_000 : 0) },
    })
    const laneOf = async (customer: string) =>
      (await intake.lanes.list()).items.find(({ partition }) => partition === customer)
    await intake.submit(place, { item: 'bad', customer: 'bad' }, later)
    const retried = await eventually(async () => {
      const lane = await laneOf('bad')
      return lane?.head.attempt === 1 && lane.head.status === 'pending' ? lane : undefined
    }, 'the first attempt to fail')
    expect(retried.waitingBecause).toMatch(
      /^its first operation failed \(attempt 1 of 4\); the next attempt is in \d+ s$/,
    )
    expect(retried.head.nextAttemptAt?.getTime()).toBeGreaterThan(Date.now())
    await intake.submit(place, { item: 'slow', customer: 'slow' }, later)
    expect(await laneOf('slow')).toMatchObject({
      head: { nextAttemptAt: expect.any(Date), attempt: 0 },
      waitingBecause: expect.stringMatching(/^its first operation is delayed; it is due in \d+ s$/),
    })
    await intake.submit(place, { item: 'held', customer: 'held' }, later)
    await started.promise
    await intake.submit(place, { item: 'tea', customer: 'next' }, later)
    await intake.refresh()
    expect(await laneOf('next')).toMatchObject({
      head: { status: 'pending', nextAttemptAt: null },
      waitingBecause: 'all slots for operations of type orders.place are in use',
    })
    expect(
      await eventually(async () => {
        const lane = await laneOf('held')
        return lane?.head.status === 'processing' ? lane : undefined
      }, 'the run to be recorded'),
    ).toMatchObject({ head: { attempt: 1 }, waitingBecause: null })
    open.fire()
  })

  it('are not the parallel operations, which are listed if their queue is asked for', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = orders(intake)
    const mail = intake.define('mail.send', { body: Order, run: () => 1 })
    for (let n = 0; n < 3; n++) await intake.submit(mail, { item: 'letter' }, later)
    await intake.submit(place, { item: 'tea' }, later)
    expect((await intake.lanes.list()).items).toMatchObject([{ queue: 'orders', partition: 'ann' }])
    const first = await intake.lanes.list({ queue: 'mail.send', limit: 2 })
    const second = await intake.lanes.list({ queue: 'mail.send', limit: 2, cursor: first.nextCursor })
    const heads = [...first.items, ...second.items].map(({ depth, head }) => [depth, head.id])
    const waiting = (await intake.tickets.list({ type: 'mail.send' })).items.map(({ id }) => id)
    expect(heads).toEqual(waiting.toReversed().map((id) => [1, id]))
    expect(second.nextCursor).toBeNull()
  })

  it('are listed in pages, each once, whatever the order', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = orders(intake)
    const customers = Array.from({ length: 7 }, (_, n) => `c${n}`)
    for (const customer of customers) await intake.submit(place, { item: 'tea', customer }, later)
    const seen: string[] = []
    for (let cursor: string | null | undefined, pages = 0; cursor !== null; pages++) {
      const page = await intake.lanes.list({ limit: 3, ...(cursor !== undefined && { cursor }) })
      expect(page.items.length).toBe(pages < 2 ? 3 : 1)
      seen.push(...laneNames(page.items))
      cursor = page.nextCursor
    }
    expect(seen.sort()).toEqual(customers)
    expect((await intake.lanes.list({ limit: 7 })).nextCursor).toBeNull()
  })

  it('100,000 of them: a page reads no more than it shows, and a rare queue is found', async () => {
    const intake = await b.intake({ role: 'direct', postgres: { timeoutMs: 30_000 } })
    await b.sql(`INSERT INTO spillway.lanes (id, queue, partition, tail, depth, moved_at, sweep_at)
      SELECT md5(n::text)::uuid, CASE WHEN n % 50000 = 0 THEN 'rare' ELSE 'many' END, n::text, 1, 1, now(), now()
      FROM generate_series(1, 100000) n`)
    await b.sql(`INSERT INTO spillway.ops (lane, seq, id, type, priority, stamp, identity, payload, accepted_at,
        max_attempts, timeout_ms)
      SELECT md5(n::text)::uuid, 1, gen_random_uuid(), 'x', 5, n, 'i', '{}', now(), 1, 1000
      FROM generate_series(1, 100000) n`)
    await b.sql(`INSERT INTO spillway.ready (lane, priority, stamp, type, head, depth, careful, queue, partition)
      SELECT md5(n::text)::uuid, 5, n, 'x', 0, 1, false, 'many', n::text FROM generate_series(1, 100000) n`)
    await b.sql('ANALYZE spillway.lanes, spillway.ops, spillway.ready')
    const page = await intake.lanes.list({ limit: 200 })
    expect(page.items).toHaveLength(200)
    expect((await intake.lanes.list({ queue: 'rare' })).items.map(({ partition }) => partition).sort()).toEqual([
      '100000',
      '50000',
    ])
    // Blocks that the page reads: some for each lane that it shows, not for each that there is.
    const [explained] = await b.sql<{ 'QUERY PLAN': { Plan: Record<string, number> }[] }>(
      `EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM spillway.lanes_page(NULL, NULL, NULL, 200, 10000)`,
    )
    const plan = explained?.['QUERY PLAN'][0]?.Plan ?? {}
    const blocks = (plan['Shared Hit Blocks'] ?? 0) + (plan['Shared Read Blocks'] ?? 0)
    expect(blocks).toBeGreaterThan(200)
    expect(blocks).toBeLessThan(10_000)
    // Their queues are examined in bounded steps.
    const asked: number[] = []
    const counting = await b.intake({
      role: 'direct',
      postgres: { timeoutMs: 30_000 },
      wrap: (store) =>
        overriding(store, {
          lanes: (filter, given) => {
            asked.push(given.examined)
            return store.lanes(filter, given)
          },
        }),
    })
    await counting.lanes.list({ queue: 'rare' })
    expect(asked).toEqual(Array.from({ length: 11 }, () => 10_000))
  }, 180_000)
})
