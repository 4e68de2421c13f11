import { setTimeout as delay } from 'node:timers/promises'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { createMetrics, type MetricRegistry } from '../../src/index.js'
import type { WhenBusy } from '../../src/intake/when-busy.js'
import { type Bench, bench, eventually, signal } from '../pipeline-fixture.js'

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

/** What a registry asks of a metric at a scrape. */
interface Shown {
  name: string
  get(): Promise<{ values: { labels: { end: string }; value: number }[] }>
}

/** One slot, which the first request holds until it is let go. */
async function busy(whenBusy?: WhenBusy) {
  const metrics: Shown[] = []
  const intake = await b.intake({
    concurrency: 1,
    metrics: createMetrics({ registerMetric: (metric: Shown) => void metrics.push(metric) } as MetricRegistry),
  })
  const started = signal()
  const release = signal()
  const ran: unknown[] = []
  const op = intake.define('op', {
    ...(whenBusy !== undefined && { whenBusy }),
    run: async (body) => {
      ran.push(body)
      started.fire()
      if (body === 'first') await release.promise
      return body
    },
  })
  const first = intake.submit(op, 'first')
  await started.promise
  /** What a scrape shows of the requests that waited. */
  const waits = async (): Promise<Record<string, number>> => {
    const found = metrics.find(({ name }) => name === 'spillway_slot_waits_total')
    if (found === undefined) throw new Error('the metric is not registered')
    const { values } = await found.get()
    return Object.fromEntries(values.map(({ labels, value }) => [labels.end, value]))
  }
  return { intake, op, first, release, ran, waits, room: intake.bound(op).slots.work.room }
}

const within = { wait: 10_000, then: 'queue' } as const

