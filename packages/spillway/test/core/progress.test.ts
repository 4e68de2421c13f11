/** `ctx.progress`: what a handler says is seen by readers of its ticket, on any instance, and written at most twice a second. */
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { operationView } from '../../src/http/operation-view.js'
import type { Answer } from '../../src/index.js'
import { bindings, eventsOf, json, neverBusy, serve } from '../bindings-fixture.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const idOf = (answer: Answer): string => (answer.kind === 'refused' ? '' : answer.operationId)
const rows = () => b.sql<{ id: string; value: number }>('SELECT id, value FROM spillway.progress')
const none = () => eventually(async () => (await rows()).length === 0 || undefined, 'the progress to be gone')

describe('progress', () => {
  it('is seen elsewhere while the attempt runs, and gone with it', async () => {
    const intake = await b.intake()
    const other = await b.intake()
    const gate = signal()
    const op = intake.define('op', {
      run: async (_, ctx) => {
        ctx.progress(0.4, 'resized')
        await gate.promise
        return 'done'
      },
    })
    const id = idOf(await intake.submit(op, 1, { waitMs: 0 }))
    const seen = await eventually(async () => (await other.tickets.get(id))?.progress, 'the progress')
    expect(seen).toEqual({ value: 0.4, note: 'resized', at: expect.any(Date) })
    expect(operationView(await b.ticket(id)).progress).toEqual({ ...seen, at: seen.at.toISOString() })
    gate.fire()
    expect(await b.finished(id)).not.toHaveProperty('progress')
    await none()
  })

  it('of an attempt that failed is not that of the next one', async () => {
    const intake = await b.intake()
    const again = signal()
    const op = intake.define('op', {
      run: async (_, ctx) => {
        if (ctx.attempt === 2) return again.promise
        ctx.progress(0.9)
        await eventually(async () => (await rows()).length > 0 || undefined, 'it to be written')
        throw new Error('no')
      },
    })
    const id = idOf(await intake.submit(op, 1, { waitMs: 0 }))
    await eventually(async () => {
      const ticket = await b.ticket(id)
      expect(ticket.attempts === 0 || ticket.progress === undefined).toBe(true)
      return (ticket.status === 'processing' && ticket.attempts === 1) || undefined
    }, 'the second attempt')
    again.fire()
    await b.finished(id)
    await none()
  })

  it('is written at most twice a second, for all operations together, the last of each', async () => {
    const writes: { at: number; said: number }[] = []
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          keepProgress: (said, ended) => {
            writes.push({ at: performance.now(), said: said.length })
            return store.keepProgress(said, ended)
          },
        }),
    })
    const gate = signal()
    const op = intake.define('op', {
      run: async (_, ctx) => {
        for (let n = 0; n <= 1_000; n++) ctx.progress(n / 1_000)
        await gate.promise
      },
    })
    const ids = (await Promise.all(Array.from({ length: 10 }, () => intake.submit(op, 1, { waitMs: 0 })))).map(idOf)
    await eventually(async () => {
      const found = await Promise.all(ids.map((id) => b.ticket(id)))
      return found.every(({ progress }) => progress?.value === 1) || undefined
    }, 'all to be at their end')
    gate.fire()
    await Promise.all(ids.map((id) => b.finished(id)))
    await none()
    const pauses = writes.slice(1).map(({ at }, i) => at - (writes[i]?.at ?? 0))
    for (const pause of pauses) expect(pause).toBeGreaterThan(490)
    expect(Math.max(...writes.map(({ said }) => said))).toBeGreaterThan(1)
  })

  it('is not lost when a write fails', async () => {
    let fails = 2
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          keepProgress: (said, ended) =>
            fails-- > 0 ? Promise.reject(new Error('away')) : store.keepProgress(said, ended),
        }),
    })
    const gate = signal()
    const op = intake.define('op', {
      run: async (_, ctx) => {
        ctx.progress(0.5)
        await gate.promise
      },
    })
    const id = idOf(await intake.submit(op, 1, { waitMs: 0 }))
    await eventually(async () => (await b.ticket(id)).progress, 'the progress')
    gate.fire()
    await b.finished(id)
    await none()
  })

  it('costs no write where it is not used', async () => {
    let writes = 0
    const intake = await b.intake({
      wrap: (store) => overriding(store, { keepProgress: async () => void writes++ }),
    })
    const op = intake.define('op', { run: () => 1 })
    for (let n = 0; n < 5; n++) await intake.submit(op, n)
    await intake.close()
    expect(writes).toBe(0)
  })

  it('of a process that died goes with the sweep; that of a running operation stays', async () => {
    const intake = await b.intake()
    const gate = signal()
    const op = intake.define('op', { run: () => gate.promise })
    const id = idOf(await intake.submit(op, 1, { waitMs: 0 }))
    await b.sql(
      `INSERT INTO spillway.progress SELECT x, 1, 0.5, NULL, now(), '-infinity'
      FROM unnest(ARRAY[$1, gen_random_uuid()]::uuid[]) x`,
      [id],
    )
    expect(await intake.store.sweepNotes()).toEqual({ failures: 0, progress: 1, isFull: false })
    expect(await rows()).toEqual([{ id, value: 0.5 }])
    gate.fire()
  })

  it.each<[number, string | undefined, string]>([
    [1.5, undefined, 'progress: the value must be a number from 0 to 1; given: 1.5'],
    [Number.NaN, undefined, 'progress: the value must be a number from 0 to 1; given: NaN'],
    [0.5, 'x'.repeat(201), 'progress: the note must be a text of at most 200 characters'],
    [0.5, 7 as never, 'progress: the note must be a text of at most 200 characters; given: 7'],
  ])('does not take %s, %s', async (value, note, message) => {
    const intake = await b.intake()
    const op = intake.define('op', { maxRetries: 0, run: (_, ctx) => ctx.progress(value, note) })
    expect(await intake.submit(op, 1)).toMatchObject({ kind: 'failed', error: expect.stringContaining(message) })
  })

  it('comes with the events of the ticket', async () => {
    const intake = await b.intake(neverBusy)
    const gate = signal()
    const order = intake.define('op', {
      run: async (_, ctx) => {
        ctx.progress(0.25, 'begun')
        await gate.promise
      },
    })
    const [binding] = bindings
    if (binding === undefined) throw new Error('no binding')
    const api = await serve(binding, { intake, order })
    const { operationId } = (await (await api.call('/orders', json(1, { prefer: 'respond-async' }))).json()) as {
      operationId: string
    }
    const seen: unknown[] = []
    for await (const { data } of eventsOf(await api.call(`/api/v1/operations/${operationId}/stream`))) {
      seen.push(data.status === 'processing' ? (data.progress ?? 'running') : data.status)
      if (data.progress !== undefined) gate.fire()
    }
    expect(seen).toContainEqual({ value: 0.25, note: 'begun', at: expect.any(String) })
    expect(seen.at(-1)).toBe('completed')
    api.close()
  })
})
