import { describe, expect, it } from 'vitest'
import type { Claimed, Settlement } from '../../src/store/port.js'
import { item, items, leaving, must, type OpenedStore, queue, settlement, TestWorker, untilBlocked } from './harness.js'

const label = 'work one'
const plain = { types: ['work'] }
const labelled = { types: ['work', label] }

/** A process that announced the label. */
async function announcer({ store }: Pick<OpenedStore, 'store'>, leaseMs = 15_000): Promise<TestWorker> {
  const worker = await TestWorker.enlist(store, leaseMs)
  await store.retire(worker.id)
  await store.enlist(worker.id, 'a test', leaseMs, { [label]: 'what it may' })
  return worker
}

const leave = (op: Claimed, more: Partial<Settlement> = {}): Settlement =>
  settlement(op, { leaveTo: label, retry: { delayMs: 60_000, error: null }, ...more })

export function leavingToOthers(opened: () => OpenedStore): void {
  describe('leaving operations to others', () => {
    it('reports what live processes announced', async () => {
      const { store, advance } = opened()
      expect((await store.announced()).by).toEqual({})
      await announcer({ store }, 5_000)
      expect((await store.announced()).by).toEqual({ [label]: 'what it may' })
      await advance(6_000)
      expect((await store.announced()).by).toEqual({})
    })

    it('hands them to processes that announced the label, at once, in order, without an attempt', async () => {
      const { store } = opened()
      const ids = await queue(store, items('a', 3))
      const [own, other] = [await TestWorker.enlist(store), await announcer({ store })]
      const [first, second] = await own.claim(plain)
      const settled = leave(must(first), { leaving: [leaving(must(first))] })
      expect(second?.id).toBe(ids[1])
      expect(await own.settle([settled])).toEqual([])
      expect(await own.claim(plain)).toEqual([])
      const claimed = await other.claim(labelled)
      expect(claimed.map(({ id, type, attempts, due }) => [id, type, attempts, due])).toEqual([
        [ids[1], 'work', 0, true],
        [ids[2], 'work', 0, true],
      ])
      await other.settle([settlement(must(claimed[0]), { leaving: [leaving(must(claimed[0]))] })])
      // What comes behind it was not left to anybody.
      expect((await own.claim(plain)).map(({ id }) => id)).toEqual([ids[2]])
    })

    it('waits as asked when no process announced the label', async () => {
      const { store, advance } = opened()
      const [id] = await queue(store, items('a', 1))
      const own = await TestWorker.enlist(store, 3_600_000)
      await own.settle([leave(must(await own.claimOne()))])
      expect(await own.claim(plain)).toEqual([])
      await advance(60_001)
      expect((await own.claim(plain)).map((op) => [op.id, op.attempts])).toEqual([[id, 0]])
    })

    it('settles lanes that are left beside others', async () => {
      const { store } = opened()
      await queue(store, [item('a'), item('b'), item('c')])
      const [own, other] = [await TestWorker.enlist(store), await announcer({ store })]
      const claimed = await own.claim(plain)
      await own.settle(
        claimed.map((op) =>
          op.partition === 'b'
            ? leave(op)
            : settlement(
                op,
                op.partition === 'a' ? { leaving: [leaving(op)] } : { retry: { delayMs: 0, error: 'no' } },
              ),
        ),
      )
      expect((await other.claim({ types: [label] })).map(({ partition }) => partition)).toEqual(['b'])
      expect((await own.claim(plain)).map(({ partition, attempts }) => [partition, attempts])).toEqual([['c', 1]])
    })

    it('is for all again when the last one who announced it is gone', async () => {
      const { store, advance } = opened()
      const [id] = await queue(store, items('a', 1))
      const own = await TestWorker.enlist(store, 3_600_000)
      const [one, two] = [await announcer({ store }, 3_600_000), await announcer({ store }, 5_000)]
      await own.settle([leave(must(await own.claimOne()))])
      await store.retire(one.id)
      expect(await own.claim(plain)).toEqual([])
      await advance(6_000)
      expect(await own.claim(plain)).toEqual([])
      expect((await store.recover())?.worker).toBe(two.id)
      expect((await own.claim(plain)).map((op) => op.id)).toEqual([id])
    })

    it('leaves no label behind when the process goes while it is set', async () => {
      const { store, session, another } = opened()
      await queue(store, [item('a'), item('b')])
      const [own, other] = [await TestWorker.enlist(store), await announcer({ store })]
      const [a, b] = await own.claim(plain)
      // It is going: the settlement waits, and finds nobody.
      const client = await session()
      await client.query('BEGIN')
      await client.query('SELECT retire($1)', [other.id])
      const settled = own.settle([leave(must(a))])
      await untilBlocked(opened())
      await client.query('COMMIT')
      expect(await settled).toEqual([])
      expect(await store.audit()).toEqual([])
      // It is set: going waits for that, and takes it off.
      const again = await announcer({ store })
      const tx = await store.begin(10_000)
      expect(await store.settleWithin(tx, own.id, leave(must(b)))).toBe(true)
      const gone = another().retire(again.id)
      await untilBlocked(opened())
      await tx.commit()
      await gone
      expect((await own.claim(plain)).map(({ id }) => id)).toEqual([b?.id])
    })

    it('is held back with its type, and cancelled like any other', async () => {
      const { store } = opened()
      const [id = ''] = await queue(store, items('a', 1))
      const [own, other] = [await TestWorker.enlist(store), await announcer({ store })]
      await own.settle([leave(must(await own.claimOne()))])
      await store.pause('', 'work')
      const [held] = await other.claim(labelled)
      expect(held?.due).toBe(false)
      await other.settle([settlement(must(held), {})])
      await store.resume('', 'work')
      await own.settle([leave(must(await own.claimOne()))])
      expect(await store.cancel(id, [], 'not wanted')).toBe('cancelled')
      expect(await other.claim(labelled)).toEqual([])
    })
  })
}