describe('requests that find no free slot', () => {
  it('wait for one: 200 at once are 200 results', async () => {
    const intake = await b.intake()
    let running = 0
    let most = 0
    const op = intake.define('op', {
      // As by default, but on a machine of any speed.
      whenBusy: within,
      run: async (body) => {
        most = Math.max(most, ++running)
        await delay(20)
        running--
        return body
      },
    })
    const bodies = Array.from({ length: 200 }, (_, n) => n)
    const answers = await Promise.all(bodies.map((n) => intake.submit(op, n)))
    expect(answers).toEqual(bodies.map((result) => expect.objectContaining({ kind: 'done', result })))
    expect(most).toBe(64)
    expect(await b.sql('SELECT 1 FROM spillway.lanes')).toEqual([])
    expect(await b.audit()).toEqual([])
  })

  it('are queued when none becomes free in time', async () => {
    const { op, intake, first, release, waits } = await busy()
    const answer = await intake.submit(op, 'second')
    expect(answer).toMatchObject({ kind: 'queued', reason: 'system_busy' })
    expect(await waits()).toEqual({ late: 1 })
    release.fire()
    expect(await first).toMatchObject({ kind: 'done' })
    if (answer.kind === 'queued') expect(await b.finished(answer.operationId)).toMatchObject({ result: 'second' })
  })

  it('are refused instead where the definition says so, and counted', async () => {
    const { op, intake, first, release, waits } = await busy('refuse')
    expect(await intake.submit(op, 'second')).toMatchObject({ kind: 'refused', refusal: { code: 'overloaded' } })
    expect(await waits()).toEqual({ late: 1 })
    release.fire()
    await first
  })

  it.each([
    ['queue', { kind: 'queued' }],
    ['refuse', { kind: 'refused', refusal: { code: 'overloaded' } }],
  ] as const)('wait as long as the definition says, then: %s', async (then, expected) => {
    const { op, intake, first, release, waits } = await busy({ wait: '10ms', then })
    expect(await intake.submit(op, 'second')).toMatchObject(expected)
    expect(await waits()).toEqual({ late: 1 })
    release.fire()
    await first
  })

  it('run in the order of arrival once a slot is free, without a ticket', async () => {
    const { op, intake, first, release, ran, waits, room } = await busy(within)
    const waiting = ['a', 'b', 'c'].map((body) => intake.submit(op, body))
    expect(room.size).toBe(0)
    await eventually(() => room.size === 3 || undefined, 'three to wait')
    release.fire()
    expect(await Promise.all([first, ...waiting])).toMatchObject(Array(4).fill({ kind: 'done' }))
    expect(ran).toEqual(['first', 'a', 'b', 'c'])
    expect(await waits()).toEqual({ slot: 3 })
  })

  it('do not wait when they asked for a ticket', async () => {
    const { op, intake, first, release, waits } = await busy(within)
    expect(await intake.submit(op, 'a', { respondAsync: true })).toMatchObject({ kind: 'queued', reason: 'requested' })
    expect(await intake.submit(op, 'b', { waitMs: 0 })).toMatchObject({ kind: 'queued', reason: 'system_busy' })
    expect(await waits()).toEqual({})
    release.fire()
    await first
  })

  it('take nothing when their caller leaves', async () => {
    const { op, intake, first, release, ran, waits, room } = await busy(within)
    const leaving = new AbortController()
    const second = intake.submit(op, 'second', { signal: leaving.signal })
    await eventually(() => room.size === 1 || undefined, 'it to wait')
    leaving.abort()
    expect(await second).toMatchObject({ kind: 'refused', refusal: { code: 'overloaded' } })
    expect(await waits()).toEqual({ gone: 1 })
    release.fire()
    await first
    expect(ran).toEqual(['first'])
    expect(await b.sql("SELECT 1 FROM spillway.history WHERE type = 'op'")).toHaveLength(1)
  })

  it('are refused when the process drains', async () => {
    const { op, intake, first, release, room } = await busy(within)
    const second = intake.submit(op, 'second')
    await eventually(() => room.size === 1 || undefined, 'it to wait')
    intake.drain()
    expect(await second).toMatchObject({ kind: 'refused', refusal: { code: 'draining' } })
    release.fire()
    await first
  })

  it('wait over HTTP too, and a client that leaves takes nothing', async () => {
    const { op, intake, first, release, ran, room } = await busy(within)
    const send = (body: string, signal?: AbortSignal) =>
      intake.fetch(op)(
        new Request('http://local/', {
          method: 'POST',
          body: JSON.stringify(body),
          headers: { 'content-type': 'application/json' },
          ...(signal && { signal }),
        }),
        { clientAddress: '127.0.0.1' },
      )
    const leaving = new AbortController()
    const left = send('left', leaving.signal)
    const stays = send('stays')
    await eventually(() => room.size === 2 || undefined, 'both to wait')
    leaving.abort()
    await eventually(() => room.size === 1 || undefined, 'one to leave')
    expect((await left).status).toBe(503)
    release.fire()
    const response = await stays
    expect([response.status, await response.json()]).toMatchObject([201, { result: 'stays' }])
    await first
    expect(ran).toEqual(['first', 'stays'])
  })

  it('leave the queue its share: what is queued runs while requests keep coming', async () => {
    const intake = await b.intake({ concurrency: 4 })
    const op = intake.define('op', { whenBusy: within, run: () => delay(5) })
    const queued = intake.define('queued', { run: () => delay(5) })
    const over = signal()
    let isOver = false
    void over.promise.then(() => {
      isOver = true
    })
    // More callers than slots, each of whom comes again at once.
    const callers = Array.from({ length: 16 }, async (_, n) => {
      while (!isOver) expect(await intake.submit(op, n)).toMatchObject({ kind: 'done' })
    })
    const tickets = await Promise.all(
      Array.from({ length: 20 }, (_, n) => intake.submit(queued, n, { respondAsync: true })),
    )
    try {
      for (const answer of tickets) {
        if (answer.kind !== 'queued') throw new Error(`expected a ticket, not ${answer.kind}`)
        expect(await b.finished(answer.operationId, 20_000)).toMatchObject({ status: 'completed' })
      }
    } finally {
      over.fire()
      await Promise.all(callers)
    }
    expect(await b.audit()).toEqual([])
  })
})
