import { randomUUID } from 'node:crypto'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { type Answer, FailOperation } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

const body = Type.Object({ lane: Type.String(), do: Type.Optional(Type.String()) })
const lane = (order: { lane: string }) => ['q', order.lane] as const

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const idOf = (answer: Answer): string => {
  if (!('operationId' in answer)) throw new Error(`expected an operation, not ${JSON.stringify(answer)}`)
  return answer.operationId
}

/** Nobody works: what is queued stays where it is. */
async function queued(intake: Intake, lanes: readonly string[]): Promise<string[]> {
  const op = intake.define('op', { body, lane, run: () => 1 })
  const ids: string[] = []
  for (const name of lanes) ids.push(idOf(await intake.submit(op, { lane: name }, { respondAsync: true })))
  return ids
}

describe('status', () => {
  it('reports the status of each operation, in the order asked', async () => {
    const open = signal()
    const intake = await b.intake()
    const op = intake.define('op', {
      body,
      lane,
      maxRetries: 0,
      run: async (order) => {
        if (order.do === 'fail') throw new FailOperation('no good')
        if (order.do === 'wait') await open.promise
        return 1
      },
    })
    const done = idOf(await intake.submit(op, { lane: 'a' }))
    const failed = idOf(await intake.submit(op, { lane: 'b', do: 'fail' }))
    const running = idOf(await intake.submit(op, { lane: 'c', do: 'wait' }, { waitMs: 0 }))
    const waiting = idOf(await intake.submit(op, { lane: 'c' }, { waitMs: 0 }))
    const cancelled = idOf(await intake.submit(op, { lane: 'c' }, { waitMs: 0 }))
    expect(await intake.cancel(cancelled, 'nobody wants it')).toBe('cancelled')
    const unknown = randomUUID()
    const reports = await intake.tickets.statusOf([
      unknown,
      done,
      failed,
      running,
      waiting,
      cancelled,
      'no id',
      done.toUpperCase(),
    ])
    expect(reports).toEqual([
      { id: unknown, status: 'unknown', position: null, waitMs: null, error: null },
      { id: done, status: 'completed', position: null, waitMs: null, error: null },
      { id: failed, status: 'failed', position: null, waitMs: null, error: expect.stringContaining('no good') },
      { id: running, status: 'processing', position: null, waitMs: null, error: null },
      { id: waiting, status: 'pending', position: 0, waitMs: expect.any(Number), error: null },
      { id: cancelled, status: 'cancelled', position: null, waitMs: null, error: 'nobody wants it' },
      { id: 'no id', status: 'unknown', position: null, waitMs: null, error: null },
      { id: done.toUpperCase(), status: 'completed', position: null, waitMs: null, error: null },
    ])
    open.fire()
  })

  it('reports the positions in their lanes, without cancelled ones', async () => {
    const intake = await b.intake({ role: 'direct' })
    const ids = await queued(intake, ['a', 'a', 'b', 'a', 'a', 'b'])
    await intake.cancel(ids[1] ?? '', 'cancelled')
    const places = (await intake.tickets.statusOf(ids)).map(({ position }) => position)
    expect(places).toEqual([0, null, 0, 1, 2, 1])
    for (const [i, id] of ids.entries()) expect((await b.ticket(id)).position).toBe(places[i])
  })

  it('asks the store once for two thousand', async () => {
    const asked: number[] = []
    const intake = await b.intake({
      role: 'direct',
      wrap: (store) =>
        overriding(store, {
          statusOf: (ids) => {
            asked.push(ids.length)
            return store.statusOf(ids)
          },
        }),
    })
    const [id = ''] = await queued(intake, ['a'])
    const many = Array.from({ length: 1_999 }, () => randomUUID())
    expect((await intake.tickets.statusOf([...many, id])).at(-1)).toMatchObject({ id, status: 'pending', position: 0 })
    expect(asked).toEqual([2_000])
    expect(await intake.tickets.statusOf([...many, id, randomUUID()])).toHaveLength(2_001)
    expect(asked).toEqual([2_000, 2_000, 1])
  })

  it('estimates the wait by the pace of the lane', async () => {
    const intake = await b.intake({ role: 'direct' })
    const ids = await queued(intake, ['a', 'a', 'a'])
    await b.sql('UPDATE spillway.lanes SET pace_ms = 2000')
    expect((await intake.tickets.statusOf(ids)).map(({ waitMs }) => waitMs)).toEqual([2_000, 4_000, 6_000])
  })
})

