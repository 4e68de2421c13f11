/** Operations that fail for good: what their caller gets, when there is a dead letter, and what operators see of the error. */
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { Tickets } from '../../src/http/tickets.js'
import { type Answer, FailOperation } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const idOf = (answer: Answer): string => (answer.kind === 'refused' ? '' : answer.operationId)
const letters = () => b.sql<{ id: string }>('SELECT id FROM spillway.dead_letters')
const failures = () => b.sql<{ id: string; code: string | null }>('SELECT id, code FROM spillway.failures')
const declined = () => new FailOperation('card declined', { status: 402, code: 'card_declined', result: { tries: 1 } })
const asDeclined = {
  ...{ kind: 'failed', error: 'card declined', code: 'card_declined', status: 402 },
  ...{ expected: true, result: { tries: 1 } },
}

describe('FailOperation', () => {
  it('is the answer of the caller who waits, and leaves no dead letter', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { run: () => Promise.reject(declined()) })
    const seen: string[] = []
    for (const event of ['failed', 'dead'] as const) intake.on(event, () => seen.push(event))
    const answer = await intake.submit(op, 1)
    expect(answer).toMatchObject({ ...asDeclined, replayed: false })
    expect(seen).toEqual(['failed'])
    expect(await intake.tickets.retry(idOf(answer))).toMatchObject({
      outcome: 'answered',
      report: { status: 'failed' },
    })
    expect(await letters()).toEqual([])
    expect(await b.ticket(idOf(answer))).toMatchObject({ status: 'failed', attempts: 1, error: 'card declined' })
    expect(b.logged).toContainEqual(
      expect.objectContaining({ level: 'warn', message: 'operation failed for good; its caller is answered with it' }),
    )
    expect(b.logged.filter(({ level }) => level === 'error')).toEqual([])
    expect(await b.audit()).toEqual([])
  })

  it('is the answer again for its key', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { run: () => Promise.reject(declined()) })
    const first = await intake.submit(op, 1, { idempotencyKey: 'k' })
    const again = await intake.submit(op, 1, { idempotencyKey: 'k' })
    expect(again).toEqual({ ...first, replayed: true })
  })

  it('is a dead letter when nobody waits', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { run: () => Promise.reject(declined()) })
    const ids = [await intake.submit(op, 1, { waitMs: 0 }), await intake.submit(op, 1, { delay: 1 })].map(idOf)
    for (const id of ids)
      expect(await b.finished(id)).toMatchObject({ status: 'failed', said: { code: 'card_declined' } })
    expect((await letters()).map(({ id }) => id).sort()).toEqual(ids.sort())
    expect(b.logged.filter(({ level }) => level === 'error')).toHaveLength(2)
  })

  it('is the answer of a caller who waits for a queued one, here or elsewhere; then there is no dead letter', async () => {
    const gateway = await b.intake({ role: 'direct' })
    const worker = await b.intake()
    const options = { lane: () => 'one', run: () => Promise.reject(declined()) }
    const op = gateway.define('op', options)
    worker.define('op', options)
    for (const intake of [gateway, worker]) {
      expect(await intake.submit(op, 1, { respondAsync: true, waitMs: 30_000 })).toMatchObject(asDeclined)
      expect(await letters()).toEqual([])
    }
    const held = await b.sql<{ n: string }>(
      `SELECT coalesce(sum(n), 0) AS n FROM spillway.tallies WHERE type = '!dead'`,
    )
    expect(Number(held[0]?.n)).toBe(0)
    expect(await b.audit()).toEqual([])
  })

  it('is a dead letter when its caller got a ticket first', async () => {
    const intake = await b.intake({ directWaitMs: 20 })
    const gate = signal()
    const op = intake.define('op', {
      run: async () => {
        await gate.promise
        throw declined()
      },
    })
    const answer = await intake.submit(op, 1)
    expect(answer).toMatchObject({ kind: 'queued', reason: 'still_running' })
    gate.fire()
    await b.finished(idOf(answer))
    expect(await letters()).toEqual([{ id: idOf(answer) }])
  })

  it('excludes the ticket from the moment that it is settled, however long that takes', async () => {
    const release = signal()
    const intake = await b.intake({
      directWaitMs: 200,
      wrap: (store) =>
        overriding(store, {
          step: async (...all) => {
            if (all[2].some(({ leaving }) => leaving.length > 0)) await release.promise
            return store.step(...all)
          },
        }),
    })
    const op = intake.define('op', { run: () => Promise.reject(declined()) })
    const answer = intake.submit(op, 1)
    const late = new Promise((resolve) => setTimeout(resolve, 400, 'late'))
    expect(await Promise.race([answer, late])).toBe('late')
    release.fire()
    expect(await answer).toMatchObject(asDeclined)
    expect(await letters()).toEqual([])
  })

  it('keeps a dead letter if it says so', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { run: () => Promise.reject(new FailOperation('no', { deadLetter: true })) })
    for (const options of [{}, { respondAsync: true, waitMs: 30_000 }]) {
      const answer = await intake.submit(op, 1, options)
      expect(answer).toMatchObject({ kind: 'failed', error: 'no', code: 'operation_failed', status: 500 })
      expect(await letters()).toContainEqual({ id: idOf(answer) })
    }
  })

  it('gives back the capacity it held, and its lane goes on', async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      lane: () => 'one',
      run: (body) => {
        if (body === 'bad') throw declined()
        return body
      },
    })
    expect(await intake.submit(op, 'bad')).toMatchObject(asDeclined)
    expect(await intake.submit(op, 'good', { waitMs: 30_000 })).toMatchObject({ kind: 'done', result: 'good' })
    expect(await b.audit()).toEqual([])
  })

  it.each<[object, string]>([
    [{ status: 200 }, 'FailOperation: status must be a whole number from 400 to 599, but not 429 or 503'],
    [{ status: 503 }, 'those ask the caller to come back; given: 503'],
    [
      { code: 'card declined' },
      "code must be 1 to 100 letters, digits, dots, colons, dashes or underscores; given: 'card",
    ],
    [{ stauts: 402 }, 'FailOperation: unknown option "stauts"; did you mean status?'],
  ])('does not take %j', (options, message) => {
    expect(() => new FailOperation('no', options)).toThrow(message)
  })
})

