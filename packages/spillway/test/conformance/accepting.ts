import { describe, expect, it } from 'vitest'
import type { Accepted, StoreEffect } from '../../src/store/port.js'
import {
  contextOf,
  executing,
  item,
  items,
  leaving,
  must,
  nobody,
  type OpenedStore,
  queue,
  settlement,
  TestWorker,
  untilBlocked,
  verdicts,
} from './harness.js'

const place = (a: Accepted | undefined): number | undefined => (a?.verdict === 'queue' ? a.place : undefined)

/** Writes what is applied into `effects`, refuses 13, and returns number and sequence of what it wrote. */
async function effectOf({ sql }: OpenedStore, numbers: readonly number[], returned = 'results'): Promise<StoreEffect> {
  const [row] = await sql<{ schema: string }>('SELECT current_schema() AS schema')
  await sql('CREATE TABLE IF NOT EXISTS effects (n int NOT NULL CHECK (n <> 13), seq bigint NOT NULL, at bigserial)')
  await sql(`CREATE OR REPLACE FUNCTION effect(verdicts text[], seqs bigint[], numbers int[]) RETURNS json[]
    LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
    DECLARE results json[];
    BEGIN
      INSERT INTO effects (n, seq) SELECT u.n, u.seq FROM unnest(verdicts, seqs, numbers) u(verdict, seq, n) WHERE u.verdict = 'apply';
      SELECT array_agg(CASE WHEN u.verdict = 'apply' THEN json_build_array(u.n, u.seq) END) INTO results
        FROM unnest(verdicts, seqs, numbers) u(verdict, seq, n);
      RETURN ${returned};
    END $$`)
  return { function: `${row?.schema}.effect`, values: (order) => [order.map((index) => must(numbers[index]))] }
}

const effects = async ({ sql }: OpenedStore): Promise<(number | undefined)[][]> =>
  (await sql<{ n: number; seq: string }>('SELECT n, seq FROM effects ORDER BY at')).map(({ n, seq }) => [
    n,
    Number(seq),
  ])

const reason = (a: Accepted | undefined): string | undefined => (a?.verdict === 'queue' ? a.reason : undefined)

