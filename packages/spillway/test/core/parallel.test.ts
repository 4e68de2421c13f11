import pg from 'pg'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import type { Definition } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Bench, bench, eventually, signal } from '../pipeline-fixture.js'

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(async () => {
  const faults = await b.audit()
  await b.close()
  expect(faults).toEqual([])
})

const lanesHeld = () => b.sql('SELECT id, queue, partition, depth FROM spillway.lanes')

/** Queued, whatever is free. */
async function queued(intake: Intake, op: Definition, count: number, identity = 'someone'): Promise<string[]> {
  const answers = await Promise.all(
    Array.from({ length: count }, (_, n) => intake.submit(op, n, { respondAsync: true, identity })),
  )
  return answers.map((answer) => {
    if (answer.kind !== 'queued') throw new Error(`expected a ticket, not ${answer.kind}`)
    return answer.operationId
  })
}

describe('operations of a definition without a lane', () => {
  it('run at the same time, and one that fails holds up no other', async () => {
    const intake = await b.intake()
    const release = signal()
    let running = 0
    const op = intake.define('op', {
      maxRetries: 0,
      run: async (n) => {
        if (n === 0) throw new Error('no')
        running++
        await release.promise
        return n
      },
    })
    expect(await intake.submit(op, 0)).toMatchObject({ kind: 'failed' })
    const answers = [1, 2, 3, 4].map((n) => intake.submit(op, n))
    await eventually(() => running === 4 || undefined, 'all four to run')
    release.fire()
    expect(await Promise.all(answers)).toMatchObject([1, 2, 3, 4].map((result) => ({ kind: 'done', result })))
    expect(await lanesHeld()).toEqual([])
  })

  it('run at the same time from the queue, over instances, and leave nothing behind', async () => {
    const gateway = await b.intake({ role: 'direct' })
    const ids = await queued(gateway, gateway.define('op', { run: () => undefined }), 200)
    expect(await lanesHeld()).toHaveLength(200)
    expect((await lanesHeld())[0]).toMatchObject({ queue: 'op', partition: 'Default', depth: '1' })
    const release = signal()
    const running = new Set<number>()
    const workers = await Promise.all([1, 2].map(() => b.intake({ concurrency: 8 })))
    for (const [i, worker] of workers.entries()) {
      worker.define('op', {
        run: async (n) => {
          running.add(i)
          if (running.size < 2) await release.promise
          else release.fire()
          return n
        },
      })
    }
    for (const [n, id] of ids.entries()) {
      expect(await b.finished(id, 20_000)).toMatchObject({ status: 'completed', result: n })
    }
    expect(await lanesHeld()).toEqual([])
  })

  it('have places among all that wait for a slot, in fair order', async () => {
    const gateway = await b.intake({ role: 'direct' })
    const op = gateway.define('op', { run: () => undefined })
    const other = gateway.define('other', { run: () => undefined })
    const greedy = await queued(gateway, op, 20, 'greedy')
    const [modest = ''] = await queued(gateway, other, 1, 'modest')
    const placeOf = async (id: string) => {
      const [report] = await gateway.tickets.statusOf([id])
      expect((await b.ticket(id)).position).toBe(report?.position)
      return report?.position ?? -1
    }
    const places = await Promise.all(greedy.map(placeOf))
    expect([...places].sort((x, y) => x - y)).toEqual(places)
    expect(new Set(places).size).toBe(20)
    // Behind the first of the other identity at most.
    expect(await placeOf(modest)).toBeLessThanOrEqual(1)
    const order: string[] = []
    const worker = await b.intake({ concurrency: 1 })
    for (const type of ['op', 'other']) worker.define(type, { run: (_, ctx) => void order.push(ctx.identity) })
    await b.finished(greedy.at(-1) ?? '', 20_000)
    expect(order.indexOf('modest')).toBeLessThanOrEqual(1)
  })

  it('say at acceptance how many are before them', async () => {
    const intake = await b.intake({ concurrency: 1, directWaitMs: 1 })
    const release = signal()
    const op = intake.define('op', { run: () => release.promise })
    const running = await intake.submit(op, 0)
    expect(running).toMatchObject({ kind: 'queued', reason: 'still_running' })
    await queued(intake, op, 3)
    expect(await intake.submit(op, 9, { respondAsync: true })).toMatchObject({ kind: 'queued', position: 3 })
    release.fire()
    await eventually(async () => (await lanesHeld()).length === 0 || undefined, 'all to leave')
  })

  it.each(['queue', 'type'] as const)('wait while their %s is paused', async (what) => {
    const intake = await b.intake()
    const op = intake.define('op', { run: (n) => n })
    if (what === 'queue') await intake.store.pause('op', null)
    else await intake.lanes.pause({ type: op.type })
    const answer = await intake.submit(op, 1)
    if (answer.kind !== 'queued') throw new Error(`expected a ticket, not ${answer.kind}`)
    const ids = [answer.operationId, ...(await queued(intake, op, 3))]
    await eventually(
      async () => (await b.sql("SELECT 1 FROM spillway.parked WHERE reason = 'pause'")).length === 4 || undefined,
      'all to be held',
    )
    if (what === 'queue') await intake.store.resume('op', null)
    else await intake.lanes.resume({ type: op.type })
    intake.wakeAll()
    for (const id of ids) await b.finished(id)
    expect(await lanesHeld()).toEqual([])
  })

  it('can be cancelled, also while they wait for a retry', async () => {
    const intake = await b.intake({ retryBaseMs: 60_000, retryMaxMs: 60_000 })
    const op = intake.define('op', {
      run: () => {
        throw new Error('again')
      },
    })
    const answer = await intake.submit(op, 1)
    if (answer.kind !== 'queued') throw new Error(`expected a ticket, not ${answer.kind}`)
    expect(await intake.cancel(answer.operationId, 'why')).toBe('cancelled')
    const gateway = await b.intake({ role: 'direct' })
    const [id = ''] = await queued(gateway, gateway.define('other', { run: () => 1 }), 1)
    expect(await gateway.cancel(id, 'why')).toBe('cancelled')
    expect(await b.ticket(id)).toMatchObject({ status: 'cancelled', queue: 'other' })
    expect(await lanesHeld()).toEqual([])
  })

  it('can be redriven, each by itself', async () => {
    const intake = await b.intake()
    let works = false
    const op = intake.define('op', {
      maxRetries: 0,
      run: (n) => {
        if (!works) throw new Error('no')
        return n
      },
    })
    const ids = await queued(intake, op, 3)
    for (const id of ids) expect(await b.finished(id)).toMatchObject({ status: 'failed' })
    expect(await lanesHeld()).toEqual([])
    works = true
    expect(await intake.store.redrive(ids)).toEqual({ moved: 3, skipped: 0 })
    intake.wakeAll()
    for (const [n, id] of ids.entries()) expect(await b.finished(id)).toMatchObject({ status: 'completed', result: n })
    expect(await lanesHeld()).toEqual([])
  })

  it('are dead letters when they kill their process each time, and leave no lane', async () => {
    const gateway = await b.intake({ role: 'direct' })
    const op = gateway.define('op', { maxRetries: 0, run: () => undefined })
    const [id = ''] = await queued(gateway, op, 1)
    // A process claims it, says that it runs, and dies.
    const dead = '00000000-0000-4000-8000-0000000000dd'
    await gateway.store.enlist(dead, 'dead', 15_000, {})
    const claim = { lanes: 1, budget: 1, each: 1, turn: 1 }
    const [claimed] = (await gateway.store.step(dead, 0, [], claim)).claimed
    if (claimed === undefined) throw new Error('nothing was claimed')
    await gateway.store.mark(dead, [{ fence: claimed.fence, lane: claimed.lane, seq: claimed.seq, startedMsAgo: 0 }])
    await b.sql("UPDATE spillway.workers SET until = now() - interval '1 s' WHERE id = $1", [dead])
    expect(await b.finished(id)).toMatchObject({ status: 'failed', attempts: 1 })
    expect(await lanesHeld()).toEqual([])
  })

  it('can be enqueued in a transaction, without waiting for another one', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { run: (n) => n })
    const clients = [1, 2].map(() => new pg.Client({ connectionString: b.url }))
    await Promise.all(clients.map((client) => client.connect()))
    const answers = []
    for (const client of clients) {
      await client.query('BEGIN')
      answers.push(await intake.enqueue(op, 5, { tx: client }))
    }
    for (const client of clients) await client.query('COMMIT')
    await Promise.all(clients.map((client) => client.end()))
    for (const answer of answers) {
      if (answer.kind !== 'queued') throw new Error(`expected a ticket, not ${answer.kind}`)
      expect(await b.finished(answer.operationId)).toMatchObject({ status: 'completed', result: 5 })
    }
    expect(await lanesHeld()).toEqual([])
  })

  it('run again after a pause that began and ended while their lanes were given back', async () => {
    const intake = await b.intake({ role: 'accept' })
    const op = intake.define('op', { run: (n) => n })
    await queued(intake, op, 1)
    const client = new pg.Client({ connectionString: b.url })
    await client.connect()
    // As a redrive or a recovery does: it finds no pause, and later gives the lane back.
    await client.query('BEGIN; SET LOCAL search_path = spillway')
    await client.query('SELECT pause_guard()')
    const [lane] = (await client.query<{ lane: string }>('DELETE FROM ready RETURNING lane')).rows
    await intake.lanes.pause({ type: 'op' })
    await client.query('SELECT lane_requeue($1)', [lane?.lane])
    await intake.lanes.resume({ type: 'op' })
    await client.query('COMMIT')
    await client.end()
    expect(await b.sql('SELECT reason FROM spillway.parked')).toEqual([])
    expect(await b.sql('SELECT lane FROM spillway.ready')).toEqual([lane])
  })

  it('are applied at once although others of their type wait, and need no lane', async () => {
    const intake = await b.intake({ role: 'direct' })
    const op = intake.define('rows', { apply: async (_, items) => items.map(({ body, seq }) => [body, seq]) })
    const ids = await queued(intake, op, 2)
    expect(await Promise.all([7, 8].map((n) => intake.submit(op, n)))).toMatchObject([
      { kind: 'done', result: [7, 1] },
      { kind: 'done', result: [8, 1] },
    ])
    // Some are queued and some are not, in one flush.
    const mixed = await Promise.all([
      intake.submit(op, 9),
      intake.submit(op, 10, { respondAsync: true }),
      intake.submit(op, 11),
    ])
    expect(mixed.map(({ kind }) => kind)).toEqual(['done', 'queued', 'done'])
    expect(await lanesHeld()).toHaveLength(3)
    const worker = await b.intake()
    worker.define('rows', { apply: async (_, items) => items.map(({ body }) => body) })
    for (const [n, id] of ids.entries()) expect(await b.finished(id)).toMatchObject({ result: n })
    await eventually(async () => (await lanesHeld()).length === 0 || undefined, 'all to leave')
  })
})