describe('lane depths', () => {
  it('count the unfinished operations of each, in the order asked', async () => {
    const intake = await b.intake({ role: 'direct' })
    await queued(intake, ['a', 'a', 'b', 'a'])
    const lanes = [
      ['q', 'b'],
      ['q', 'none'],
      ['q', 'a'],
      ['q', 'b'],
    ] as const
    expect(await intake.lanes.depths(lanes)).toEqual([1, 0, 3, 1])
  })
})

describe('cancel', () => {
  it('takes one that waits out of its lane', async () => {
    const intake = await b.intake({ role: 'direct' })
    const [first = '', second = ''] = await queued(intake, ['a', 'a'])
    expect(await intake.cancel(first, 'the client left')).toBe('cancelled')
    expect(await b.ticket(first)).toMatchObject({ status: 'cancelled', error: 'the client left' })
    expect((await b.ticket(second)).position).toBe(0)
    expect(await b.audit()).toEqual([])
  })

  it.each(['here', 'elsewhere'])('asks one that runs %s, and can stop, to stop', async (where) => {
    const [worker, other] = [await b.intake(), await b.intake({ role: 'direct' })]
    const started = signal()
    const run = async (_: unknown, { signal: stop }: { signal: AbortSignal }) => {
      started.fire()
      await new Promise((_, reject) => stop.addEventListener('abort', () => reject(stop.reason)))
    }
    const definition = { body, lane, abortable: true, run }
    const op = worker.define('op', definition)
    other.define('op', definition)
    const id = idOf(await worker.submit(op, { lane: 'a' }, { waitMs: 0 }))
    await started.promise
    expect(await (where === 'here' ? worker : other).cancel(id, 'enough')).toBe('asked')
    expect(await b.finished(id)).toMatchObject({ status: 'cancelled' })
  })

  it('wakes its waiters', async () => {
    const intake = await b.intake({ role: 'direct' })
    const [id = ''] = await queued(intake, ['a'])
    const waited = intake.waiters.wait(id, 20_000)
    await intake.cancel(id, 'cancelled')
    expect(await waited).toMatchObject({ status: 'cancelled' })
  })

  it('leaves one that runs and cannot stop', async () => {
    const open = signal()
    const intake = await b.intake()
    const op = intake.define('op', { body, lane, run: () => open.promise })
    const id = idOf(await intake.submit(op, { lane: 'a' }, { waitMs: 0 }))
    expect(await intake.cancel(id, 'enough')).toBe('running')
    open.fire()
    expect(await b.finished(id)).toMatchObject({ status: 'completed' })
  })

  it.each([randomUUID(), 'no id'])('finds nothing to cancel under %s', async (id) => {
    expect(await (await b.intake()).cancel(id, 'enough')).toBe('gone')
  })
})

describe('the id of an instance', () => {
  it('is that under which it is enlisted, and another one after its lease was lost', async () => {
    const intake = await b.intake()
    const first = intake.instance
    expect(await b.sql('SELECT id FROM spillway.workers')).toEqual([{ id: first }])
    await b.sql('SELECT spillway.worker_forget($1)', [first])
    const [enlisted] = await eventually(async () => {
      const rows = await b.sql('SELECT id FROM spillway.workers')
      return rows.length > 0 ? rows : undefined
    }, 'it to be enlisted again')
    expect(enlisted).toEqual({ id: intake.instance })
    expect(intake.instance).not.toBe(first)
  })
})
