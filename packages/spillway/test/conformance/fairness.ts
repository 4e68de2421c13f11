import { randomUUID } from 'node:crypto'
import { describe, expect, it } from 'vitest'
import { FairClock } from '../../src/accept/fair-clock.js'
import type { AcceptItem } from '../../src/store/port.js'
import { contextOf, item, items, type OpenedStore, queue, settlement, settlementsOf, TestWorker } from './harness.js'

export function fairness(opened: () => OpenedStore): void {
  /** Accepts as the pipeline does, with stamps of its own clock. */
  const bring = async (clock: FairClock, list: AcceptItem[]): Promise<void> => {
    clock.stamp(list)
    const accepted = await opened().store.accept(list, contextOf(randomUUID()))
    for (const [n, a] of accepted.entries()) {
      const brought = list[n]
      if (brought !== undefined && 'stamp' in a) clock.learn(brought, a.stamp)
    }
  }

  describe('fairness', () => {
    it('lets ten operations pass a hundred thousand of another identity', { timeout: 120_000 }, async () => {
      const { store, sql } = opened()
      const [floods, trickles] = [new FairClock(), new FairClock()]
      for (let n = 0; n < 100; n++) {
        await bring(
          floods,
          Array.from({ length: 1_000 }, (_, lane) => item(`flood ${lane}`, { identity: 'flood' })),
        )
      }
      // What vacuum would know by then; the suite is faster than it.
      await sql('ANALYZE ops')
      const worker = await TestWorker.enlist(store, 600_000)
      const slice = { lanes: 8, budget: 64, each: 8 }
      await worker.complete(await worker.claim(slice))
      await bring(
        trickles,
        Array.from({ length: 10 }, (_, lane) => item(`trickle ${lane}`, { identity: 'trickle' })),
      )
      let claims = 0
      let seen = 0
      let settlements: ReturnType<typeof settlementsOf> = []
      while (seen < 10) {
        const { claimed } = await store.step(worker.id, 0, settlements, { ...slice, turn: 1 })
        expect(claimed.length).toBeGreaterThan(0)
        claims++
        seen += claimed.filter((op) => op.identity === 'trickle').length
        settlements = settlementsOf(claimed, () => 'completed')
        expect(claims, 'claims until the ten are through').toBeLessThan(20)
      }
      await worker.settle(settlements)
    })

    it('serves two identities that both have more than enough in turn', async () => {
      const { store } = opened()
      const clock = new FairClock()
      await bring(
        clock,
        Array.from({ length: 200 }, (_, n) => item(`a ${n}`, { identity: 'a' })),
      )
      await bring(
        clock,
        Array.from({ length: 200 }, (_, n) => item(`b ${n}`, { identity: 'b' })),
      )
      const worker = await TestWorker.enlist(store)
      const claimed = await worker.claim({ lanes: 100, each: 1 })
      const ofA = claimed.filter((op) => op.identity === 'a').length
      expect(ofA).toBeGreaterThanOrEqual(45)
      expect(ofA).toBeLessThanOrEqual(55)
    })

    it('forgets nothing of it over a pause', async () => {
      const { store } = opened()
      const clock = new FairClock()
      const worker = await TestWorker.enlist(store, 600_000)
      await store.pause('q', null)
      await bring(
        clock,
        Array.from({ length: 300 }, (_, n) => item(`hog ${n}`, { identity: 'hog' })),
      )
      // Claimed and given back, as a worker does with what is paused.
      await worker.settle((await worker.claim({ lanes: 300, each: 1 })).map((op) => settlement(op, {})))
      await bring(
        clock,
        Array.from({ length: 5 }, (_, n) => item(`small ${n}`, { identity: 'small' })),
      )
      await store.resume('q', null)
      const first = await worker.claim({ lanes: 20, each: 1 })
      expect(first.filter((op) => op.identity === 'small')).toHaveLength(5)
    })

    it('is strict among priorities, and a turn lets the lower ones through', async () => {
      const { store } = opened()
      const levels = [8, 1, 5, 10, 3]
      await queue(
        store,
        levels.flatMap((priority) => items(`level ${priority}`, 2, { priority })),
      )
      const worker = await TestWorker.enlist(store)
      const next = async (turn: number): Promise<number | undefined> => {
        const claimed = await worker.claim({ lanes: 1, each: 1, turn })
        await worker.complete(claimed)
        return claimed[0]?.priority
      }
      expect(await next(1)).toBe(1)
      expect(await next(1)).toBe(1)
      expect(await next(6)).toBe(8)
      expect(await next(9)).toBe(10)
      expect(await next(1)).toBe(3)
      // Nothing from that level on: better than nothing at all.
      expect(await next(10)).toBe(10)
      expect(await next(10)).toBe(3)
      expect(await worker.drain()).toHaveLength(3)
    })

    it('starves no level while a higher one is never empty', async () => {
      const { store } = opened()
      const [low] = await queue(store, [item('low', { priority: 10 })])
      const worker = await TestWorker.enlist(store)
      const served: string[] = []
      for (let claim = 1; claim <= 20 && !served.includes(low ?? ''); claim++) {
        await queue(store, items(`high ${claim}`, 3, { priority: 1 }))
        const claimed = await worker.claim({ lanes: 1, turn: claim % 8 === 0 ? 10 : 1 })
        await worker.complete(claimed)
        served.push(...claimed.map((op) => op.id))
      }
      expect(served).toContain(low)
    })
  })
}
