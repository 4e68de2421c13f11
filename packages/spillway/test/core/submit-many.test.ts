/** Many operations in one call: each decided by itself, written in flushes, outside and inside a transaction of the caller. */
import pg from 'pg'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, expectTypeOf, it } from 'vitest'
import { type Answer, connections, halt, rate } from '../../src/index.js'
import { addressOf, startHalfOpenProxy, through } from '../half-open-proxy.js'
import { type Bench, bench, eventually, overriding } from '../pipeline-fixture.js'

const Order = Type.Object({ n: Type.Integer() })
const orders = (count: number): { n: number }[] => Array.from({ length: count }, (_, n) => ({ n }))
const kinds = (answers: readonly Answer[]): string[] => answers.map(({ kind }) => kind)
const idsOf = (answers: readonly Answer[]): string[] =>
  answers.map((answer) => (answer.kind === 'refused' ? '' : answer.operationId))

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const waiting = () =>
  b.sql<{ seq: number; payload: { n: number } }>('SELECT seq, payload FROM spillway.ops ORDER BY seq')

describe('submitMany', () => {
  it('answers each with a ticket, in order, without waiting for a run; all run in the order of their lane', async () => {
    const intake = await b.intake()
    const ran: number[] = []
    const place = intake.define('place', { body: Order, lane: () => 'orders', run: ({ n }) => ran.push(n) })
    const answers = await intake.submitMany(place, orders(1_200))
    expectTypeOf(answers).toEqualTypeOf<Answer<number>[]>()
    expect(new Set(kinds(answers))).toEqual(new Set(['queued']))
    expect(answers[0]).toMatchObject({ reason: 'requested', replayed: false })
    expect(new Set(idsOf(answers)).size).toBe(1_200)
    await b.finished(idsOf(answers)[1_199] ?? '')
    expect(ran).toEqual(orders(1_200).map(({ n }) => n))
    expect(await b.audit()).toEqual([])
  })

  it('writes 500 at a time', async () => {
    const flushes: number[] = []
    const intake = await b.intake({
      role: 'direct',
      wrap: (store) =>
        overriding(store, {
          accept: (items, context) => {
            flushes.push(items.length)
            return store.accept(items, context)
          },
        }),
    })
    const place = intake.define('place', { body: Order, run: () => 1 })
    await intake.submitMany(place, orders(1_100))
    expect(flushes.filter((items) => items > 1)).toEqual([500, 500, 100])
  })

  it('takes none', async () => {
    const intake = await b.intake()
    expect(await intake.submitMany(intake.define('place', { run: () => 1 }), [])).toEqual([])
  })

  it('refuses what is not valid by itself, and accepts the rest', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = intake.define('place', {
      body: Order,
      check: ({ n }) => (n === 3 ? { code: 'forbidden', detail: 'not 3' } : null),
      run: () => 1,
    })
    const answers = await intake.submitMany(place, [{ n: 1 }, { n: 'two' } as never, { n: 3 }, { n: 4 }])
    expect(kinds(answers)).toEqual(['queued', 'refused', 'refused', 'queued'])
    expect(answers[1]).toMatchObject({ refusal: { code: 'invalid_request', errors: [{ path: '/n' }] } })
    expect(answers[2]).toMatchObject({ refusal: { code: 'forbidden', detail: 'not 3' } })
    expect((await waiting()).map(({ payload }) => payload.n)).toEqual([1, 4])
  })

  it('applies at once what is rows in the store, with the results', async () => {
    const intake = await b.intake()
    const record = intake.define('record', {
      body: Order,
      lane: ({ n }) => ['record', String(n)],
      apply: async (_, items) => items.map(({ body }) => body.n * 2),
    })
    const answers = await intake.submitMany(record, orders(3))
    expect(answers).toMatchObject([
      { kind: 'done', result: 0 },
      { kind: 'done', result: 2 },
      { kind: 'done', result: 4 },
    ])
  })

  it('has options for all, and for each', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = intake.define('place', { body: Order, run: () => 1 })
    const answers = await intake.submitMany(place, orders(3), {
      identity: ({ n }) => `customer-${n}`,
      lane: (_, index) => ['own', String(index)],
      priority: ({ n }) => (n === 0 ? undefined : n),
      timeout: '7s',
      maxRetries: 0,
      delay: ({ n }) => n * 60_000,
    })
    expect(kinds(answers)).toEqual(['queued', 'queued', 'queued'])
    const tickets = await Promise.all(idsOf(answers).map((id) => b.ticket(id)))
    expect(tickets).toMatchObject([
      { identity: 'customer-0', queue: 'own', partition: '0', priority: 5, maxAttempts: 1 },
      { identity: 'customer-1', queue: 'own', partition: '1', priority: 1, maxAttempts: 1 },
      { identity: 'customer-2', queue: 'own', partition: '2', priority: 2, maxAttempts: 1 },
    ])
    expect(await b.sql('SELECT timeout_ms AS ms FROM spillway.ops')).toEqual([
      { ms: 7_000 },
      { ms: 7_000 },
      { ms: 7_000 },
    ])
    const delays = await b.sql(
      'SELECT extract(epoch FROM not_before - accepted_at)::int AS s FROM spillway.ops ORDER BY id',
    )
    expect(delays).toEqual([{ s: null }, { s: 60 }, { s: 120 }])
  })

  it('with a key for each, or one for the call, gives the same answers again', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = intake.define('place', { body: Order, run: () => 1 })
    for (const idempotencyKey of ['import-7', ({ n }: { n: number }) => `order-${n}`]) {
      const first = await intake.submitMany(place, orders(3), { idempotencyKey })
      const again = await intake.submitMany(place, [...orders(3), { n: 9 }], { idempotencyKey })
      expect(idsOf(again).slice(0, 3)).toEqual(idsOf(first))
      expect(again.map((answer) => answer.kind === 'queued' && answer.replayed)).toEqual([true, true, true, false])
    }
  })

  it('one key twice in a call: the second is the first one again', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = intake.define('place', { body: Order, run: () => 1 })
    const [first, second] = await intake.submitMany(place, [{ n: 1 }, { n: 1 }], { idempotencyKey: () => 'same' })
    expect(second).toMatchObject({ replayed: true, operationId: first?.kind === 'queued' && first.operationId })
  })

  it('passes its gates: exact rates for each identity, a halt for all', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = intake.define('place', { body: Order, gates: [halt(), rate({ limit: 2, per: '1h' })], run: () => 1 })
    const identity = ({ n }: { n: number }): string => (n % 2 === 0 ? 'ann' : 'bob')
    expect(kinds(await intake.submitMany(place, orders(6), { identity }))).toEqual([
      ...['queued', 'queued', 'queued', 'queued', 'refused', 'refused'],
    ])
    await intake.halt('drill')
    const halted = await intake.submitMany(place, orders(2), { identity: 'cy' })
    expect(halted).toMatchObject([{ refusal: { code: 'halted' } }, { refusal: { code: 'halted' } }])
  })

  it('holds one permit for each identity, and gives it back', async () => {
    const intake = await b.intake({ role: 'direct' })
    const gates = [connections({ perIdentity: 1, total: 10, pool: 'calls' })]
    const place = intake.define('place', { body: Order, gates, run: () => 1 })
    for (let n = 0; n < 2; n++)
      expect(new Set(kinds(await intake.submitMany(place, orders(20))))).toEqual(new Set(['queued']))
    await eventually(() => intake.permitsOf('calls').held === 0 || undefined, 'no permit to be held')
  })

  it('writes nothing when one of the options or bodies is a mistake', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = intake.define('place', { run: () => 1 })
    await expect(
      intake.submitMany(place, orders(1_000), { priority: (_, index) => (index === 999 ? 11 : 5) }),
    ).rejects.toThrow('submitMany: item 999: priority must be a whole number from 1 to 10; given: 11')
    await expect(intake.submitMany(place, [...orders(700), 10n])).rejects.toThrow('cannot be stored as JSON')
    const lost = intake.define('lost', { lane: (body) => (body === 699 ? (undefined as never) : 'q'), run: () => 1 })
    await expect(
      intake.submitMany(
        lost,
        Array.from({ length: 700 }, (_, n) => n),
      ),
    ).rejects.toThrow('what lane returns')
    expect(await waiting()).toEqual([])
  })

  it('is refused item by item from where the queue is full', async () => {
    const intake = await b.intake({ pendingMax: 500 })
    const place = intake.define('place', { body: Order, run: () => 1 })
    const answers = await intake.submitMany(place, orders(700), { delay: '1h' })
    expect(kinds(answers)).toEqual([...orders(500).map(() => 'queued'), ...orders(200).map(() => 'refused')])
    expect(answers[600]).toMatchObject({ refusal: { code: 'queue_full', retryAfterMs: expect.any(Number) } })
  })

  it('is refused item by item while the store is away, and while it drains', async () => {
    const proxy = await startHalfOpenProxy(addressOf(b.url))
    const intake = await b.intake({ storeTimeoutMs: 1_000, postgres: { url: through(proxy, b.url) } })
    const place = intake.define('place', { body: Order, run: () => 1 })
    proxy.stall()
    const away = { refusal: { code: 'store_unavailable', retryAfterMs: expect.any(Number) } }
    expect(await intake.submitMany(place, orders(2))).toMatchObject([away, away])
    intake.drain()
    const draining = { refusal: { code: 'draining' } }
    expect(await intake.submitMany(place, orders(2))).toMatchObject([draining, draining])
    await proxy.close()
  })
})

