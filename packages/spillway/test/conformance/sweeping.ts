import { randomUUID } from 'node:crypto'
import { describe, expect, it } from 'vitest'
import type { SweptRows } from '../../src/store/port.js'
import { contextOf, item, items, leaving, must, type OpenedStore, queue, settlement, TestWorker } from './harness.js'

const hour = 3_600_000

export function sweeping(opened: () => OpenedStore): void {
  describe('sweeping', () => {
    it('makes partitions ahead and drops those that are past their time', async () => {
      const { store, advance, sql } = opened()
      expect(await store.sweep(hour)).toMatchObject({ partitions_dropped: 0 })
      expect((await sql('SELECT FROM history_spans')).length).toBeGreaterThan(0)
      const worker = await TestWorker.enlist(store, 1_000 * hour)
      const ids: string[] = []
      for (let round = 0; round < 6; round++) {
        ids.push(...(await queue(store, [item('a')])))
        await worker.drain()
        await advance(hour / 4)
        await store.sweep(hour)
      }
      // Nothing is older than an hour and a half; nothing younger than an hour may be gone.
      const found = await Promise.all(ids.map((id) => store.ticket(id)))
      expect(found.slice(2).every((t) => t?.status === 'completed')).toBe(true)
      await advance(2 * hour)
      expect((await store.sweep(hour)).partitions_dropped).toBeGreaterThan(0)
      expect(await store.finished(ids)).toEqual([])
      const spans = await sql<{ n: number; from: Date; to: Date }>(
        'SELECT from_at AS "from", to_at AS "to" FROM history_spans ORDER BY from_at',
      )
      for (const [n, span] of spans.entries())
        if (n > 0) expect(+span.from).toBeGreaterThanOrEqual(+must(spans[n - 1]).to)
    })

    it('continues while operations are settled', async () => {
      const { store, another, advance } = opened()
      const worker = await TestWorker.enlist(store, 1_000 * hour)
      const other = another()
      let sweeping = true
      let settled = 0
      const settle = async (): Promise<void> => {
        while (sweeping) {
          await queue(store, items('a', 5))
          settled += (await worker.drain()).length
        }
      }
      const work = settle()
      const swept: SweptRows[] = []
      try {
        for (let round = 0; round < 25; round++) {
          swept.push(await other.sweep(hour))
          await advance(hour / 7)
        }
      } finally {
        sweeping = false
        await work
      }
      expect(settled).toBeGreaterThan(0)
      expect(swept.some((s) => s.partitions_dropped > 0)).toBe(true)
    })

    it('removes expired keys, rates and empty lanes, and never unfinished operations', async () => {
      const { store, advance, sql } = opened()
      const worker = await TestWorker.enlist(store, 1_000 * hour)
      const rates = [{ key: randomUUID(), limit: 5, windowSeconds: 3_600 }]
      await queue(store, [item('done', { key: 'k', rates })])
      await worker.drain()
      const [ready, delayed, leased, dead] = await queue(store, [
        item('ready'),
        item('delayed', { delayMs: 1_000 * hour }),
        item('leased', { priority: 1 }),
        item('dead', { priority: 2 }),
      ])
      const claimed = await worker.claim({ lanes: 2 })
      const failed = must(claimed.find((op) => op.id === dead))
      await worker.settle([settlement(failed, { leaving: [leaving(failed, { status: 'failed', error: 'no' })] })])
      expect(await store.sweep(hour)).toMatchObject({ keys: 0, rate_rows: 0, lanes: 0 })
      await advance(100 * hour)
      // Only the lane of what was done goes: the others have operations, or a dead letter that may come back in order.
      expect(await store.sweep(hour)).toMatchObject({ keys: 1, rate_rows: 1, lanes: 1 })
      for (const id of [ready, delayed, leased])
        expect(await store.ticket(must(id))).toMatchObject({ status: 'pending' })
      expect(await store.ticket(must(dead))).toMatchObject({ status: 'failed' })
      expect(await store.redrive([must(dead)])).toEqual({ moved: 1, skipped: 0 })
      expect(await sql('SELECT FROM lanes')).toHaveLength(4)
      expect(await worker.complete(claimed.filter((op) => op.id === leased))).toEqual([])
      expect((await worker.drain()).sort()).toEqual([must(ready), must(dead)].sort())
    })

    it('keeps the counters small', async () => {
      const { store, sql } = opened()
      const worker = await TestWorker.enlist(store)
      for (let round = 0; round < 50; round++) {
        const tx = await store.begin(30_000)
        await store.acceptWithin(tx, [item('a')], contextOf(worker.id))
        await tx.commit()
        const op = must((await worker.claim())[0])
        const done = await store.begin(30_000)
        await store.settleWithin(done, worker.id, settlement(op, { leaving: [leaving(op)] }))
        await done.commit()
      }
      await store.sweep(hour)
      expect((await sql('SELECT FROM tallies')).length).toBeLessThan(10)
    })

    it('leaves the work to one of several sweepers', async () => {
      const { store, another } = opened()
      const all = await Promise.all([store, another(), another()].map((s) => s.sweep(hour)))
      expect(all.filter((s) => s.partitions_made > 0)).toHaveLength(1)
    })
  })
}
