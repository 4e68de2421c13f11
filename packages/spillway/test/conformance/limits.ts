import { randomUUID } from 'node:crypto'
import { describe, expect, it } from 'vitest'
import type { Accepted, AcceptItem, RateCheck } from '../../src/store/port.js'
import {
  contextOf,
  executing,
  item,
  items,
  must,
  nobody,
  type OpenedStore,
  queue,
  TestWorker,
  verdicts,
} from './harness.js'

const minute = 60_000
/** In clock minutes, as the petitions count. */
const rate = (limit: number, clockMinutes = 60, key: string = randomUUID()): RateCheck => ({
  key,
  limit,
  windowSeconds: clockMinutes * 60,
  clockMinutes,
})
/** In any window. */
const exactRate = (limit: number, windowSeconds: number, key: string = randomUUID()): RateCheck => ({
  key,
  limit,
  windowSeconds,
})
const rateOf = (a: Accepted | undefined) => (a !== undefined && 'rate' in a ? a.rate : undefined)

export function limits(opened: () => OpenedStore): void {
  const accept = (...list: AcceptItem[]): Promise<Accepted[]> => opened().store.accept(list, contextOf(nobody))

  describe('idempotency', () => {
    it('answers a known key with the first answer', async () => {
      const { store } = opened()
      const first = item('a', { key: 'k' })
      expect(verdicts(await accept(first, item('a')))).toEqual(['queue', 'queue'])
      expect(await accept(item('other lane', { key: 'k' }))).toEqual([
        {
          verdict: 'replay',
          operationId: first.id,
          answer: expect.objectContaining({ v: 'queue', place: 0 }),
          rate: null,
        },
      ])
      expect(await accept(item('a', { key: 'k', body: 'another' }))).toEqual([{ verdict: 'mismatch' }])
      const worker = await TestWorker.enlist(store)
      expect(await worker.drain()).toHaveLength(2)
    })

    it('says that the first is in progress until it is settled, then returns its result', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      const first = item('a', { key: 'k', execute: true })
      const accepted = await worker.accept([first])
      expect(verdicts(await accept(item('a', { key: 'k' })))).toEqual(['in_progress'])
      await worker.complete([executing(first, accepted[0])], { result: { n: 1 } })
      expect(await accept(item('a', { key: 'k' }))).toMatchObject([
        { verdict: 'replay', operationId: first.id, answer: { v: 'done', result: { n: 1 } } },
      ])
    })

    it('keeps the ticket that its caller got, though the operation continues', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      const first = item('a', { key: 'k', execute: true })
      const accepted = await worker.accept([first])
      const ticket = { v: 'queue', place: 0, wait_ms: 7, reason: 'still_running' } as const
      await store.answerKey(must(first.idempotency).key, first.id, ticket)
      await worker.complete([executing(first, accepted[0])])
      expect(await accept(item('a', { key: 'k' }))).toMatchObject([{ verdict: 'replay', answer: ticket }])
    })

    it('accepts a key again once it has expired, and the old operation does not answer for the new one', async () => {
      const { store, advance } = opened()
      const worker = await TestWorker.enlist(store, 10 * 3_600_000)
      const first = item('a', { key: 'k', execute: true })
      const running = executing(first, (await worker.accept([first]))[0])
      await advance(3_600_001)
      const second = item('b', { key: 'k', body: 'another', execute: true })
      const again = await worker.accept([second])
      expect(verdicts(again)).toEqual(['execute'])
      await worker.complete([running], { result: 'of the first' })
      expect(verdicts(await accept(item('b', { key: 'k', body: 'another' })))).toEqual(['in_progress'])
      await worker.complete([executing(second, again[0])], { result: 'of the second' })
      expect(await accept(item('b', { key: 'k', body: 'another' }))).toMatchObject([
        { verdict: 'replay', operationId: second.id, answer: { result: 'of the second' } },
      ])
    })

    it('accepts one of many concurrent requests with the same key', async () => {
      const { store, another } = opened()
      const stores = [store, another(), another(), another()]
      for (let round = 0; round < 10; round++) {
        const all = await Promise.all(
          stores.map((s, n) =>
            s.accept([item(`${n}`), item(`${round} ${n}`, { key: `k${round}` })], contextOf(nobody)),
          ),
        )
        expect(all.map((a) => a[1]?.verdict).sort()).toEqual(['queue', 'replay', 'replay', 'replay'])
      }
    })

    it('locks keys in one order, however the requests bring them', async () => {
      const { store, another } = opened()
      const other = another()
      for (let round = 0; round < 20; round++) {
        const list = ['a', 'b', 'c', 'd'].map((k) => `${round}${k}`)
        const brought = list.map((k) => item(k, { key: k }))
        await Promise.all([
          store.accept(brought, contextOf(nobody)),
          other.accept(
            list.reverse().map((k) => item(`x${k}`, { key: k })),
            contextOf(nobody),
          ),
        ])
      }
    })

    it('frees the key of a refused item', async () => {
      const { store } = opened()
      await store.registerGate('g', 1, 1)
      const once = rate(1)
      expect(verdicts(await accept(item('a', { gate: 'g', rates: [once] })))).toEqual(['queue'])
      await store.halt('s', 'why')
      const list = [
        item('a', { key: 'capacity', gate: 'g' }),
        item('a', { key: 'rate', rates: [once] }),
        item('a', { key: 'halt', halt: 's' }),
        item('a', { key: 'fine' }),
      ]
      expect(verdicts(await accept(...list))).toEqual(['refuse:capacity', 'refuse:rate', 'refuse:halt', 'queue'])
      const again = ['capacity', 'rate', 'halt', 'fine'].map((key) => item('a', { key }))
      expect(verdicts(await accept(...again))).toEqual(['queue', 'queue', 'queue', 'replay'])
    })
  })

  describe('capacity', () => {
    it('admits exactly up to the limit at any concurrency, and again below the lower mark', async () => {
      const { store, another } = opened()
      await store.registerGate('g', 100, 90)
      const stores = [store, ...Array.from({ length: 7 }, () => another())]
      const answers = await Promise.all(
        stores.flatMap((s, n) =>
          Array.from({ length: 6 }, (_, round) =>
            s.accept(items(`${n % 3}`, ((n + round) % 5) + 1, { gate: 'g' }), contextOf(randomUUID())),
          ),
        ),
      )
      const all = answers.flatMap(verdicts)
      expect(all.filter((v) => v === 'queue')).toHaveLength(100)
      expect(all.length).toBeGreaterThan(100)
      const worker = await TestWorker.enlist(store)
      const gate = async () => must((await store.pulse(worker.id, 15_000, {})).gates[0])
      expect(await gate()).toEqual({ name: 'g', held: 100, full_at: 100, overflowing: true })
      for (let left = 99; left >= 90; left--) {
        await worker.complete(must(await worker.claimOne().then((op) => op && [op])))
        expect(await gate()).toMatchObject({ held: left, overflowing: true })
        expect(verdicts(await accept(item('a', { gate: 'g' })))).toEqual(['refuse:capacity'])
      }
      await worker.complete(must(await worker.claimOne().then((op) => op && [op])))
      expect(await gate()).toMatchObject({ held: 89, overflowing: false })
      expect(verdicts(await accept(...items('a', 12, { gate: 'g' }))).filter((v) => v === 'queue')).toHaveLength(11)
    })

    it('admits the part of a batch that fits, and numbers it without gaps', async () => {
      const { store } = opened()
      await store.registerGate('g', 3, 3)
      const list = [
        item('a', { gate: 'g' }),
        item('b', { gate: 'g' }),
        item('b'),
        item('a', { gate: 'g' }),
        item('b', { gate: 'g' }),
        item('a'),
      ]
      const accepted = await accept(...list)
      expect(verdicts(accepted).filter((v) => v === 'refuse:capacity')).toHaveLength(1)
      const worker = await TestWorker.enlist(store)
      const claimed = await worker.claim()
      for (const lane of ['a', 'b']) {
        const seqs = claimed.filter((op) => op.partition === lane).map((op) => op.seq)
        expect(seqs).toEqual(seqs.map((_, n) => n + 1))
      }
      expect(claimed).toHaveLength(5)
    })

    it('releases capacity for failed and cancelled operations, and takes it for redriven ones', async () => {
      const { store } = opened()
      await store.registerGate('g', 2, 1)
      const [a, b] = await queue(store, [item('a', { gate: 'g' }), item('b', { gate: 'g' })])
      const worker = await TestWorker.enlist(store)
      const held = async () => (await store.pulse(worker.id, 15_000, {})).gates[0]?.held
      const failed = must((await worker.claim({ lanes: 1 }))[0])
      await worker.complete([failed], { status: 'failed', error: 'no' })
      expect(await held()).toBe(1)
      expect(await store.cancel(must(failed.id === a ? b : a), [], 'why')).toBe('cancelled')
      expect(await held()).toBe(0)
      expect(await store.redrive([failed.id])).toEqual({ moved: 1, skipped: 0 })
      expect(await held()).toBe(1)
    })

    it('keeps its permits when its limits change', async () => {
      const { store } = opened()
      await store.registerGate('g', 10, 5)
      await queue(store, items('a', 4, { gate: 'g' }))
      await store.registerGate('g', 3, 2)
      expect(verdicts(await accept(item('a', { gate: 'g' })))).toEqual(['refuse:capacity'])
      await store.registerGate('g', 10, 5)
      expect(verdicts(await accept(item('a', { gate: 'g' })))).toEqual(['queue'])
    })

    it('counts applied items until their owner releases them', async () => {
      const { store } = opened()
      await store.registerGate('own rows', 2, 1)
      const apply = () =>
        store.acceptAndApply([item('a', { gate: 'own rows', execute: true })], contextOf(nobody), async () => [
          { v: 'done', result: null },
        ])
      expect((await Promise.all([apply(), apply(), apply()])).flatMap(verdicts).sort()).toEqual([
        'apply',
        'apply',
        'refuse:capacity',
      ])
      const tx = await store.begin(30_000)
      await store.releaseGate(tx, 'own rows', 2)
      await tx.commit()
      expect(verdicts(await apply())).toEqual(['apply'])
    })
  })

  describe('rates', () => {
    it('admits exactly the limit at any concurrency', async () => {
      const { store, another } = opened()
      const stores = [store, ...Array.from({ length: 5 }, () => another())]
      const limited = rate(25)
      const all = await Promise.all(
        stores.flatMap((s, n) =>
          [1, 2, 3].map((k) => s.accept(items(`${n}`, k, { rates: [limited] }), contextOf(randomUUID()))),
        ),
      )
      expect(all.flatMap(verdicts).filter((v) => v === 'queue')).toHaveLength(25)
    })

    it('refuses by the tier that is used up, and takes nothing from the others', async () => {
      const [mine, all] = [rate(2), rate(3)]
      expect(verdicts(await accept(...items('a', 2, { rates: [mine, all] })))).toEqual(['queue', 'queue'])
      const [refused] = await accept(item('a', { rates: [mine, all] }))
      expect(refused).toMatchObject({ verdict: 'refuse', by: 'rate', rate: { tier: 0, left: 0 } })
      expect(rateOf((await accept(item('a', { rates: [rate(2), all] })))[0])).toMatchObject({ tier: 1, left: 0 })
      expect((await accept(item('a', { rates: [rate(2), all] })))[0]).toMatchObject({
        verdict: 'refuse',
        rate: { tier: 1 },
      })
    })

    it('takes nothing for what capacity refuses', async () => {
      const { store } = opened()
      await store.registerGate('g', 1, 1)
      const limited = rate(3)
      const list = items('a', 3, { gate: 'g', rates: [limited] })
      expect(verdicts(await accept(...list)).sort()).toEqual(['queue', 'refuse:capacity', 'refuse:capacity'])
      expect(rateOf((await accept(item('a', { rates: [limited] })))[0])).toMatchObject({ left: 1 })
    })

    it('counts a minute while it is younger than the window, and reports when a slot is free', async () => {
      const { freeze } = opened()
      const limited = rate(3, 10)
      await freeze('2026-03-01T12:00:20Z')
      expect(rateOf((await accept(item('a', { rates: [limited] })))[0])).toEqual({
        tier: 0,
        left: 2,
        resetMs: 10 * minute - 20_000,
        resetAtMs: Date.parse('2026-03-01T12:10:00Z'),
      })
      await freeze('2026-03-01T12:04:50Z')
      await accept(...items('a', 2, { rates: [limited] }))
      // The bucket of 12:00 leaves the window at 12:10.
      expect((await accept(item('a', { rates: [limited] })))[0]).toMatchObject({
        verdict: 'refuse',
        rate: { resetMs: 310_000 },
      })
      await freeze('2026-03-01T12:09:59.999Z')
      expect((await accept(item('a', { rates: [limited] })))[0]).toMatchObject({
        verdict: 'refuse',
        rate: { resetMs: 1 },
      })
      await freeze('2026-03-01T12:10:00Z')
      expect(verdicts(await accept(...items('a', 2, { rates: [limited] })))).toEqual(['queue', 'refuse:rate'])
      await freeze('2026-03-01T12:14:00Z')
      expect(verdicts(await accept(...items('a', 3, { rates: [limited] })))).toEqual(['queue', 'queue', 'refuse:rate'])
    })

    it('reports the true wait also when many are refused at once', async () => {
      const { freeze } = opened()
      const limited = rate(10)
      await freeze('2026-03-01T12:00:00Z')
      await accept(...items('a', 10, { rates: [limited] }))
      await freeze('2026-03-01T12:30:00Z')
      const refused = await accept(...items('a', 25, { rates: [limited] }))
      for (const a of refused) expect(a).toMatchObject({ verdict: 'refuse', rate: { resetMs: 30 * minute } })
    })

    it('accepts a client that returns after the reported wait', async () => {
      const { freeze } = opened()
      const limited = rate(4, 5)
      let now = Date.parse('2026-03-01T12:00:07Z')
      for (let round = 0; round < 30; round++) {
        await freeze(new Date(now).toISOString())
        const [a] = await accept(item('a', { rates: [limited] }))
        if (a?.verdict === 'refuse') {
          now += must(a.rate).resetMs
          await freeze(new Date(now).toISOString())
          expect(verdicts(await accept(item('a', { rates: [limited] })))).toEqual(['queue'])
        }
        now += 17_000
      }
    })

    it('reports the wait of the tier that frees last', async () => {
      const { freeze } = opened()
      const [short, long] = [rate(1, 1), rate(1, 60)]
      await freeze('2026-03-01T12:00:00Z')
      await accept(item('a', { rates: [short, long] }))
      expect((await accept(item('a', { rates: [short, long] })))[0]).toMatchObject({
        verdict: 'refuse',
        rate: { tier: 1, resetMs: 60 * minute },
      })
    })

    it('follows a limit that is lowered and raised', async () => {
      const key = randomUUID()
      expect(verdicts(await accept(...items('a', 6, { rates: [rate(10, 60, key)] })))).toHaveLength(6)
      expect(verdicts(await accept(item('a', { rates: [rate(5, 60, key)] })))).toEqual(['refuse:rate'])
      expect(
        verdicts(await accept(...items('a', 5, { rates: [rate(10, 60, key)] }))).filter((v) => v === 'queue'),
      ).toHaveLength(4)
    })
  })

  describe('rates in any window', () => {
    it('admit no more around a full minute than at any other time', async () => {
      const { freeze } = opened()
      const limited = exactRate(3, 60)
      await freeze('2026-03-01T11:59:59.200Z')
      expect(verdicts(await accept(...items('a', 3, { rates: [limited] })))).toEqual(['queue', 'queue', 'queue'])
      await freeze('2026-03-01T12:00:00.500Z')
      const refused = await accept(...items('a', 3, { rates: [limited] }))
      // The bucket of a second ended at 12:00:00.
      for (const a of refused) expect(a).toMatchObject({ verdict: 'refuse', rate: { left: 0, resetMs: 59_500 } })
      await freeze('2026-03-01T12:00:59.999Z')
      expect(verdicts(await accept(item('a', { rates: [limited] })))).toEqual(['refuse:rate'])
      await freeze('2026-03-01T12:01:00Z')
      expect(verdicts(await accept(...items('a', 4, { rates: [limited] })))).toEqual([
        ...['queue', 'queue', 'queue'],
        'refuse:rate',
      ])
    })

    it.each([1, 10, 59, 3_600, 31 * 86_400])(
      'of %i s free a slot after the window, at most a 60th later',
      async (seconds) => {
        const { freeze } = opened()
        const limited = exactRate(2, seconds)
        const start = Date.parse('2026-03-01T12:00:00.123Z')
        const at = (ms: number) => freeze(new Date(start + ms).toISOString())
        await at(0)
        expect(rateOf((await accept(item('a', { rates: [limited] })))[0])).toMatchObject({ left: 1 })
        await at(seconds * 500)
        expect(rateOf((await accept(item('a', { rates: [limited] })))[0])).toMatchObject({ left: 0 })
        await at(seconds * 1_000)
        const wait = must(rateOf((await accept(item('a', { rates: [limited] })))[0])).resetMs
        expect(wait).toBeGreaterThan(0)
        expect(wait).toBeLessThanOrEqual((seconds * 1_000) / 60)
        await at(seconds * 1_000 + wait - 1)
        expect(verdicts(await accept(item('a', { rates: [limited] })))).toEqual(['refuse:rate'])
        await at(seconds * 1_000 + wait)
        expect(verdicts(await accept(...items('a', 2, { rates: [limited] })))).toEqual(['queue', 'refuse:rate'])
      },
    )

    it('admit exactly the limit at any concurrency', async () => {
      const { store, another, freeze } = opened()
      const stores = [store, ...Array.from({ length: 5 }, () => another())]
      const limited = exactRate(25, 1)
      const hurry = async () =>
        (
          await Promise.all(
            stores.flatMap((s, n) =>
              [1, 2, 3].map((k) => s.accept(items(`${n}`, k, { rates: [limited] }), contextOf(randomUUID()))),
            ),
          )
        )
          .flatMap(verdicts)
          .filter((v) => v === 'queue').length
      await freeze('2026-03-01T12:00:00.990Z')
      expect(await hurry()).toBe(25)
      await freeze('2026-03-01T12:00:01.989Z')
      expect(await hurry()).toBe(0)
      await freeze('2026-03-01T12:00:02.020Z')
      expect(await hurry()).toBe(25)
    })

    it('keep as many buckets as the window has, whatever was refused', async () => {
      const { freeze, sql } = opened()
      const limited = exactRate(30, 60)
      const start = Date.parse('2026-03-01T12:00:00Z')
      for (let n = 0; n < 200; n++) {
        await freeze(new Date(start + n * 700).toISOString())
        await accept(item('a', { rates: [limited] }))
      }
      const [row] = await sql<{ n: number; used: number }>(
        'SELECT cardinality(ends) AS n, (sums[cardinality(sums)] - sums[1])::int AS used FROM rates',
      )
      // And the base of the sums.
      expect(row?.n).toBeLessThanOrEqual(61 + 1)
      expect(row?.used).toBeGreaterThan(0)
      expect(row?.used).toBeLessThanOrEqual(30)
    })

    it('count on when the clock goes back', async () => {
      const { freeze } = opened()
      const limited = exactRate(2, 10)
      await freeze('2026-03-01T12:00:05Z')
      await accept(item('a', { rates: [limited] }))
      await freeze('2026-03-01T12:00:00Z')
      expect(verdicts(await accept(...items('a', 2, { rates: [limited] })))).toEqual(['queue', 'refuse:rate'])
      await freeze('2026-03-01T12:00:14.999Z')
      expect(verdicts(await accept(item('a', { rates: [limited] })))).toEqual(['refuse:rate'])
    })

    it('share their rows with clock minutes, as release 0.2.0 counts', async () => {
      const { freeze } = opened()
      const key = randomUUID()
      const [ours, theirs] = [exactRate(5, 600, key), rate(5, 10, key)]
      await freeze('2026-03-01T11:57:00Z')
      await accept(...items('a', 2, { rates: [theirs] }))
      await freeze('2026-03-01T12:05:30Z')
      expect(rateOf((await accept(item('a', { rates: [ours] })))[0])).toMatchObject({ left: 2 })
      await accept(...items('a', 2, { rates: [theirs] }))
      // Ours waits until the end of the minute 11:57 has left the window, theirs until its beginning has.
      expect(rateOf((await accept(item('a', { rates: [ours] })))[0])).toMatchObject({ left: 0, resetMs: 150_000 })
      expect(rateOf((await accept(item('a', { rates: [theirs] })))[0])).toMatchObject({ left: 0, resetMs: 90_000 })
      await freeze('2026-03-01T12:08:00Z')
      expect(verdicts(await accept(...items('a', 3, { rates: [ours] })))).toEqual(['queue', 'queue', 'refuse:rate'])
    })

    it('keep the counts when the window changes', async () => {
      const { freeze } = opened()
      const key = randomUUID()
      const [short, long] = [rate(3, 61, key), rate(3, 121, key)]
      await freeze('2026-03-01T12:00:30Z')
      await accept(...items('a', 2, { rates: [long] }))
      await freeze('2026-03-01T13:30:00Z')
      expect(rateOf((await accept(item('a', { rates: [short] })))[0])).toMatchObject({ left: 2 })
      expect(rateOf((await accept(item('a', { rates: [long] })))[0])).toMatchObject({ left: 0, resetMs: 31 * minute })
    })
  })

  describe('halts', () => {
    it('refuse their scope until they end', async () => {
      const { store } = opened()
      await store.halt('petitions', 'a drill')
      await store.halt('petitions', 'again')
      expect(verdicts(await accept(item('a', { halt: 'petitions' }), item('a', { halt: 'other' }), item('a')))).toEqual(
        ['refuse:halt', 'queue', 'queue'],
      )
      const worker = await TestWorker.enlist(store)
      expect((await store.pulse(worker.id, 15_000, {})).halts).toEqual([{ scope: 'petitions', reason: 'a drill' }])
      expect(await store.unhalt('petitions')).toBe(true)
      expect(await store.unhalt('petitions')).toBe(false)
      expect(verdicts(await accept(item('a', { halt: 'petitions' })))).toEqual(['queue'])
    })
  })

  describe('connections', () => {
    /** Changes as one process makes them: numbered. */
    const changing = (worker: TestWorker, pool: string) => {
      const state = { seq: 0 }
      return (
        takes: string[],
        gives: string[] = [],
        { held = null, ...most }: { perIdentity: number; total: number; held?: Map<string, number> | null } = small,
      ) =>
        worker.store.changeConnections(worker.id, pool, {
          seq: ++state.seq,
          held,
          gives,
          takes: takes.map((identity) => ({ identity, ...most })),
        })
    }
    const small = { perIdentity: 3, total: 10 }

    it('are granted exactly up to both limits, at any concurrency, and are returned', async () => {
      const { store, another } = opened()
      const workers = await Promise.all([store, another(), another()].map((s) => TestWorker.enlist(s)))
      const all = (
        await Promise.all(
          workers.map(async (w) => {
            const change = changing(w, 'sse')
            const outcomes = []
            for (const n of [1, 2, 3]) outcomes.push(...((await change(['a', 'b', `c${n}`, `d${n}`])) ?? []))
            return outcomes
          }),
        )
      ).flat()
      expect(all.filter((o) => o === 'granted')).toHaveLength(10)
      const change = changing(must(workers[0]), 'other')
      expect(await change(['a', 'a', 'a', 'a'])).toEqual(['granted', 'granted', 'granted', 'identity_full'])
      await change([], ['a', 'a', 'nobody'])
      expect(await change(['a', 'a', 'a'])).toEqual(['granted', 'granted', 'identity_full'])
    })

    it('are given back before others are taken', async () => {
      const { store } = opened()
      const change = changing(await TestWorker.enlist(store), 'sse')
      await change(['a'], [], { perIdentity: 1, total: 1 })
      expect(await change(['b'], ['a'], { perIdentity: 1, total: 1 })).toEqual(['granted'])
    })

    it('are what the process says, whatever was changed before', async () => {
      const { store } = opened()
      const change = changing(await TestWorker.enlist(store), 'sse')
      await change(['a', 'a', 'b'])
      const held = new Map([
        ['a', 1],
        ['c', 2],
      ])
      const outcomes = await change(['a', 'a', 'a', 'b', 'c', 'c'], [], { ...small, held })
      expect(outcomes).toEqual(['granted', 'granted', 'identity_full', 'granted', 'granted', 'identity_full'])
    })

    it('are not changed by late events', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      const change = (seq: number) =>
        store.changeConnections(worker.id, 'sse', {
          seq,
          held: null,
          gives: [],
          takes: [{ identity: 'a', perIdentity: 2, total: 2 }],
        })
      expect(await change(2)).toEqual(['granted'])
      expect(await change(1)).toBeNull()
      expect(await change(2)).toBeNull()
      expect(await change(3)).toEqual(['granted'])
    })

    it('of a process that dies are free at once', async () => {
      const { store, advance } = opened()
      const [dying, living] = [await TestWorker.enlist(store, 1_000), await TestWorker.enlist(store, 600_000)]
      const most = { perIdentity: 5, total: 2 }
      const [ofDying, ofLiving] = [changing(dying, 'sse'), changing(living, 'sse')]
      await ofDying(['a', 'b'], [], most)
      expect(await ofLiving(['a'], [], most)).toEqual(['pool_full'])
      await advance(1_001)
      await store.recover()
      expect(await ofLiving(['a'], [], most)).toEqual(['granted'])
      await expect(ofDying(['a'], [], most)).rejects.toThrow()
    })
  })
}