describe('enqueueMany', () => {
  const connected = async (run: (client: pg.Client) => Promise<void>): Promise<void> => {
    const client = new pg.Client({ connectionString: b.url })
    await client.connect()
    try {
      await run(client)
    } finally {
      await client.end()
    }
  }

  it('queues them if and when the transaction commits, in order', async () => {
    const intake = await b.intake()
    const ran: number[] = []
    const place = intake.define('place', { body: Order, lane: () => 'orders', run: ({ n }) => ran.push(n) })
    await connected(async (client) => {
      await client.query('BEGIN')
      await intake.enqueueMany(place, orders(600), { tx: client })
      await client.query('ROLLBACK')
      await client.query('BEGIN')
      const answers = await intake.enqueueMany(place, orders(600), { tx: client, priority: ({ n }) => (n % 9) + 1 })
      expect(new Set(kinds(answers))).toEqual(new Set(['queued']))
      await client.query('COMMIT')
      await b.finished(idsOf(answers)[599] ?? '')
    })
    expect(ran).toEqual(orders(600).map(({ n }) => n))
    expect(await b.audit()).toEqual([])
  })

  it('refuses by itself what is not valid', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = intake.define('place', { body: Order, run: () => 1 })
    const answers = await intake.transaction((tx) => intake.enqueueMany(place, [{ n: 1 }, {} as never], { tx }))
    expect(kinds(answers)).toEqual(['queued', 'refused'])
  })

  it('locks lanes in one order: two transactions with the same lanes do not end each other', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = intake.define('place', { body: Order, lane: ({ n }) => ['q', String(n)], run: () => 1 })
    const bodies = orders(900)
    const call = (list: { n: number }[]) => intake.transaction((tx) => intake.enqueueMany(place, list, { tx }))
    await Promise.all([call(bodies), call([...bodies].reverse()), call(bodies)])
    expect(await b.sql('SELECT count(*)::int AS n FROM spillway.ops')).toEqual([{ n: 2_700 }])
  })

  it('locks keys in one order as well: of lanes, rates and idempotency', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = intake.define('place', {
      body: Order,
      lane: { key: ({ n }) => `${n}`, concurrency: 2 },
      gates: [rate({ limit: 10, per: '1h', by: (_, { n }: { n: number }) => `${n}` })],
      run: () => 1,
    })
    const call = (list: { n: number }[], name: string) =>
      intake.transaction((tx) => intake.enqueueMany(place, list, { tx, idempotencyKey: ({ n }) => `${name} ${n}` }))
    const list = orders(1_200)
    const both = await Promise.all([call(list, 'same'), call([...list].reverse(), 'same')])
    for (const answers of both) expect(new Set(kinds(answers))).toEqual(new Set(['queued']))
    expect(idsOf(both[0])).toEqual(idsOf(both[1]).reverse())
    expect(await b.audit()).toEqual([])
  })
})

