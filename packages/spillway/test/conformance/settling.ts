import { describe, expect, it } from 'vitest'
import { claimSql, settleSql, step, stepSql } from '../../src/store/postgres/step.js'
import {
  claimAll,
  contextOf,
  executing,
  item,
  items,
  leaving,
  must,
  type OpenedStore,
  queue,
  settlement,
  settlementsOf,
  TestWorker,
  untilBlocked,
} from './harness.js'

export function settling(opened: () => OpenedStore): void {
  describe('settling and claiming', () => {
    it('settles and claims the next in one call, in lane order', async () => {
      const { store } = opened()
      const ids = await queue(store, items('a', 7))
      const worker = await TestWorker.enlist(store)
      expect(await worker.drain({ each: 2 })).toEqual(ids)
      expect(await store.finished(ids)).toHaveLength(7)
      expect((await store.pulse(worker.id, 15_000, {})).held).toEqual({ work: 0 })
    })

    it('gives a lane to one worker at a time', async () => {
      const { store, another } = opened()
      await queue(store, items('a', 3))
      const [one, two] = [await TestWorker.enlist(store), await TestWorker.enlist(another())]
      const held = await one.claim({ each: 1 })
      expect(held).toHaveLength(1)
      expect(await two.claim()).toEqual([])
      await one.complete(held)
      expect(await two.claim()).toHaveLength(2)
    })

    it('writes nothing when nothing is ready, so that no caller waits for the disk', async () => {
      const { store, session, sql } = opened()
      const worker = await TestWorker.enlist(store)
      const client = await session()
      const [row] = await sql<{ schema: string }>('SELECT current_schema() AS schema')
      const { schema } = must(row)
      const statements = {
        ...{ step: stepSql(schema), settle: settleSql(schema), claim: claimSql(schema) },
        ...{ stepAndKeep: '', settleAndKeep: '' },
      }
      /** Claims as the store does; answers the transaction's id, which the first write gives it. */
      const written = async (): Promise<string | null> => {
        await client.query('BEGIN')
        await step(
          async (text, values) => (await client.query<unknown[]>({ text, values: [...values], rowMode: 'array' })).rows,
          statements,
          worker.id,
          0,
          [],
          claimAll,
        )
        const { rows } = await client.query<{ id: string | null }>('SELECT pg_current_xact_id_if_assigned() AS id')
        await client.query('ROLLBACK')
        return must(rows[0]).id
      }
      expect(await written()).toBeNull()
      await queue(store, [item('a', { delayMs: 60_000 })])
      expect(await written()).toBeNull()
      await queue(store, [item('b')])
      expect(await written()).not.toBeNull()
    })

    it('never hands an operation to two of many claiming workers', async () => {
      const { store, another } = opened()
      const ids = new Set<string>()
      for (let n = 0; n < 40; n++) for (const id of await queue(store, items(`lane ${n}`, 3))) ids.add(id)
      const workers = await Promise.all([store, another(), another()].map((s) => TestWorker.enlist(s)))
      const seen = (await Promise.all(workers.map((w) => w.drain({ lanes: 3, each: 2 })))).flat()
      expect(seen).toHaveLength(ids.size)
      expect(new Set(seen)).toEqual(ids)
    })

    it('settles a part, keeps the lane, and gives the rest back in order', async () => {
      const { store, another } = opened()
      const ids = await queue(store, items('a', 5))
      const worker = await TestWorker.enlist(store)
      const claimed = await worker.claim()
      const [a, b] = [must(claimed[0]), must(claimed[1])]
      expect(await worker.settle([settlement(a, { leaving: [leaving(a), leaving(b)], release: false })])).toEqual([])
      expect(await (await TestWorker.enlist(another())).claim()).toEqual([])
      expect(await worker.settle([settlement(a, { from: b.seq })])).toEqual([])
      expect(await worker.drain()).toEqual(ids.slice(2))
    })

    it('retries in place: nothing behind it comes first, and attempts are counted', async () => {
      const { store, advance } = opened()
      const ids = await queue(store, items('a', 3))
      const worker = await TestWorker.enlist(store)
      expect((await store.pulse(worker.id, 15_000, {})).nextDueMs).toBeNull()
      const [a, b] = await worker.claim()
      const retry = { delayMs: 5_000, error: 'not yet' }
      await worker.settle([settlement(must(a), { leaving: [leaving(must(a))], retry })])
      expect(await worker.claim()).toEqual([])
      expect(await store.ticket(must(b).id)).toMatchObject({
        status: 'pending',
        attempts: 1,
        error: 'not yet',
        position: 0,
      })
      expect((await store.pulse(worker.id, 15_000, {})).nextDueMs).toBeGreaterThan(1_000)
      await advance(5_001)
      const again = await worker.claim()
      expect(again.map((op) => [op.id, op.attempts])).toEqual([
        [ids[1], 1],
        [ids[2], 0],
      ])
      await worker.complete(again)
    })

    it('counts no attempt for an operation that was returned without an error', async () => {
      const { store } = opened()
      await queue(store, [item('a')])
      const worker = await TestWorker.enlist(store)
      const op = must((await worker.claim())[0])
      await worker.settle([settlement(op, { retry: { delayMs: 0, error: null } })])
      expect(await worker.claim()).toMatchObject([{ id: op.id, attempts: 0 }])
    })

    it('holds a lane for its delayed head, and other lanes continue', async () => {
      const { store, advance } = opened()
      const delayed = item('a', { delayMs: 10_000 })
      const behind = item('a')
      const other = item('b')
      await queue(store, [delayed, behind, other])
      const worker = await TestWorker.enlist(store)
      expect(await worker.drain()).toEqual([other.id])
      await advance(9_000)
      expect(await worker.claim()).toEqual([])
      await advance(1_001)
      expect(await worker.drain()).toEqual([delayed.id, behind.id])
    })

    it('says which operations of a claim are not due, and parks the lane for them', async () => {
      const { store, advance } = opened()
      const list = [item('a'), item('a', { delayMs: 10_000 }), item('a')]
      await queue(store, list)
      const worker = await TestWorker.enlist(store)
      const claimed = await worker.claim()
      expect(claimed.map((op) => op.due)).toEqual([true, false, true])
      const first = must(claimed[0])
      await worker.settle([settlement(first, { leaving: [leaving(first)] })])
      expect(await worker.claim()).toEqual([])
      await advance(10_001)
      expect(await worker.drain()).toEqual(list.slice(1).map((i) => i.id))
    })

    it('keeps results, errors and times in history', async () => {
      const { store } = opened()
      const [done, failed, plain] = await queue(store, [item('a'), item('b', { payload: '{"x":1}' }), item('c')])
      const worker = await TestWorker.enlist(store)
      const claimed = await worker.claim()
      await worker.settle(
        settlementsOf(claimed, (op) =>
          op.id === done
            ? { result: { ok: [1] } }
            : op.id === failed
              ? { status: 'failed', error: 'broken' }
              : 'completed',
        ),
      )
      expect(await store.ticket(must(done))).toMatchObject({
        status: 'completed',
        result: { ok: [1] },
        attempts: 1,
        position: null,
      })
      expect(await store.ticket(must(failed))).toMatchObject({ status: 'failed', error: 'broken', attempts: 1 })
      expect(await store.ticket(must(plain))).toMatchObject({
        status: 'completed',
        result: null,
        startedAt: expect.any(Date),
      })
      expect(await store.deadLetters({}, 10, null)).toMatchObject([{ id: failed, payload: '{"x":1}' }])
    })

    it('refuses a complete settlement whose lease is gone', async () => {
      const { store, another, advance } = opened()
      await queue(store, [item('a'), item('b')])
      const zombie = await TestWorker.enlist(store, 1_000)
      const old = await zombie.claim()
      await advance(1_001)
      const successor = await TestWorker.enlist(another())
      expect(await store.recover()).toMatchObject({ worker: zombie.id, lanes: 2 })
      expect(await store.recover()).toBeNull()
      expect(await zombie.complete(old)).toEqual([must(old[0]).fence])
      expect(await zombie.claim()).toEqual([])
      expect(await store.finished(old.map((op) => op.id))).toEqual([])
      const again = await successor.claim()
      expect(again.map((op) => [op.id, op.attempts])).toEqual(old.map((op) => [op.id, 0]))
      // Now the lanes are held by another: still refused, also together with a lease that is good.
      expect(await zombie.complete(old)).toEqual([must(old[0]).fence])
      expect(await successor.complete(old)).toEqual([must(old[0]).fence])
      expect(await successor.complete(again)).toEqual([])
    })

    it('settles nothing of a call in which one lease is lost', async () => {
      const { store } = opened()
      await queue(store, [item('a'), item('b')])
      const worker = await TestWorker.enlist(store)
      const one = await worker.claim({ lanes: 1 })
      const two = await worker.claim({ lanes: 1 })
      const wrong = two.map((op) => ({ ...op, fence: op.fence + 1_000 }))
      expect(await worker.complete([...one, ...wrong])).toEqual([must(wrong[0]).fence])
      expect(await store.finished([must(one[0]).id])).toEqual([])
      expect(await worker.complete([...one, ...two])).toEqual([])
    })

    it('does not let a process settle what another one holds', async () => {
      const { store } = opened()
      await queue(store, [item('a')])
      const [one, two] = [await TestWorker.enlist(store), await TestWorker.enlist(store)]
      const held = await one.claim()
      expect(await two.complete(held)).toEqual([must(held[0]).fence])
      expect(await one.complete(held)).toEqual([])
    })

    it('claims nothing when the settlement in the same call is refused', async () => {
      const { store } = opened()
      await queue(store, [item('a'), item('b')])
      const worker = await TestWorker.enlist(store)
      const held = await worker.claim({ lanes: 1 })
      const wrong = settlementsOf(
        held.map((op) => ({ ...op, fence: op.fence + 1_000 })),
        () => 'completed',
      )
      const { lost, claimed } = await store.step(worker.id, 0, wrong, { lanes: 1, budget: 1, each: 1, turn: 1 })
      expect(lost).toHaveLength(1)
      expect(claimed).toEqual([])
      await worker.complete(held)
      expect(await worker.claim()).toHaveLength(1)
    })

    it('settles inside a transaction, with its effect or never', async () => {
      const { store, sql } = opened()
      await sql('CREATE TABLE effects (op uuid PRIMARY KEY)')
      await store.registerGate('g', 10, 5)
      const [id] = await queue(store, [item('a', { gate: 'g', key: 'k' })])
      const worker = await TestWorker.enlist(store)
      const op = must((await worker.claim())[0])
      const within = async (): Promise<Awaited<ReturnType<typeof store.begin>>> => {
        const tx = await store.begin(30_000)
        const [{ schema } = { schema: '' }] = await sql<{ schema: string }>('SELECT current_schema() AS schema')
        await tx.query(`INSERT INTO ${schema}.effects VALUES ($1)`, [id])
        const end = settlement(op, { leaving: [leaving(op)] })
        expect(await store.settleWithin(tx, worker.id, end)).toBe(true)
        return tx
      }
      await (await within()).rollback()
      expect(await sql('SELECT FROM effects')).toEqual([])
      expect(await store.ticket(must(id))).toMatchObject({ status: 'pending' })
      expect((await store.pulse(worker.id, 15_000, {})).gates).toMatchObject([{ held: 1 }])
      await (await within()).commit()
      expect(await sql('SELECT FROM effects')).toHaveLength(1)
      expect(await store.ticket(must(id))).toMatchObject({ status: 'completed' })
      expect((await store.pulse(worker.id, 15_000, {})).gates).toMatchObject([{ held: 0 }])
    })

    it('answers false inside a transaction when the lease is lost', async () => {
      const { store, advance } = opened()
      await queue(store, [item('a')])
      const worker = await TestWorker.enlist(store, 1_000)
      const op = must((await worker.claim())[0])
      await advance(1_001)
      await store.recover()
      const tx = await store.begin(30_000)
      expect(await store.settleWithin(tx, worker.id, settlement(op, { leaving: [leaving(op)] }))).toBe(false)
      await tx.rollback()
    })

    it('reports after an unconfirmed commit whether it took effect, waiting for its end', async () => {
      const { store, advance } = opened()
      await queue(store, items('a', 2))
      const worker = await TestWorker.enlist(store, 1_000)
      const op = must((await worker.claim())[0])
      const confirm = () => store.confirm(worker.id, op.fence, op.lane, op.seq)
      const settled = async (): Promise<Awaited<ReturnType<typeof store.begin>>> => {
        const tx = await store.begin(30_000)
        await store.settleWithin(tx, worker.id, settlement(op, { leaving: [leaving(op)], release: false }))
        return tx
      }
      expect(await confirm()).toBe('pending')
      const undone = await settled()
      const afterUndone = confirm()
      await untilBlocked(opened())
      await undone.rollback()
      expect(await afterUndone).toBe('pending')
      const done = await settled()
      const afterDone = confirm()
      await untilBlocked(opened())
      await done.commit()
      expect(await afterDone).toBe('left')
      await advance(1_001)
      await store.recover()
      expect(await confirm()).toBe('lost')
    })

    it('puts a lane back by the operation that is next, also when another one was cancelled meanwhile', async () => {
      const { store, session } = opened()
      const list = [item('a'), item('a', { priority: 3 }), item('a', { priority: 7 })]
      const ids = await queue(store, list)
      const worker = await TestWorker.enlist(store)
      const held = await worker.claim({ each: 1 })
      const operator = await session()
      await operator.query('BEGIN')
      await operator.query("SELECT cancel($1, '{}', 'why')", [ids[1]])
      const settled = worker.complete(held)
      await untilBlocked(opened())
      await operator.query('COMMIT')
      await settled
      expect(await store.audit()).toEqual([])
      expect(await store.cancel(must(ids[2]), [], 'why')).toBe('cancelled')
    })

    it.each(['mark', 'retry'] as const)(
      'does not deadlock when a running operation is cancelled during a %s',
      async (kind) => {
        const { store, session } = opened()
        await queue(store, [item('a')])
        const worker = await TestWorker.enlist(store)
        const op = must((await worker.claim())[0])
        // The first lock of a cancel is the lane's.
        const operator = await session()
        await operator.query('BEGIN')
        await operator.query('SELECT FROM lanes WHERE id = $1 FOR UPDATE', [op.lane])
        const written =
          kind === 'mark'
            ? store.mark(worker.id, [{ fence: op.fence, lane: op.lane, seq: op.seq, startedMsAgo: 60 }])
            : worker.settle([settlement(op, { retry: { delayMs: 0, error: 'again' } })])
        await untilBlocked(opened())
        const cancelled = operator.query("SELECT cancel($1, '{}', 'why') AS outcome", [op.id])
        const outcomes = await Promise.allSettled([written, cancelled.then(() => operator.query('COMMIT'))])
        expect(outcomes.map((o) => (o.status === 'rejected' ? String(o.reason.cause ?? o.reason) : 'fine'))).toEqual([
          'fine',
          'fine',
        ])
      },
    )

    it('finds an operation accepted while a settlement waited for the lane', async () => {
      const { store } = opened()
      await queue(store, [item('a')])
      const worker = await TestWorker.enlist(store)
      const held = await worker.claim()
      const tx = await store.begin(30_000)
      const next = item('a')
      await store.acceptWithin(tx, [next], contextOf(worker.id))
      const settled = worker.complete(held)
      await untilBlocked(opened())
      await tx.commit()
      await settled
      expect(await worker.drain()).toEqual([next.id])
    })

    it('ends a lease with its last lane, whichever call gives that up', async () => {
      const { store, sql } = opened()
      const worker = await TestWorker.enlist(store)
      const list = [item('a', { execute: true }), item('b', { execute: true })]
      const accepted = await worker.accept(list)
      const [a, b] = list.map((i, n) => executing(i, accepted[n]))
      // Two calls that do not know of each other: neither is sure to be the last.
      await worker.settle([settlement(must(a), { leaving: [leaving(must(a))] })])
      await worker.settle([settlement(must(b), { leaving: [leaving(must(b))] })])
      expect(await sql('SELECT * FROM leases')).toEqual([])
    })

    it('gives back leases whose claim was never answered, uncharged', async () => {
      const { store, advance } = opened()
      const ids = await queue(store, [...items('a', 2), item('b')])
      const worker = await TestWorker.enlist(store, 600_000)
      const known = await worker.claim({ lanes: 1 })
      await worker.claim({ lanes: 1 })
      // The call that brought it may still be under way.
      expect(await store.disown(worker.id, [must(known[0]).fence])).toBe(0)
      await advance(60_000)
      expect(await store.disown(worker.id, [must(known[0]).fence])).toBe(1)
      expect(await store.disown(worker.id, [must(known[0]).fence])).toBe(0)
      expect(await worker.complete(known)).toEqual([])
      const rest = await worker.claim()
      expect(rest.every((op) => op.attempts === 0)).toBe(true)
      expect([...known, ...rest].map((op) => op.id).sort()).toEqual([...ids].sort())
    })

    it('retires a process: its lanes go back uncharged, and it claims and executes no more', async () => {
      const { store } = opened()
      const ids = await queue(store, items('a', 3))
      const worker = await TestWorker.enlist(store)
      const held = await worker.claim()
      await store.mark(worker.id, [{ fence: must(held[0]).fence, lane: must(held[0]).lane, seq: 1, startedMsAgo: 10 }])
      expect(await store.retire(worker.id)).toBe(1)
      expect(await worker.complete(held)).toEqual([must(held[0]).fence])
      expect(await worker.claim()).toEqual([])
      expect((await worker.accept([item('b', { execute: true })])).map((a) => a.verdict)).toEqual(['queue'])
      expect((await store.pulse(worker.id, 15_000, {})).alive).toBe(false)
      expect(await store.ticket(must(ids[0]))).toMatchObject({ status: 'pending', attempts: 0 })
      const next = await TestWorker.enlist(store)
      expect((await next.claim()).filter((op) => op.partition === 'a').map((op) => op.id)).toEqual(ids)
    })
  })

  describe('pausing', () => {
    it('hands out nothing of a paused queue as due, and all of it after the resume', async () => {
      const { store } = opened()
      const ids = await queue(store, [...items('a', 2), item('other', { queue: 'other' })])
      const worker = await TestWorker.enlist(store)
      await store.pause('q', null)
      const claimed = await worker.claim()
      expect(claimed.filter((op) => op.due).map((op) => op.id)).toEqual([ids[2]])
      const paused = must(claimed.find((op) => op.queue === 'q'))
      const other = claimed.filter((op) => op.queue === 'other')
      await worker.settle([...settlementsOf(other, () => 'completed'), settlement(paused, {})])
      expect(await worker.claim()).toEqual([])
      await store.resume('q', null)
      expect(await worker.drain()).toEqual(ids.slice(0, 2))
    })

    it('pauses a single lane, and resuming the queue ends that too', async () => {
      const { store } = opened()
      const [a, b] = await queue(store, [item('a'), item('b')])
      const worker = await TestWorker.enlist(store)
      await store.pause('q', 'a')
      await store.pause('q', 'a')
      const claimed = await worker.claim()
      expect(claimed.map((op) => [op.id, op.due]).sort()).toEqual(
        [
          [must(a), false],
          [must(b), true],
        ].sort(),
      )
      await worker.settle(claimed.map((op) => settlement(op, op.due ? { leaving: [leaving(op)] } : {})))
      await store.resume('q', 'b')
      expect(await worker.claim()).toEqual([])
      await store.resume('q', null)
      expect(await worker.drain()).toEqual([a])
    })

    it('executes nothing at once in a paused lane', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      await store.pause('q', null)
      expect(await worker.accept([item('a', { execute: true })])).toMatchObject([
        { verdict: 'queue', reason: 'maintaining_order' },
      ])
      expect(await worker.accept([item('a', { execute: true, queue: 'free' })])).toMatchObject([{ verdict: 'execute' }])
    })

    it('does not resume past a lane that is being parked', async () => {
      const { store, session } = opened()
      const [id] = await queue(store, [item('a')])
      const worker = await TestWorker.enlist(store, 600_000)
      await store.pause('q', null)
      const [claimed] = await worker.claim()
      // A settlement has seen the pause and parks the lane, but has not committed.
      const parking = await session()
      await parking.query('BEGIN')
      expect(await store.settleWithin(parking, worker.id, settlement(must(claimed), {}))).toBe(true)
      const resumed = store.resume('q', null)
      await untilBlocked(opened(), 1)
      await parking.query('COMMIT')
      await resumed
      expect(await worker.drain()).toEqual([id])
    })
  })
}