describe('any other error', () => {
  it('is a dead letter once the attempts are used up, and its text is not for callers', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { maxRetries: 0, run: () => Promise.reject(new Error('no database')) })
    const answer = await intake.submit(op, 1)
    expect(answer).toMatchObject({ kind: 'failed', code: 'operation_failed', status: 500, expected: false })
    expect(await letters()).toEqual([{ id: idOf(answer) }])
  })

  it('a cancelled one says so to the caller who waits', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { run: () => 1 })
    const waiting = intake.submit(op, 1, { delay: '1h', waitMs: 30_000 })
    const [row] = await eventually(async () => {
      const rows = await b.sql<{ id: string }>('SELECT id FROM spillway.ops')
      return rows.length > 0 ? rows : undefined
    }, 'it to wait')
    await intake.tickets.cancel(row?.id ?? '')
    expect(await waiting).toMatchObject({ kind: 'failed', code: 'operation_cancelled', status: 409 })
  })
})

describe('the last error', () => {
  const seen = async (intake: Intake, id: string, roles: string[], path = '/api/v1/operations/:id') => {
    const { findTicketRoute } = await import('../../src/http/tickets.js')
    const found = findTicketRoute('GET', path.replace(':id', id))
    if (found === null || !('route' in found)) throw new Error(`no route ${path}`)
    const answer = await new Tickets(intake).answer(found.route, {
      request: {
        ...{ method: 'GET', path, headers: {}, query: new URLSearchParams(), params: {} },
        ...{ clientAddress: 'local', user: { id: 'local', roles: new Set(roles) }, traceparent: '' },
      },
      id,
      query: {},
      body: () => ({ value: undefined }) as never,
      gone: () => new AbortController().signal,
    })
    return (answer as { body: Record<string, unknown> }).body
  }

  it('has its stack for operators, and for nobody else; also while it is retried', async () => {
    const intake = await b.intake({ retryBaseMs: 60_000, retryMaxMs: 60_000 })
    function breakDown(): never {
      throw new Error('broken', { cause: new Error('the cause') })
    }
    const op = intake.define('op', { run: breakDown })
    const retried = idOf(await intake.submit(op, 1))
    const dead = idOf(await intake.submit(op, 1, { maxRetries: 0, lane: 'other' }))
    for (const id of [retried, dead]) {
      for (const role of ['operate', 'view']) {
        const { error_stack: stack } = await seen(intake, id, [role])
        expect(stack).toContain('breakDown')
        expect(stack).toContain('the cause')
      }
      const own = await seen(intake, id, ['submit'])
      expect(own).toMatchObject({ error_message: 'broken' })
      expect(own).not.toHaveProperty('error_stack')
    }
    expect(await seen(intake, dead, ['view'], '/api/v1/dead-letters/:id')).toHaveProperty('error_stack')
    expect(await seen(intake, dead, ['submit'], '/api/v1/dead-letters/:id')).not.toHaveProperty('error_stack')
  })

  it('is bounded, and gone with the next success', async () => {
    const intake = await b.intake()
    let runs = 0
    const op = intake.define('op', {
      run: () => {
        if (runs++ === 0) throw new Error('x'.repeat(100_000))
      },
    })
    const answer = await intake.submit(op, 1, { waitMs: 30_000 })
    expect(answer).toMatchObject({ kind: 'done' })
    expect(await b.ticket(idOf(answer))).not.toHaveProperty('stack')
    const [row] = await b.sql<{ n: number }>('SELECT length(stack) AS n FROM spillway.failures')
    expect(row?.n).toBeLessThanOrEqual(8_000)
  })

  it('is kept when the handler used its transaction, and for queued apply', async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      maxRetries: 0,
      run: async (_, ctx) => {
        await ctx.tx.query('SELECT 1')
        throw new Error('in a transaction')
      },
    })
    const record = intake.define('record', { maxRetries: 0, apply: () => Promise.reject(new Error('not applied')) })
    const ids = [idOf(await intake.submit(op, 1)), idOf(await intake.submit(record, 1, { respondAsync: true }))]
    for (const id of ids) expect((await b.finished(id)).stack).toContain('failures.test')
  })

  it('goes when its operation is gone, and stays with a dead letter', async () => {
    const intake = await b.intake()
    const op = intake.define('op', {
      maxRetries: 0,
      run: (body) => Promise.reject(body === 1 ? declined() : new Error('no')),
    })
    await intake.submit(op, 1)
    const dead = await intake.submit(op, 2)
    await b.sql('DELETE FROM spillway.history')
    await b.sql(`UPDATE spillway.failures SET sweep_at = '-infinity'`)
    expect(await intake.store.sweepNotes()).toEqual({ failures: 1, progress: 0, isFull: false })
    expect(await failures()).toEqual([{ id: idOf(dead), code: null }])
    expect(await intake.store.sweepNotes()).toEqual({ failures: 0, progress: 0, isFull: false })
    await intake.store.purge([idOf(dead)])
    await b.sql(`UPDATE spillway.failures SET sweep_at = '-infinity'`)
    expect(await intake.store.sweepNotes()).toEqual({ failures: 1, progress: 0, isFull: false })
  })
})
