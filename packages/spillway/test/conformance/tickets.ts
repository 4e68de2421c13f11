import { describe, expect, it } from 'vitest'
import type { Ticket, TicketFilter } from '../../src/store/port.js'
import { executing, item, items, leaving, must, type OpenedStore, queue, settlement, TestWorker } from './harness.js'

const why = 'not wanted'

export function tickets(opened: () => OpenedStore): void {
  const cancel = (id: string | undefined, abortable: string[] = []) => opened().store.cancel(must(id), abortable, why)

  /** Lets everything that is ready fail for good; answers the ids in the order in which they died. */
  const failAll = async (worker: TestWorker): Promise<string[]> => {
    const claimed = await worker.claim()
    await worker.complete(claimed, { status: 'failed', error: 'broken' })
    return claimed.map((op) => op.id)
  }

  describe('cancelling', () => {
    it('removes the head of a ready lane, and the lane continues', async () => {
      const { store } = opened()
      const ids = await queue(store, items('a', 3))
      expect(await cancel(ids[0])).toBe('cancelled')
      expect(await store.audit()).toEqual([])
      expect(await store.ticket(must(ids[0]))).toMatchObject({
        status: 'cancelled',
        error: why,
        attempts: 0,
        startedAt: null,
      })
      expect(await (await TestWorker.enlist(store)).drain()).toEqual(ids.slice(1))
      expect(await cancel(ids[0])).toBe('gone')
      expect(await cancel(ids[1])).toBe('gone')
    })

    it('takes one from the middle and the last of a lane', async () => {
      const { store } = opened()
      const ids = await queue(store, items('a', 3))
      expect(await cancel(ids[1])).toBe('cancelled')
      expect(await store.ticket(must(ids[2]))).toMatchObject({ position: 1 })
      expect(await cancel(ids[2])).toBe('cancelled')
      expect(await cancel(ids[0])).toBe('cancelled')
      expect(await store.audit()).toEqual([])
      const worker = await TestWorker.enlist(store)
      expect(await worker.claim()).toEqual([])
      // The emptied lane is free again.
      expect((await worker.accept([item('a', { execute: true })]))[0]).toMatchObject({ verdict: 'execute', seq: 4 })
    })

    it('removes the delayed head of a parked lane, and due operations run at once', async () => {
      const { store } = opened()
      const list = [item('a', { delayMs: 60_000 }), item('a')]
      await queue(store, list)
      expect(await cancel(list[0]?.id)).toBe('cancelled')
      expect(await (await TestWorker.enlist(store)).drain()).toEqual([list[1]?.id])
    })

    it('takes one behind a delayed head out, and the lane stays parked', async () => {
      const { store, advance } = opened()
      const list = [item('a', { delayMs: 60_000 }), item('a')]
      await queue(store, list)
      expect(await cancel(list[1]?.id)).toBe('cancelled')
      const worker = await TestWorker.enlist(store, 600_000)
      expect(await worker.claim()).toEqual([])
      await advance(60_001)
      expect(await worker.drain()).toEqual([list[0]?.id])
    })

    it('removes operations behind a lease, but none that was handed out', async () => {
      const { store } = opened()
      const ids = await queue(store, items('a', 4))
      const worker = await TestWorker.enlist(store)
      const claimed = await worker.claim({ each: 2 })
      expect(await cancel(ids[0])).toBe('running')
      expect(await cancel(ids[1])).toBe('running')
      expect(await cancel(ids[2])).toBe('cancelled')
      expect(await store.audit()).toEqual([])
      await worker.complete(claimed)
      expect(await worker.drain()).toEqual([ids[3]])
    })

    it('can cancel an operation behind a long one, once that one is marked as started', async () => {
      const { store } = opened()
      const ids = await queue(store, items('a', 3))
      const worker = await TestWorker.enlist(store)
      const first = must((await worker.claim())[0])
      expect(await cancel(ids[1])).toBe('running')
      await store.mark(worker.id, [{ fence: first.fence, lane: first.lane, seq: first.seq, startedMsAgo: 60 }])
      expect(await store.ticket(first.id)).toMatchObject({ status: 'processing', position: null })
      expect(await cancel(ids[1])).toBe('cancelled')
      expect(await cancel(ids[2])).toBe('cancelled')
      expect(await worker.settle([settlement(first, { leaving: [leaving(first)] })])).toEqual([])
      expect(await worker.claim()).toEqual([])
    })

    it('asks a running operation to stop if it can, and reports that until it has', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      const direct = item('a', { execute: true })
      const running = executing(direct, (await worker.accept([direct]))[0])
      expect(await cancel(direct.id)).toBe('running')
      expect(await cancel(direct.id, ['other'])).toBe('running')
      expect(await cancel(direct.id, ['work'])).toBe('asked')
      expect(await cancel(direct.id, ['work'])).toBe('asked')
      expect((await store.pulse(worker.id, 15_000, {})).cancels).toEqual([direct.id])
      await worker.complete([running], { status: 'cancelled', error: why })
      expect(await store.ticket(direct.id)).toMatchObject({ status: 'cancelled' })
      expect(await cancel(direct.id, ['work'])).toBe('gone')
    })

    it('does not stop an operation that is redriven for a wish of its earlier life', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      const direct = item('a', { execute: true })
      const running = executing(direct, (await worker.accept([direct]))[0])
      expect(await cancel(direct.id, ['work'])).toBe('asked')
      await worker.complete([running], { status: 'failed', error: 'failed before it noticed' })
      await store.redrive([direct.id])
      expect((await store.pulse(worker.id, 15_000, {})).cancels).toEqual([])
    })

    it('frees the capacity, and gives the answer once', async () => {
      const { store } = opened()
      const [id] = await queue(store, [item('a', { key: 'k' })])
      expect(await Promise.all([cancel(id), cancel(id), cancel(id)]).then((all) => all.sort())).toEqual([
        'cancelled',
        'gone',
        'gone',
      ])
      expect((await store.pulse((await TestWorker.enlist(store)).id, 15_000, {})).held).toEqual({ work: 0 })
    })
  })

  describe('dead letters', () => {
    it('join the tail again in the order of their acceptance, with all attempts again', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      const first = await queue(store, [...items('a', 3), ...items('b', 2)])
      await failAll(worker)
      const later = await queue(store, [item('a')])
      expect((await store.pulse(worker.id, 15_000, {})).deadLetters).toBe(5)
      expect(await store.redrive([...first].reverse())).toEqual({ moved: 5, skipped: 0 })
      expect(await store.redrive(first)).toEqual({ moved: 0, skipped: 0 })
      const again = await worker.claim()
      const ofLane = (lane: string) => again.filter((op) => op.partition === lane).map((op) => op.id)
      expect(ofLane('a')).toEqual([...later, ...first.slice(0, 3)])
      expect(ofLane('b')).toEqual(first.slice(3))
      expect(again.every((op) => op.attempts === 0)).toBe(true)
      expect((await store.pulse(worker.id, 15_000, {})).deadLetters).toBe(0)
    })

    it('join in the order of their lane, not of their ids: clocks of processes differ', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      const [late, early] = [item('a').id, item('a').id]
      await queue(store, [item('a', { id: early })])
      await queue(store, [item('a', { id: late })])
      await failAll(worker)
      await store.redrive([early, late])
      expect((await worker.claim()).map((op) => op.id)).toEqual([early, late])
    })

    it('stay where they are while their gate is full', async () => {
      const { store } = opened()
      await store.registerGate('g', 3, 2)
      const worker = await TestWorker.enlist(store)
      const ids = await queue(store, items('a', 3, { gate: 'g' }))
      await failAll(worker)
      await queue(store, items('a', 2, { gate: 'g' }))
      expect(await store.redrive(ids)).toEqual({ moved: 1, skipped: 2 })
      expect(await store.deadLetterIds({}, 10, null)).toEqual(ids.slice(1))
    })

    it('keep their order when they are redriven a second time', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      const ids = await queue(store, items('a', 3))
      for (let round = 0; round < 2; round++) {
        await failAll(worker)
        await store.redrive(ids)
      }
      expect((await worker.claim()).map((op) => op.id)).toEqual(ids)
    })

    it('go when they are purged, and only they', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      const ids = await queue(store, items('a', 3))
      await failAll(worker)
      const [living] = await queue(store, [item('a')])
      expect(await store.purge([...ids.slice(0, 2), must(living)])).toBe(2)
      expect(await store.deadLetterIds({}, 10, null)).toEqual([ids[2]])
      expect(await store.ticket(must(ids[0]))).toBeNull()
      expect(await store.ticket(must(living))).toMatchObject({ status: 'pending' })
    })

    it('are listed by filter, a page at a time', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      const ids = await queue(store, [
        ...items('a', 3),
        ...items('b', 2, { queue: 'other', type: 'x', identity: 'me' }),
      ])
      await failAll(worker)
      const page = await store.deadLetters({}, 2, null)
      const rest = await store.deadLetters({}, 10, must(page[1]).id)
      expect([...page, ...rest].map((d) => d.id)).toEqual([...ids].reverse())
      expect(await store.deadLetterIds({ queue: 'other', type: 'x', identity: 'me' }, 10, null)).toEqual(ids.slice(3))
      expect(await store.deadLetterIds({}, 2, must(ids[1]))).toEqual(ids.slice(2, 4))
    })
  })

  describe('tickets', () => {
    it('are found while they wait, run, and after their end', async () => {
      const { store } = opened()
      const [id] = await queue(store, [item('a', { traceparent: '00-1', identity: 'me', priority: 2, maxAttempts: 4 })])
      expect(await store.ticket(must(id))).toMatchObject({
        id,
        type: 'work',
        queue: 'q',
        partition: 'a',
        priority: 2,
        identity: 'me',
        status: 'pending',
        attempts: 0,
        maxAttempts: 4,
        position: 0,
        trace: '00-1',
        finishedAt: null,
      })
      expect(await store.finished([must(id)])).toEqual([])
      await (await TestWorker.enlist(store)).drain()
      expect(await store.finished([must(id)])).toMatchObject([
        { id, status: 'completed', identity: 'me', trace: '00-1' },
      ])
      expect(await store.ticket('00000000-0000-7000-8000-000000000000')).toBeNull()
    })

    it('are listed newest first by every filter, and by the page', async () => {
      const { store, freeze } = opened()
      const worker = await TestWorker.enlist(store)
      const list = [
        item('a', { type: 'one', identity: 'x' }),
        item('b', { type: 'two', identity: 'x' }),
        item('c', { type: 'one', identity: 'y', queue: 'r' }),
        item('d', { type: 'one', identity: 'z' }),
        item('e', { type: 'one', identity: 'z', execute: true }),
      ]
      await freeze('2026-03-01T12:00:00Z')
      await worker.accept(list.slice(0, 4))
      await freeze('2026-03-01T13:00:00Z')
      const direct = must(list[4])
      await worker.accept([direct])
      const claimed = await worker.claim({ lanes: 2 })
      await worker.complete(claimed.slice(0, 1))
      await worker.settle([
        settlement(must(claimed[1]), { leaving: [leaving(must(claimed[1]), { status: 'failed', error: 'no' })] }),
      ])
      expect(await cancel(list[2]?.id)).toBe('cancelled')
      const all = new Map<string, Ticket>()
      for (let before: string | null = null; ; ) {
        const page: Ticket[] = await store.tickets({}, 2, before)
        for (const ticket of page) all.set(ticket.id, ticket)
        if (page.length < 2) break
        before = must(page[1]).id
      }
      expect([...all.keys()]).toEqual(list.map((i) => i.id).reverse())
      expect([...all.values()].map((t) => t.status).sort()).toEqual([
        'cancelled',
        'completed',
        'failed',
        'pending',
        'processing',
      ])
      const filters: [TicketFilter, (t: Ticket) => boolean][] = [
        ...(['pending', 'processing', 'completed', 'failed', 'cancelled'] as const).map(
          (status): [TicketFilter, (t: Ticket) => boolean] => [{ status }, (t) => t.status === status],
        ),
        [{ type: 'one' }, (t) => t.type === 'one'],
        [{ queue: 'r' }, (t) => t.queue === 'r'],
        [{ partition: 'b' }, (t) => t.partition === 'b'],
        [{ identity: 'x' }, (t) => t.identity === 'x'],
        [{ from: new Date('2026-03-01T13:00:00Z') }, (t) => t.id === direct.id],
        [{ to: new Date('2026-03-01T13:00:00Z') }, (t) => t.id !== direct.id],
        [{ type: 'one', identity: 'z', status: 'processing' }, (t) => t.id === direct.id],
      ]
      for (const [filter, matches] of filters) {
        const expected = [...all.values()].filter(matches).map((t) => t.id)
        expect((await store.tickets(filter, 10, null)).map((t) => t.id)).toEqual(expected)
        expect(expected.length).toBeGreaterThan(0)
      }
    })

    it('are counted by type, priority and status; finished ones for five minutes', async () => {
      const { store, advance } = opened()
      const worker = await TestWorker.enlist(store, 3_600_000)
      await queue(store, items('a', 3))
      await worker.drain()
      await queue(store, [...items('b', 2, { priority: 1 }), item('c', { type: 'other' })])
      const counts = async () => (await store.stats()).map((r) => [r.type, r.priority, r.status, r.count])
      expect(await counts()).toEqual([
        ['other', 5, 'pending', 1],
        ['work', 1, 'pending', 2],
        ['work', 5, 'completed', 3],
      ])
      await advance(300_001)
      expect(await counts()).toEqual([
        ['other', 5, 'pending', 1],
        ['work', 1, 'pending', 2],
      ])
    })

    it('are tallied as they are', async () => {
      const { store } = opened()
      const worker = await TestWorker.enlist(store)
      await queue(store, [...items('a', 5), ...items('b', 3, { type: 'other' })])
      await worker.complete(await worker.claim({ lanes: 1, each: 2 }))
      expect((await store.pulse(worker.id, 15_000, { work: 2 })).held).toEqual({ work: 3, other: 3 })
      const second = await TestWorker.enlist(store)
      const pulse = await store.pulse(second.id, 15_000, { work: 1, other: 4 })
      expect(pulse).toMatchObject({ running: { work: 3, other: 4 }, waiting: true, lostWorkers: 0 })
      await store.retire(worker.id)
      expect(await store.pulse(second.id, 15_000, {})).toMatchObject({ held: { work: 3, other: 3 }, running: {} })
    })
  })
}
