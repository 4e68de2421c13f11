import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import type { Intake } from '../../src/intake/intake.js'
import { type Bench, bench, eventually, signal } from '../pipeline-fixture.js'

const Body = Type.Object({ lane: Type.String(), n: Type.Integer() })

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const lane = (body: { lane: string }) => ['ordered', body.lane] as const

describe('order within a lane', () => {
  it('holds over direct and queued: X runs, Y waits for it, Z could run but waits too', async () => {
    const [one, two, three] = await Promise.all([b.intake({ directWaitMs: 100 }), b.intake(), b.intake()])
    const ran: string[] = []
    const release = signal()
    const defineOn = (intake: Intake) =>
      intake.define('op', {
        body: Body,
        lane,
        run: async (body, ctx) => {
          if (body.n === 1) await release.promise
          ran.push(`${body.n}.${ctx.attempt}`)
        },
      })
    const ops = [one, two, three].map(defineOn)
    const [x, y, z] = ops
    if (x === undefined || y === undefined || z === undefined) throw new Error('three definitions')
    expect(await one.submit(x, { lane: 'a', n: 1 })).toMatchObject({ kind: 'queued', reason: 'still_running' })
    const queued = await two.submit(y, { lane: 'a', n: 2 })
    expect(queued).toMatchObject({ kind: 'queued', reason: 'maintaining_order', position: 0 })
    // Another lane is free meanwhile.
    expect(await three.submit(z, { lane: 'b', n: 9 })).toMatchObject({ kind: 'done' })
    const third = three.submit(z, { lane: 'a', n: 3 }, { waitMs: 10_000 })
    await eventually(
      async () => ((await b.sql('SELECT 1 FROM spillway.ops')).length === 3 ? true : undefined),
      'three to be held',
    )
    release.fire()
    expect(await third).toMatchObject({ kind: 'done' })
    expect(ran).toEqual(['9.1', '1.1', '2.1', '3.1'])
    // Empty again: the next runs at once.
    expect(await two.submit(y, { lane: 'a', n: 4 })).toMatchObject({ kind: 'done' })
    expect(await b.audit()).toEqual([])
  })

  it('holds over retries: a retried operation keeps its position', async () => {
    const intake = await b.intake()
    const ran: string[] = []
    const op = intake.define('op', {
      body: Body,
      lane,
      run: (body, ctx) => {
        ran.push(`${body.n}.${ctx.attempt}`)
        if (body.n === 1 && ctx.attempt < 3) throw new Error('again')
      },
    })
    await intake.submit(op, { lane: 'a', n: 1 })
    await intake.submit(op, { lane: 'a', n: 2 }, { waitMs: 10_000 })
    expect(ran).toEqual(['1.1', '1.2', '1.3', '2.1'])
  })

  it('holds for every lane with several instances, retries and both paths at once', async () => {
    const intakes = await Promise.all([b.intake(), b.intake(), b.intake()])
    const ran = new Map<string, number[]>()
    const ops = intakes.map((intake) =>
      intake.define('op', {
        body: Body,
        lane,
        run: async (body, ctx) => {
          if (body.n % 5 === 0 && ctx.attempt === 1) throw new Error('once')
          await Promise.resolve()
          const list = ran.get(body.lane) ?? []
          ran.set(body.lane, [...list, body.n])
        },
      }),
    )
    const lanes = ['a', 'b', 'c', 'd', 'e']
    const each = 40
    // Within a lane the next is sent when the previous was accepted: that is what fixes the order.
    await Promise.all(
      lanes.map(async (name) => {
        for (let n = 1; n <= each; n++) {
          const at = n % intakes.length
          const intake = intakes[at]
          const op = ops[at]
          if (intake === undefined || op === undefined) throw new Error('an intake')
          const answer = await intake.submit(op, { lane: name, n }, n % 3 === 0 ? { respondAsync: true } : {})
          expect(['done', 'queued']).toContain(answer.kind)
        }
      }),
    )
    await eventually(
      async () => ((await b.sql('SELECT 1 FROM spillway.ops')).length === 0 ? true : undefined),
      'the queue to drain',
      20_000,
    )
    const expected = Array.from({ length: each }, (_, i) => i + 1)
    for (const name of lanes) expect(ran.get(name)).toEqual(expected)
    expect(await b.audit()).toEqual([])
  })

  it('a dead letter does not block its lane, and joins the tail when it is redriven', async () => {
    const intake = await b.intake()
    const ran: string[] = []
    let works = false
    const op = intake.define('op', {
      body: Body,
      lane,
      maxRetries: 0,
      run: (body) => {
        if (body.n === 1 && !works) throw new Error('no')
        ran.push(String(body.n))
      },
    })
    const dead = await intake.submit(op, { lane: 'a', n: 1 })
    if (dead.kind !== 'failed') throw new Error(`expected failed, not ${dead.kind}`)
    expect(await intake.submit(op, { lane: 'a', n: 2 })).toMatchObject({ kind: 'done' })
    works = true
    await intake.store.pause('ordered', 'a')
    await intake.submit(op, { lane: 'a', n: 3 })
    await intake.store.redrive([dead.operationId])
    await eventually(
      async () => ((await b.sql('SELECT 1 FROM spillway.parked')).length > 0 ? true : undefined),
      'the lane to be held',
    )
    await intake.store.resume('ordered', 'a')
    intake.wakeAll()
    await b.finished(dead.operationId)
    expect(ran).toEqual(['2', '3', '1'])
  })
})

describe('between lanes', () => {
  it('one identity with many operations does not hold up another', async () => {
    const gateway = await b.intake({ role: 'direct' })
    const many = gateway.define('op', { body: Body, lane, run: () => undefined })
    for (let n = 0; n < 300; n++) {
      await gateway.submit(many, { lane: `greedy-${n}`, n }, { identity: 'greedy', respondAsync: true })
    }
    await gateway.submit(many, { lane: 'modest', n: 1 }, { identity: 'modest', respondAsync: true })
    const order: string[] = []
    const worker = await b.intake({ concurrency: 1, role: 'both' })
    worker.define('op', { body: Body, run: (_, ctx) => void order.push(ctx.identity) })
    await eventually(() => (order.includes('modest') ? true : undefined), 'the modest one to run', 20_000)
    expect(order.indexOf('modest')).toBeLessThan(150)
  })
})