export function accepting(opened: () => OpenedStore): void {
  describe('accepting', () => {
    it('numbers a lane without gap or repeat, whichever process accepts', async () => {
      const { store, another, sql } = opened()
      const stores = [store, another(), another(), another()]
      const lanes = ['a', 'b', 'c', 'd', 'e']
      await Promise.all(
        stores.flatMap((s, n) =>
          Array.from({ length: 12 }, async (_, round) => {
            // Overlapping lanes in a different order each time: the store has to sort them.
            const mixed = lanes.flatMap((lane, i) => items(lane, ((n + round + i) % 3) + 1))
            await queue(s, round % 2 === 0 ? mixed : mixed.reverse(), `00000000-0000-4000-8000-00000000010${n}`)
          }),
        ),
      )
      const rows = await sql<{ n: number; first: number; last: number; tail: number }>(
        'SELECT count(*)::int AS n, min(o.seq)::int AS first, max(o.seq)::int AS last, l.tail::int AS tail FROM ops o JOIN lanes l ON l.id = o.lane GROUP BY l.id',
      )
      expect(rows).toHaveLength(lanes.length)
      for (const row of rows) expect(row).toEqual({ n: row.tail, first: 1, last: row.tail, tail: row.tail })
    })

    it('hands out a flush in the order in which it came, lane by lane', async () => {
      const { store } = opened()
      const list = ['b', 'a', 'b', 'c', 'a', 'b'].map((lane) => item(lane))
      await queue(store, list)
      const worker = await TestWorker.enlist(store)
      const claimed = await worker.claim()
      for (const lane of ['a', 'b', 'c']) {
        expect(claimed.filter((op) => op.partition === lane).map((op) => op.id)).toEqual(
          list.filter((i) => i.partition === lane).map((i) => i.id),
        )
      }
      await worker.complete(claimed)
    })

    it('executes only in an empty lane, and only the first of it', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      await queue(store, [item('busy')])
      const list = [item('empty', { execute: true }), item('empty', { execute: true }), item('busy', { execute: true })]
      const accepted = await worker.accept(list)
      expect(verdicts(accepted)).toEqual(['execute', 'queue', 'queue'])
      expect(accepted.map(reason)).toEqual([undefined, 'maintaining_order', 'maintaining_order'])
      const running = executing(must(list[0]), accepted[0])
      expect(await store.ticket(running.id)).toMatchObject({ status: 'processing' })
      await worker.complete([running])
      expect(await worker.drain()).toHaveLength(3)
    })

    it('queues what asks to run for a process that is not enlisted', async () => {
      const { store } = opened()
      expect(verdicts(await store.accept([item('a', { execute: true })], contextOf(nobody)))).toEqual(['queue'])
    })

    it('executes nothing that did not ask for it, whatever became of its neighbours', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      await queue(store, [item('a', { key: 'k' })])
      expect(verdicts(await worker.accept([item('a', { key: 'k' }), item('b'), item('c', { execute: true })]))).toEqual(
        ['replay', 'queue', 'execute'],
      )
    })

    it('never lets a direct run overtake a queued, parked, leased or running operation', async () => {
      const { store, advance } = opened()
      const worker = await TestWorker.enlist(store)
      const direct = async (lane: string): Promise<string | undefined> =>
        verdicts(await worker.accept([item(lane, { execute: true })]))[0]
      await queue(store, [item('ready'), item('delayed', { delayMs: 60_000 }), item('leased')])
      expect(await direct('ready')).toBe('queue')
      expect(await direct('delayed')).toBe('queue')
      const leased = (await worker.claim()).filter((op) => op.partition === 'leased')
      expect(await direct('leased')).toBe('queue')
      await worker.settle([settlement(must(leased[0]), { retry: { delayMs: 60_000, error: 'again' } })])
      expect(await direct('leased')).toBe('queue')
      await advance(61_000)
      await store.pulse(worker.id, 15_000, {})
    })

    it('gives one of many concurrent direct runs the lane', async () => {
      const { store, another } = opened()
      const workers = await Promise.all([store, another(), another(), another()].map((s) => TestWorker.enlist(s)))
      for (let round = 0; round < 10; round++) {
        const lists = workers.map(() => [item(`r${round}`, { execute: true })])
        const all = await Promise.all(workers.map((w, n) => w.accept(must(lists[n]))))
        expect(all.flatMap(verdicts).sort()).toEqual(['execute', 'queue', 'queue', 'queue'])
        const n = all.findIndex((accepted) => accepted[0]?.verdict === 'execute')
        expect(must(all[n])[0]).toMatchObject({ seq: 1 })
        await must(workers[n]).complete([executing(must(must(lists[n])[0]), must(all[n])[0])])
      }
      expect(await must(workers[0]).drain()).toHaveLength(30)
    })

    it('reports the position behind waiting operations, not counting running ones', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      const first = item('a', { execute: true })
      const [a, b, c] = await worker.accept([first, item('a'), item('a', { reason: 'requested' })])
      expect([place(b), place(c)]).toEqual([0, 1])
      expect(reason(c)).toBe('requested')
      expect(place((await worker.accept([item('a')]))[0])).toBe(2)
      await worker.complete([executing(first, a)])
      expect(place((await worker.accept([item('a')]))[0])).toBe(3)
    })

    it('runs nothing at once inside a transaction of the caller, and leaves nothing of one that is rolled back', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      const tx = await store.begin(30_000)
      expect(verdicts(await store.acceptWithin(tx, [item('a', { execute: true })], contextOf(worker.id)))).toEqual([
        'queue',
      ])
      await tx.rollback()
      expect(await worker.claim()).toEqual([])
      const kept = item('a', { execute: true })
      const second = await store.begin(30_000)
      await store.acceptWithin(second, [kept], contextOf(worker.id))
      await second.commit()
      expect(await worker.drain()).toEqual([kept.id])
    })

    it('applies in empty lanes, queues behind waiting operations, and rolls both back with the effect', async () => {
      const { store, sql } = opened()
      const worker = await TestWorker.enlist(store)
      await queue(store, [item('busy')])
      await sql('CREATE TABLE effects (n int)')
      const list = ['empty', 'busy', 'empty'].map((lane) => item(lane, { execute: true }))
      const context = contextOf(worker.id)
      await expect(
        store.acceptAndApply(list, context, async () => {
          throw new Error('no effect')
        }),
      ).rejects.toThrow('no effect')
      expect(await sql('SELECT FROM ops')).toHaveLength(1)
      const accepted = await store.acceptAndApply(list, context, async (_tx, { applied }) => {
        expect(applied).toEqual([0, 2])
        return applied.map(() => ({ v: 'done', result: null }))
      })
      expect(verdicts(accepted)).toEqual(['apply', 'queue', 'apply'])
      expect(accepted.map((a) => ('seq' in a ? a.seq : 0))).toEqual([1, 2, 2])
      // An operation that follows has the next number, and the lane is free for it.
      const direct = item('empty', { execute: true })
      const [next] = await worker.accept([direct])
      expect(next).toMatchObject({ verdict: 'execute', seq: 3 })
      await worker.complete([executing(direct, next)])
    })

    it('applies nothing in a paused lane, and nothing that is to be queued', async () => {
      const { store } = opened()
      await store.pause('q', 'held')
      const list = [
        item('held', { execute: true }),
        item('free', { execute: true }),
        item('asked', { reason: 'requested' }),
      ]
      const accepted = await store.acceptAndApply(list, contextOf(nobody), async (_tx, { applied }) => {
        expect(applied).toEqual([1])
        return [{ v: 'done', result: null }]
      })
      expect(verdicts(accepted)).toEqual(['queue', 'apply', 'queue'])
    })

    it('keeps the answer of an applied item for its key', async () => {
      const { store } = opened()
      const context = contextOf(nobody)
      const effect = async (_tx: unknown, { applied }: { applied: readonly number[] }) =>
        applied.map((n) => ({ v: 'done', result: { n } }) as const)
      await store.acceptAndApply([item('a', { key: 'k', execute: true })], context, effect)
      expect(await store.acceptAndApply([item('a', { key: 'k', execute: true })], context, effect)).toMatchObject([
        { verdict: 'replay', answer: { v: 'done', result: { n: 0 } } },
      ])
    })

    it('applies by a function in empty lanes, and queues behind waiting operations', async () => {
      const { store, sql } = opened()
      const worker = await TestWorker.enlist(store)
      await queue(store, [item('busy')])
      const list = ['empty', 'busy', 'empty', 'asked'].map((lane) => item(lane, { execute: lane !== 'asked' }))
      const effect = await effectOf(opened(), [7, 8, 9, 10])
      const { accepted, results } = await store.acceptWithEffect(list, contextOf(worker.id), effect)
      expect(verdicts(accepted)).toEqual(['apply', 'queue', 'apply', 'queue'])
      expect(results).toEqual([[7, 1], null, [9, 2], null])
      expect(await effects(opened())).toEqual([
        [7, 1],
        [9, 2],
      ])
      expect(await sql('SELECT FROM ops')).toHaveLength(3)
      // An operation that follows has the next number, and the lane is free for it.
      const direct = item('empty', { execute: true })
      const [next] = await worker.accept([direct])
      expect(next).toMatchObject({ verdict: 'execute', seq: 3 })
      await worker.complete([executing(direct, next)])
    })

    it('returns for each item what the function returned for it, whatever the order of the lane locks', async () => {
      const { store } = opened()
      const lanes = ['b', 'a', 'd', 'c', 'b', 'a', 'd', 'c']
      const list = lanes.map((lane) => item(lane, { execute: true }))
      const sorted = [...list].sort((a, b) => (a.lane < b.lane ? -1 : a.lane > b.lane ? 1 : 0))
      expect(sorted).not.toEqual(list)
      const effect = await effectOf(opened(), [20, 21, 22, 23, 24, 25, 26, 27])
      const { results } = await store.acceptWithEffect(list, contextOf(nobody), effect)
      expect(results).toEqual([...[20, 21, 22, 23].map((n) => [n, 1]), ...[24, 25, 26, 27].map((n) => [n, 2])])
    })

    it('takes all of it back when the function fails', async () => {
      const { store, sql } = opened()
      await queue(store, [item('busy')])
      const list = ['empty', 'busy', 'other'].map((lane) => item(lane, { execute: true, key: `k ${lane}` }))
      const poisoned = await effectOf(opened(), [7, 8, 13])
      await expect(store.acceptWithEffect(list, contextOf(nobody), poisoned)).rejects.toMatchObject({ code: 'data' })
      expect(await effects(opened())).toEqual([])
      expect(await sql('SELECT FROM ops')).toHaveLength(1)
      expect(await sql('SELECT FROM idempotency')).toEqual([])
      const sound = await effectOf(opened(), [7, 8, 9])
      const { accepted, results } = await store.acceptWithEffect(list, contextOf(nobody), sound)
      expect(verdicts(accepted)).toEqual(['apply', 'queue', 'apply'])
      expect(results).toEqual([[7, 1], null, [9, 1]])
    })

    it('rolls back when the function returns more or fewer items than it got', async () => {
      const { store } = opened()
      for (const returned of ['results[2:]', 'results || results', 'NULL']) {
        const effect = await effectOf(opened(), [7, 8], returned)
        const accepted = store.acceptWithEffect(items('a', 2, { execute: true }), contextOf(nobody), effect)
        await expect(accepted).rejects.toMatchObject({ code: 'data' })
        expect(await effects(opened())).toEqual([])
      }
    })

    it('stores what the function returned for an applied item under its key', async () => {
      const { store } = opened()
      await queue(store, [item('busy')])
      const brought = () => [item('a', { key: 'k', execute: true }), item('busy', { key: 'q', execute: true })]
      await store.acceptWithEffect(brought(), contextOf(nobody), await effectOf(opened(), [7, 8]))
      const { accepted, results } = await store.acceptWithEffect(
        brought(),
        contextOf(nobody),
        await effectOf(opened(), [9, 10]),
      )
      expect(accepted).toMatchObject([
        { verdict: 'replay', answer: { v: 'done', result: [7, 1] } },
        { verdict: 'replay', answer: { v: 'queue' } },
      ])
      expect(results).toEqual([null, null])
      expect(await effects(opened())).toEqual([[7, 1]])
    })

    it('applies all queued items by the same function when the transaction commits', async () => {
      const { store } = opened()
      const effect = await effectOf(opened(), [7, 8, 9])
      const expected = [
        [7, 4],
        [8, 5],
        [9, 6],
      ]
      const undone = await store.begin(30_000)
      expect(await store.applyWithin(undone, [4, 5, 6], effect)).toEqual(expected)
      await undone.rollback()
      expect(await effects(opened())).toEqual([])
      const kept = await store.begin(30_000)
      expect(await store.applyWithin(kept, [4, 5, 6], effect)).toEqual(expected)
      await kept.commit()
      expect(await effects(opened())).toEqual(expected)
    })

    it('counts exactly when one process accepts on several connections at once', async () => {
      const { store, sql, session } = opened()
      const worker = await TestWorker.enlist(store)
      // Both have come to where they count, and neither has committed.
      await sql(`CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock_shared(4711); RETURN NEW; END $$`)
      await sql('CREATE TRIGGER hold BEFORE INSERT ON tallies FOR EACH ROW EXECUTE FUNCTION hold()')
      const holder = await session()
      await holder.query('SELECT pg_advisory_lock(4711)')
      const both = Promise.all(['a', 'b'].map((lane) => queue(store, items(lane, 2), worker.id)))
      await untilBlocked(opened(), 2)
      await holder.query('SELECT pg_advisory_unlock(4711)')
      await both
      await queue(store, items('c', 2), worker.id)
      expect((await store.pulse(worker.id, 15_000, {})).held).toEqual({ work: 6 })
    })

    it('refuses a batch for what one item contains, leaving no trace of the others', async () => {
      const { store } = opened()
      const [known] = await queue(store, [item('a')])
      await expect(queue(store, [item('b'), item('a', { id: must(known) })])).rejects.toMatchObject({ code: 'data' })
      await expect(queue(store, [item('b', { payload: 'no JSON' })])).rejects.toMatchObject({ code: 'data' })
      const worker = await TestWorker.enlist(store)
      expect(await worker.drain()).toEqual([known])
    })

    it('takes a new operation into a lane that a transaction has just emptied, and hands it out once', async () => {
      const { store, another } = opened()
      const [one, two] = [await TestWorker.enlist(store), await TestWorker.enlist(another())]
      await queue(store, [item('a')])
      const op = must((await one.claim())[0])
      const tx = await store.begin(30_000)
      expect(await store.settleWithin(tx, one.id, settlement(op, { leaving: [leaving(op)], release: false }))).toBe(
        true,
      )
      await tx.commit()
      const next = item('a')
      await queue(store, [next])
      await one.settle([settlement(op, { from: op.seq })])
      const handedOut = [...(await one.claim({ lanes: 1 })), ...(await two.claim({ lanes: 1 }))]
      expect(handedOut.map((o) => o.id)).toEqual([next.id])
    })
  })
}
