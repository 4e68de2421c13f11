import { setTimeout as delay } from 'node:timers/promises'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { type Answer, capacity, createMetrics, type Definition, type MetricRegistry } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import type { ClaimRequest } from '../../src/store/port.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(async () => {
  const faults = await b.audit()
  await b.close()
  expect(faults).toEqual([])
})

const idOf = (answer: Answer): string => {
  if (answer.kind !== 'queued') throw new Error(`expected a ticket, not ${answer.kind}`)
  return answer.operationId
}
const queue = async (intake: Intake, op: Definition, body: unknown, options: object = {}) =>
  idOf(await intake.submit(op, body, { respondAsync: true, ...options }))

const expired = {
  status: 'failed',
  said: { code: 'expired', status: 504 },
  attempts: 0,
  startedAt: null,
  error: expect.stringContaining('expired'),
}

/** The database's clock says that so much time has passed; claims have not noticed. */
const pass = (ms: number) =>
  b.sql(`CREATE OR REPLACE FUNCTION spillway.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS
    $$ SELECT clock_timestamp() + ${ms} * interval '1 ms' $$`)

/** Nobody looks for expired operations: only a claim can notice. */
const onlyClaims = (store: Intake['store']) => overriding(store, { expired: () => Promise.resolve([]) })

describe('expiresAfter', () => {
  it('ends what is claimed too late, without running it, in order with its lane', async () => {
    const ran: unknown[] = []
    const gateway = await b.intake({ role: 'accept', wrap: onlyClaims, leaseMs: 3_600_000 })
    const lane = () => 'one'
    const op = gateway.define('op', { lane, expiresAfter: '1m', run: () => undefined })
    const late = await queue(gateway, op, 1)
    const kept = await queue(gateway, op, 2, { expiresAfter: '1h' })
    const also = await queue(gateway, op, 3)
    const last = await queue(gateway, op, 4, { expiresAfter: 3_600_000 })
    await pass(61_000)
    const worker = await b.intake({ role: 'work', wrap: onlyClaims, leaseMs: 3_600_000 })
    worker.define('op', { lane, run: (n) => void ran.push(n) })
    expect(await b.finished(last)).toMatchObject({ status: 'completed' })
    for (const id of [late, also]) expect(await b.finished(id)).toMatchObject(expired)
    expect(await b.finished(kept)).toMatchObject({ status: 'completed' })
    expect(ran).toEqual([2, 4])
    expect(await b.sql('SELECT 1 FROM spillway.dead_letters')).toEqual([])
  })

  it('is kept while a claimed operation waits in its process for a slot', async () => {
    const ran: unknown[] = []
    const claimed = signal()
    let looks = 0
    const intake = await b.intake({
      role: 'both',
      wrap: (store) =>
        overriding(onlyClaims(store), {
          step: async (worker, part, settlements, claim: ClaimRequest | null) => {
            const result = await store.step(worker, part, settlements, claim)
            // The answer comes when the time is over.
            if (result.claimed.length > 0 && ++looks === 1) {
              await delay(60)
              claimed.fire()
            }
            return result
          },
        }),
    })
    const gateway = await b.intake({ role: 'accept' })
    const op = gateway.define('op', { expiresAfter: 50, run: () => undefined })
    intake.define('op', { run: (n) => void ran.push(n) })
    const id = await queue(gateway, op, 1)
    expect(await b.finished(id)).toMatchObject(expired)
    expect(ran).toEqual([])
  })

  it.each(['paused', 'behind another one', 'waiting for its turn'] as const)(
    'ends what is %s, and gives back what it held',
    async (what) => {
      const values: { labels: { type: string }; value: number }[] = []
      const shown: { name: string; get(): Promise<{ values: typeof values }> }[] = []
      const registry = { registerMetric: (metric: never) => void shown.push(metric) } as MetricRegistry
      const intake = await b.intake({ metrics: createMetrics(registry), directWaitMs: 1 })
      const release = signal()
      const op = intake.define('op', {
        lane: what === 'waiting for its turn' ? { key: () => 'k', concurrency: 1 } : () => ['one', 'a'],
        gates: [capacity({ limit: 10 })],
        run: () => release.promise,
      })
      if (what === 'paused') await intake.lanes.pause({ type: 'op' })
      else await intake.submit(op, 0)
      const options = { expiresAfter: 30, idempotencyKey: 'k' }
      const id = await queue(intake, op, 1, options)
      const behind = await queue(intake, op, 2)
      expect(await b.finished(id)).toMatchObject(expired)
      expect(await intake.tickets.wait(id, { timeoutMs: 5_000 })).toMatchObject({
        status: 'failed',
        said: { code: 'expired', status: 504 },
      })
      expect(await intake.submit(op, 1, { ...options, respondAsync: true })).toMatchObject({
        operationId: id,
        replayed: true,
      })
      expect(await intake.tickets.retry(id)).toMatchObject({ outcome: 'answered' })
      const [gate] = await b.sql<{ held: string }>('SELECT held FROM spillway.gates')
      expect(Number(gate?.held)).toBe(what === 'paused' ? 1 : 2)
      const counter = shown.find(({ name }) => name === 'spillway_operations_expired_total')
      expect((await counter?.get())?.values).toMatchObject([{ labels: { type: 'op' }, value: 1 }])
      expect(await b.audit()).toEqual([])
      release.fire()
      if (what === 'paused') await intake.lanes.resume({ type: 'op' })
      expect(await b.finished(behind)).toMatchObject({ status: 'completed' })
    },
  )

  it('answers a caller who waits', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { expiresAfter: 20, run: () => 1 })
    await intake.lanes.pause({ type: 'op' })
    expect(await intake.submit(op, 1, { waitMs: 20_000 })).toMatchObject({
      kind: 'failed',
      error: 'It expired in the queue before it could start.',
    })
    const events: unknown[] = []
    intake.on('failed', (event) => events.push(event))
    expect(await intake.tickets.list({ status: 'failed' })).toMatchObject({
      items: [{ status: 'failed', said: { code: 'expired', status: 504 } }],
    })
  })

  it('does not end what runs, and ends what waits for its retry', async () => {
    const intake = await b.intake({ retryBaseMs: 60_000, retryMaxMs: 60_000 })
    const release = signal()
    const runs = intake.define('runs', { expiresAfter: 10, run: () => release.promise.then(() => 7) })
    const running = intake.submit(runs, 1, { waitMs: 20_000 })
    const retries = intake.define('retries', {
      expiresAfter: 300,
      run: () => {
        throw new Error('again')
      },
    })
    const id = idOf(await intake.submit(retries, 1))
    expect(await b.finished(id)).toMatchObject({
      status: 'failed',
      said: { code: 'expired', status: 504 },
      attempts: 1,
    })
    await intake.refresh()
    release.fire()
    expect(await running).toMatchObject({ kind: 'done', result: 7 })
    await eventually(async () => (await b.sql('SELECT 1 FROM spillway.lanes')).length === 0 || undefined, 'no lane')
  })

  it('is longer than the delay', async () => {
    const intake = await b.intake()
    const op = intake.define('op', { run: () => 1 })
    await expect(intake.submit(op, 1, { delay: '10s', expiresAfter: '10s' })).rejects.toThrow(
      'expiresAfter (10000 ms) must be longer than the delay (10000 ms)',
    )
  })
})
