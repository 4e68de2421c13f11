import pg from 'pg'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { type Bench, bench } from '../pipeline-fixture.js'

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

describe('role', () => {
  it('accept: takes everything in and runs nothing, and another one runs it', async () => {
    const intake = await b.intake({ role: 'accept' })
    let ran = 0
    const op = intake.define('op', { run: () => ++ran })
    const answers = [
      await intake.submit(op, 1),
      await intake.submit(op, 2, { respondAsync: true }),
      await intake.submit(op, 3, { waitMs: 1 }),
    ]
    expect(answers).toMatchObject(Array(3).fill({ kind: 'queued', reason: 'requested' }))
    const response = await intake.fetch(op)(
      new Request('http://local/', { method: 'POST', body: '4', headers: { 'content-type': 'application/json' } }),
      { clientAddress: '127.0.0.1' },
    )
    expect(response.status).toBe(202)
    await intake.refresh()
    expect(ran).toBe(0)
    const worker = await b.intake({ role: 'work' })
    worker.define('op', { run: (n) => n })
    for (const [n, answer] of answers.entries()) {
      if (answer.kind !== 'queued') throw new Error(`expected a ticket, not ${answer.kind}`)
      expect(await b.finished(answer.operationId)).toMatchObject({ status: 'completed', result: n + 1 })
    }
    expect(ran).toBe(0)
  })

  it('accept: refuses what must run now, and applies rows as ever', async () => {
    const intake = await b.intake({ role: 'accept' })
    const now = intake.define('now', { whenBusy: 'refuse', run: () => 1 })
    expect(await intake.submit(now, 1)).toMatchObject({ kind: 'refused', refusal: { code: 'overloaded' } })
    const rows = intake.define('rows', { apply: async (_, items) => items.map(({ body }) => body) })
    expect(await intake.submit(rows, 7)).toMatchObject({ kind: 'done', result: 7 })
  })

  it('work: runs what is queued, and says why it accepts nothing', async () => {
    const worker = await b.intake({ role: 'work' })
    const op = worker.define('op', { run: (n) => n })
    const client = new pg.Client({ connectionString: b.url })
    await client.connect()
    await client.query('BEGIN')
    const why = (call: string) => `${call}: this intake has the role "work": it runs operations and accepts none`
    await expect(worker.submit(op, 1)).rejects.toThrow(why('submit'))
    await expect(worker.submitMany(op, [1])).rejects.toThrow(why('submitMany'))
    await expect(worker.enqueue(op, 1, { tx: client })).rejects.toThrow(why('enqueue'))
    await expect(worker.enqueueMany(op, [1], { tx: client })).rejects.toThrow(why('enqueueMany'))
    for (const call of ['route', 'express', 'node', 'fetch'] as const) {
      expect(() => worker[call](op)).toThrow(why(call))
    }
    await client.query('ROLLBACK')
    await client.end()
    expect(await b.sql('SELECT 1 FROM spillway.ops')).toEqual([])
  })

  it('direct: runs at once what it can, and leaves the queue to others', async () => {
    const intake = await b.intake({ role: 'direct' })
    const op = intake.define('op', { run: (n) => n })
    expect(await intake.submit(op, 1)).toMatchObject({ kind: 'done', result: 1 })
    const answer = await intake.submit(op, 2, { respondAsync: true })
    if (answer.kind !== 'queued') throw new Error(`expected a ticket, not ${answer.kind}`)
    await intake.refresh()
    expect(await b.ticket(answer.operationId)).toMatchObject({ status: 'pending' })
  })
})
