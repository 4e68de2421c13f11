import { randomUUID } from 'node:crypto'
import { describe, expect, it } from 'vitest'
import { newOperationId } from '../../src/core/ids.js'
import { contextOf, item, leaving, must, nobody, type OpenedStore, settlement, TestWorker } from './harness.js'

const lastsMs = 4_000

/** A lane of its own, for some with a key: few may run, and how many changes. */
function parallel(key: number) {
  const id = newOperationId()
  const turns = key === 0 ? null : { key: `00000000-0000-4000-8000-00000000000${key}`, most: key + (Date.now() & 1) }
  return { id, lane: id, turns }
}

const lanes = 12

export function storm(opened: () => OpenedStore): void {
  describe('everything at once', () => {
    it('deadlocks nowhere, loses nothing and leaves the books right', { timeout: 60_000 }, async () => {
      const { store, another, sql } = opened()
      await store.registerGate('g', 300, 250)
      const random = (below: number): number => Math.floor(Math.random() * below)
      const until = Date.now() + lastsMs
      const ids: string[] = []
      const finished = new Set<string>()
      const twice: string[] = []
      const forLong = async (run: () => Promise<void>): Promise<void> => {
        while (Date.now() < until) await run()
      }
      const end = (id: string): void => {
        if (finished.has(id)) twice.push(id)
        finished.add(id)
      }
      const accepting = Array.from({ length: 4 }, async (_, n) => {
        const s = n < 2 ? store : another()
        const worker = randomUUID()
        await forLong(async () => {
          const list = Array.from({ length: 1 + random(12) }, () =>
            item(`${random(lanes)}`, {
              priority: 1 + random(3),
              type: `type-${random(3)}`,
              ...(random(3) === 0 && { gate: 'g' }),
              ...(random(4) === 0 && { key: `k${random(500)}${randomUUID().slice(0, 2)}` }),
              ...(random(6) === 0 && { delayMs: random(50) }),
              ...(random(3) === 0 && parallel(random(4))),
              ...(random(4) === 0 && {
                rates: [{ key: '00000000-0000-4000-8000-000000000001', limit: 100_000, windowSeconds: 3_600 }],
              }),
            }),
          )
          const keys = new Set<string>()
          const single = list.filter(({ idempotency: k }) => k === null || (!keys.has(k.key) && keys.add(k.key)))
          const accepted = await s.accept(single, contextOf(worker))
          for (const [i, a] of accepted.entries()) if (a.verdict === 'queue') ids.push(must(single[i]).id)
        })
      })
      const stepping = Array.from({ length: 2 }, async () => {
        const worker = await TestWorker.enlist(another())
        await forLong(async () => {
          const claimed = await worker.claim({ lanes: 1 + random(4), each: 1 + random(5), turn: 1 + random(3) })
          const byLane = [...new Set(claimed.map((op) => op.lane))].map((lane) =>
            claimed.filter((op) => op.lane === lane),
          )
          await worker.settle(
            byLane.map((ops) => {
              const first = must(ops[0])
              const stop = ops.findIndex((op) => !op.due || random(6) === 0)
              const done = stop < 0 ? ops : ops.slice(0, stop)
              const stuck = stop < 0 ? undefined : ops[stop]
              for (const op of done) end(op.id)
              return settlement(first, {
                leaving: done.map((op) => {
                  if (random(8) > 0) return leaving(op)
                  finished.delete(op.id)
                  return leaving(op, { status: 'failed', error: 'storm' })
                }),
                retry:
                  stuck?.due === true && random(2) === 0
                    ? { delayMs: random(20), error: random(2) === 0 ? 'again' : null }
                    : null,
              })
            }),
          )
          if (random(10) === 0) await worker.store.pulse(worker.id, 15_000, {})
          if (random(10) > 0) return
          // A claim whose answer is lost, and what its process leaves when it stops.
          const other = await TestWorker.enlist(worker.store)
          await other.claim({ lanes: 1 + random(4), each: 1 + random(5) })
          await other.store.retire(other.id)
        })
      })
      const operating = [
        forLong(async () => {
          const id = ids[random(ids.length)]
          if (id === undefined) return void (await store.ping())
          if ((await store.cancel(id, [], 'storm')) === 'cancelled') end(id)
        }),
        forLong(async () => {
          const dead = await store.deadLetterIds({}, 20, null)
          await store.redrive(dead.sort(() => Math.random() - 0.5))
        }),
        forLong(async () => {
          await store.pause('q', random(2) === 0 ? null : `${random(lanes)}`)
          await store.resume('q', null)
        }),
      ]
      const outcomes = await Promise.allSettled([...accepting, ...stepping, ...operating])
      const faults = outcomes.flatMap((o) =>
        o.status === 'rejected' ? [`${o.reason.code}: ${o.reason.cause ?? o.reason}`] : [],
      )
      expect(faults).toEqual([])
      expect(twice).toEqual([])
      expect(ids.length).toBeGreaterThan(50)
      expect(await store.audit()).toEqual([])
      // All that was accepted is finished, dead or still there.
      const rows = await sql<{ id: string; ended: boolean }>(
        `SELECT i.id, h.id IS NOT NULL AS ended FROM unnest($1::uuid[]) i(id) LEFT JOIN history h ON h.id = i.id
         WHERE h.id IS NOT NULL OR EXISTS (SELECT FROM ops o WHERE o.id = i.id) OR EXISTS (SELECT FROM dead_letters d WHERE d.id = i.id)`,
        [ids],
      )
      expect(rows).toHaveLength(ids.length)
      expect(rows.flatMap((r) => (r.ended ? [r.id] : [])).sort()).toEqual([...finished].sort())
      expect(await store.accept([], contextOf(nobody))).toEqual([])
    })
  })
}
