import { describe, expect, it } from 'vitest'
import type { Claimed } from '../../src/store/port.js'
import {
  executing,
  item,
  items,
  leaving,
  must,
  type OpenedStore,
  queue,
  settlement,
  TestWorker,
  untilBlocked,
} from './harness.js'

/** So long that the time a test takes itself never counts: only what it advances does. */
const leaseMs = 60_000

export function crashing(opened: () => OpenedStore): void {
  /** The process is heard of no more, and recovered. */
  const crash = async (worker: TestWorker): Promise<void> => {
    const { store, advance } = opened()
    await advance(leaseMs + 1)
    expect(await store.recover()).toMatchObject({ worker: worker.id })
  }
  const start = (worker: TestWorker, op: Claimed): Promise<void> =>
    opened().store.mark(worker.id, [{ fence: op.fence, lane: op.lane, seq: op.seq, startedMsAgo: 60 }])
  const doomed = (): Promise<TestWorker> => TestWorker.enlist(opened().store, leaseMs)

  describe('a process that dies', () => {
    it('charges no operation of a batch, then hands them out one at a time', async () => {
      const { store } = opened()
      const ids = await queue(store, items('a', 12))
      const worker = await doomed()
      expect(await worker.claim({ each: 10 })).toHaveLength(10)
      await crash(worker)
      const next = await doomed()
      for (const id of ids.slice(0, 10)) {
        const claimed = await next.claim()
        expect(claimed.map((op) => [op.id, op.attempts])).toEqual([[id, 0]])
        await next.complete(claimed)
      }
      expect((await next.claim()).map((op) => op.id)).toEqual(ids.slice(10))
    })

    it('hands out together the operations that cannot have killed it', async () => {
      const { store } = opened()
      const ids = await queue(store, items('a', 5))
      const worker = await doomed()
      const [first] = await worker.claim()
      await crash(worker)
      const next = await doomed()
      const claimed = await next.claim({ trusted: [must(first).type], together: [must(first).type] })
      expect(claimed.map((op) => op.id)).toEqual(ids)
    })

    it('charges the one that was marked as started, and none that may not have run', async () => {
      const { store } = opened()
      const [alone, marked, behind] = await queue(store, [item('a'), ...items('b', 2)])
      const worker = await doomed()
      await start(worker, must((await worker.claim()).find((op) => op.id === marked)))
      await crash(worker)
      expect(await store.ticket(must(alone))).toMatchObject({ attempts: 0, status: 'pending' })
      expect(await store.ticket(must(marked))).toMatchObject({ attempts: 1, status: 'pending', startedAt: null })
      expect(await store.ticket(must(behind))).toMatchObject({ attempts: 0, position: 1 })
      const next = await TestWorker.enlist(store)
      expect((await next.claim()).every((op) => op.careful)).toBe(true)
    })

    it('charges an operation that it executed directly', async () => {
      const { store } = opened()
      const worker = await doomed()
      const direct = item('a', { execute: true, maxAttempts: 2 })
      executing(direct, (await worker.accept([direct, item('a')]))[0])
      await crash(worker)
      expect(await store.ticket(direct.id)).toMatchObject({ attempts: 1, status: 'pending', position: 0 })
    })

    it('leaves nothing that looks like a run', async () => {
      const { store } = opened()
      const ids = await queue(store, items('a', 4))
      const worker = await doomed()
      const claimed = await worker.claim()
      // The first two are done but not settled yet; the third runs long.
      await start(worker, must(claimed[2]))
      await crash(worker)
      for (const [position, id] of ids.entries()) {
        expect(await store.ticket(id)).toMatchObject({ status: 'pending', startedAt: null, position })
      }
    })

    it('buries a poisonous operation after its attempts, with its neighbours untouched', async () => {
      const { store } = opened()
      await store.registerGate('g', 10, 5)
      const list = Array.from({ length: 5 }, () => item('a', { maxAttempts: 2, gate: 'g', key: `k${Math.random()}` }))
      const ids = await queue(store, list)
      const poison = must(ids[2])
      const first = await doomed()
      await first.claim()
      await crash(first)
      const done: string[] = []
      for (let deaths = 0; deaths < 2; ) {
        const worker = await doomed()
        for (;;) {
          const claimed = await worker.claim()
          expect(claimed).toMatchObject([{ careful: true }])
          await start(worker, must(claimed[0]))
          if (must(claimed[0]).id === poison) break
          done.push(must(claimed[0]).id)
          await worker.complete(claimed)
        }
        await crash(worker)
        deaths++
      }
      expect(await store.deadLetters({}, 10, null)).toMatchObject([{ id: poison, attempts: 2, status: 'failed' }])
      const last = await TestWorker.enlist(store)
      done.push(...(await last.drain()))
      expect(done).toEqual(ids.filter((id) => id !== poison))
      for (const id of done) expect(await store.ticket(id)).toMatchObject({ status: 'completed', attempts: 1 })
      expect(await store.pulse(last.id, 15_000, {})).toMatchObject({
        gates: [{ held: 0 }],
        deadLetters: 1,
        held: { work: 0 },
      })
      expect(await store.accept([must(list[2])], { worker: last.id, backlogMs: 0, keyTtlMs: 1_000 })).toMatchObject([
        { verdict: 'replay', operationId: poison },
      ])
    })

    it('does not undo earlier settlements', async () => {
      const { store } = opened()
      const ids = await queue(store, items('a', 3))
      const worker = await doomed()
      const [a] = await worker.claim()
      await worker.settle([settlement(must(a), { leaving: [leaving(must(a))], release: false })])
      await crash(worker)
      expect(await (await TestWorker.enlist(store)).drain()).toEqual(ids.slice(1))
    })

    it('keeps lanes that another process holds', async () => {
      const { store, advance } = opened()
      await queue(store, [item('a'), item('b')])
      const dying = await doomed()
      const living = await TestWorker.enlist(store, leaseMs)
      await dying.claim({ lanes: 1 })
      const held = await living.claim({ lanes: 1 })
      await advance(leaseMs / 2)
      expect(await store.pulse(living.id, leaseMs, {})).toMatchObject({ alive: true, lostWorkers: 0 })
      await advance(leaseMs / 2 + 1)
      expect(await store.pulse(living.id, leaseMs, {})).toMatchObject({ alive: true, lostWorkers: 1 })
      expect(await store.recover()).toMatchObject({ worker: dying.id, lanes: 1 })
      expect(await living.complete(held)).toEqual([])
    })

    it('learns that its lease is lost when it returns', async () => {
      const { store } = opened()
      const worker = await doomed()
      await crash(worker)
      expect(await store.pulse(worker.id, leaseMs, {})).toMatchObject({ alive: false })
    })

    it('is settled by the first of recovery and itself', async () => {
      const { store, another, advance } = opened()
      const other = another()
      for (let round = 0; round < 10; round++) {
        const [id] = await queue(store, [item(`a${round}`), item(`b${round}`)])
        const worker = await doomed()
        const claimed = await worker.claim()
        await advance(leaseMs + 1)
        const [lost] = await Promise.all([worker.complete(claimed), other.recover()])
        expect(await store.finished([must(id)])).toHaveLength(lost.length === 0 ? 1 : 0)
        const cleaner = await TestWorker.enlist(store, 600_000)
        expect(await cleaner.drain()).toHaveLength(lost.length === 0 ? 0 : 2)
      }
    })

    it('does not deadlock with its own recovery while it accepts', async () => {
      const { store, session, sql, advance } = opened()
      await store.registerGate('g', 10, 5)
      await queue(store, [item('a', { gate: 'g', maxAttempts: 1 })])
      const zombie = await doomed()
      await zombie.claim()
      await advance(leaseMs + 1)
      // The accepting transaction stops where it holds the gate that recovery would need.
      await sql(`CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock_shared(4711); RETURN NEW; END $$`)
      await sql('CREATE TRIGGER hold BEFORE UPDATE ON gates FOR EACH ROW EXECUTE FUNCTION hold()')
      const holder = await session()
      await holder.query('SELECT pg_advisory_lock(4711)')
      const accepted = zombie.accept([item('b', { gate: 'g', execute: true })])
      await untilBlocked(opened(), 1)
      // It has its own row first, so that recovery passes it by instead of waiting in a circle.
      expect(await store.recover()).toBeNull()
      await holder.query('SELECT pg_advisory_unlock(4711)')
      expect(await accepted).toMatchObject([{ verdict: 'execute' }])
      await advance(leaseMs + 1)
      await store.recover()
    })
  })
}