describe('one submission', () => {
  it('overrides its definition', async () => {
    const intake = await b.intake({ role: 'direct' })
    const place = intake.define('place', {
      lane: () => 'usual',
      priority: 9,
      timeoutMs: 1_000,
      maxRetries: 9,
      delayMs: () => 1_000,
      run: () => 1,
    })
    const options = { lane: ['other', 'x'] as const, priority: 1, timeout: 2_000, maxRetries: 0, delay: '2h' }
    const submitted = await intake.submit(place, 1, options)
    const enqueued = await intake.transaction((tx) => intake.enqueue(place, 1, { ...options, tx }))
    for (const id of idsOf([submitted, enqueued])) {
      const own = { queue: 'other', partition: 'x', priority: 1, maxAttempts: 1 }
      expect(await b.ticket(id)).toMatchObject(own)
      const columns = 'timeout_ms AS ms, extract(epoch FROM not_before - accepted_at)::int AS delay'
      expect(await b.sql(`SELECT ${columns} FROM spillway.ops WHERE id = $1`, [id])).toEqual([
        { ms: 2_000, delay: 7_200 },
      ])
    }
  })

  it('starts at its time; at once if that is past', async () => {
    const intake = await b.intake()
    const place = intake.define('place', { run: () => 'ran' })
    expect(await intake.submit(place, 1, { runAt: new Date(0) })).toMatchObject({ kind: 'done', result: 'ran' })
    const later = await intake.submit(place, 1, { runAt: new Date(Date.now() + 60_000) })
    expect(later).toMatchObject({ kind: 'queued', reason: 'requested' })
    const [row] = await b.sql<{ delay: number }>(
      'SELECT extract(epoch FROM not_before - accepted_at) AS delay FROM spillway.ops',
    )
    expect(Number(row?.delay)).toBeGreaterThan(30)
    const soon = await intake.submit(place, 1, { lane: 'soon', delay: 50 })
    expect(await b.finished(idsOf([soon])[0] ?? '')).toMatchObject({ status: 'completed' })
  })
})
