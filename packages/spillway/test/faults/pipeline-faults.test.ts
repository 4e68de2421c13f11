import { type ChildProcess, type ChildProcessByStdio, spawn } from 'node:child_process'
import { once } from 'node:events'
import { createInterface } from 'node:readline'
import type { Readable } from 'node:stream'
import { fileURLToPath } from 'node:url'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import type { Intake } from '../../src/intake/intake.js'
import type { Store } from '../../src/store/port.js'
import { addressOf, startHalfOpenProxy, through } from '../half-open-proxy.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

const Body = Type.Object({ lane: Type.String(), n: Type.Integer() })
const lane = (body: { lane: string }) => ['q', body.lane] as const
const away = () => Object.assign(new Error('the connection was lost'), { code: 'unavailable' })

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const idOf = (answer: { kind: string; operationId?: string }): string => {
  if (answer.operationId === undefined) throw new Error(`expected an operation, not ${answer.kind}`)
  return answer.operationId
}
const drained = (ms?: number) =>
  eventually(
    async () => ((await b.sql('SELECT 1 FROM spillway.ops')).length === 0 ? true : undefined),
    'the queue to drain',
    ms,
  )

describe('an answer that was lost', () => {
  it('of accept: the operation is not stuck, though this process does not know it', async () => {
    const faults = { left: 1 }
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          accept: async (items, context) => {
            const accepted = await store.accept(items, context)
            if (faults.left-- > 0) throw away()
            return accepted
          },
        }),
    })
    const ran: number[] = []
    const op = intake.define('op', { body: Body, lane, run: (body) => void ran.push(body.n) })
    const answer = await intake.submit(op, { lane: 'a', n: 1 }, { idempotencyKey: 'k' })
    expect(answer).toMatchObject({ refusal: { code: 'store_unavailable' } })
    // Nothing else comes: it must not need another request to notice. Time is made to pass for the lease alone.
    await b.sql("UPDATE spillway.leases SET claimed_at = claimed_at - interval '1 minute'")
    await drained(15_000)
    expect(ran).toEqual([1])
    expect(await intake.submit(op, { lane: 'a', n: 1 }, { idempotencyKey: 'k' })).toMatchObject({
      kind: 'done',
      replayed: true,
    })
    expect(await b.audit()).toEqual([])
  })

  it('of a settlement: read from the ticket, run once, and its neighbours in the lease continue', async () => {
    const faults = { left: 1 }
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          step: async (worker, part, settlements, claim) => {
            const result = await store.step(worker, part, settlements, claim)
            if (settlements.some((s) => s.leaving.length > 0) && faults.left-- > 0) throw away()
            return result
          },
        }),
    })
    const ran: string[] = []
    const release = signal()
    const op = intake.define('op', {
      body: Body,
      lane,
      run: async (body) => {
        ran.push(body.lane)
        if (body.lane === 'slow') await release.promise
        return body.lane
      },
    })
    // Both lanes in one claim, so in one lease; the slow one is still running when the answer is lost.
    await intake.store.pause('q', null)
    const fast = idOf(await intake.submit(op, { lane: 'fast', n: 1 }))
    const slow = idOf(await intake.submit(op, { lane: 'slow', n: 1 }))
    await eventually(
      async () => ((await b.sql('SELECT 1 FROM spillway.parked')).length === 2 ? true : undefined),
      'both to be held',
    )
    await intake.store.resume('q', null)
    intake.wakeAll()
    await b.finished(fast)
    await eventually(() => (faults.left < 0 ? true : undefined), 'the answer to be lost')
    release.fire()
    await b.sql("UPDATE spillway.leases SET claimed_at = claimed_at - interval '1 minute'")
    expect(await b.finished(slow, 15_000)).toMatchObject({ status: 'completed' })
    expect(ran.filter((name) => name === 'fast')).toHaveLength(1)
    expect(await b.audit()).toEqual([])
  })

  it('of the settlement of a direct run: the caller gets its result', async () => {
    const faults = { left: 1 }
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          step: async (worker, part, settlements, claim) => {
            const result = await store.step(worker, part, settlements, claim)
            if (settlements.length > 0 && faults.left-- > 0) throw away()
            return result
          },
        }),
    })
    let runs = 0
    const op = intake.define('op', { body: Body, lane, run: () => ++runs })
    expect(await intake.submit(op, { lane: 'a', n: 1 })).toMatchObject({ kind: 'done', result: 1 })
    expect(await intake.submit(op, { lane: 'a', n: 2 }, { waitMs: 5_000 })).toMatchObject({ kind: 'done', result: 2 })
    expect(await b.audit()).toEqual([])
  })

  it('that the settlement did not happen: it is done again', async () => {
    const faults = { left: 2 }
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          step: async (worker, part, settlements, claim) => {
            if (settlements.length > 0 && faults.left-- > 0) throw away()
            return store.step(worker, part, settlements, claim)
          },
        }),
    })
    let runs = 0
    const op = intake.define('op', { body: Body, lane, run: () => ++runs })
    expect(await intake.submit(op, { lane: 'a', n: 1 })).toMatchObject({ kind: 'done', result: 1 })
    expect(runs).toBe(1)
  })
})

describe('the lease of the process', () => {
  const declaredDead = async (intake: Intake): Promise<void> => {
    await b.sql("UPDATE spillway.workers SET until = now() - interval '1 minute' WHERE id = $1", [
      intake.presence.worker,
    ])
    await b.sql('SELECT * FROM spillway.recover()')
  }

  it('lost: running operations are aborted, the process enlists again and continues', async () => {
    const intake = await b.intake({ directWaitMs: 100 })
    const aborted = signal<unknown>()
    const op = intake.define('op', {
      body: Body,
      lane,
      run: (body, ctx) => {
        if (ctx.attempt > 1) return body.n
        return new Promise<number>(() => {
          ctx.signal.addEventListener('abort', () => aborted.fire(ctx.signal.reason))
        })
      },
    })
    const answer = await intake.submit(op, { lane: 'a', n: 1 })
    const before = intake.presence.worker
    await declaredDead(intake)
    expect(await aborted.promise).toMatchObject({ code: 'lease_lost' })
    await eventually(() => (intake.presence.worker !== before ? true : undefined), 'the process to enlist again')
    expect(await b.finished(idOf(answer))).toMatchObject({ status: 'completed', attempts: 2, result: 1 })
    expect(await intake.submit(op, { lane: 'b', n: 2 }, { waitMs: 0 })).toMatchObject({ kind: 'queued' })
    expect(b.logged.some((l) => l.level === 'error' && l.message.includes('lease lost'))).toBe(true)
    expect(await b.audit()).toEqual([])
  })

  it('a zombie settles nothing after it lost its lease', async () => {
    // It does not hear that its lease is lost.
    const zombie = await b.intake({
      directWaitMs: 100,
      wrap: (store) => overriding(store, { pulse: () => Promise.reject(away()) }),
    })
    const release = signal()
    const op = zombie.define('op', {
      body: Body,
      lane,
      run: async () => {
        await release.promise
        return 'zombie'
      },
    })
    const answer = await zombie.submit(op, { lane: 'a', n: 1 })
    const id = idOf(answer)
    await declaredDead(zombie)
    const heir = await b.intake()
    heir.define('op', { body: Body, lane, run: () => 'heir' })
    expect(await b.finished(id)).toMatchObject({ result: 'heir', attempts: 2 })
    release.fire()
    expect(await zombie.waiters.wait(id, 5_000)).toMatchObject({ result: 'heir' })
    expect(await b.ticket(id)).toMatchObject({ result: 'heir', attempts: 2 })
    expect(await b.audit()).toEqual([])
  })

  it('lost without heartbeats, then found still valid: its lanes run again', async () => {
    const heart = { beats: true }
    const intake = await b.intake({
      leaseMs: 1_000,
      directWaitMs: 100,
      wrap: (store) =>
        overriding(store, {
          pulse: (worker, leaseMs, running) =>
            heart.beats ? store.pulse(worker, leaseMs, running) : Promise.reject(away()),
        }),
    })
    const aborted = signal()
    let runs = 0
    const op = intake.define('op', {
      body: Body,
      lane,
      run: (_, ctx) => {
        if (runs++ > 0) return 'again'
        return new Promise<string>(() => ctx.signal.addEventListener('abort', () => aborted.fire()))
      },
    })
    const id = idOf(await intake.submit(op, { lane: 'a', n: 1 }))
    heart.beats = false
    await aborted.promise
    heart.beats = true
    await b.sql("UPDATE spillway.leases SET claimed_at = claimed_at - interval '1 minute'")
    expect(await b.finished(id, 15_000)).toMatchObject({ status: 'completed', result: 'again' })
    expect(await b.audit()).toEqual([])
  })
})

describe('an operation of a type that is not defined here', () => {
  it('is left to a process that knows it, uncounted', async () => {
    const stranger = await b.intake()
    const other = stranger.define('something.else', { body: Body, run: () => 0 })
    const gateway = await b.intake({ role: 'direct' })
    const op = gateway.define('op', { body: Body, lane, run: () => 0 })
    const id = idOf(await gateway.submit(op, { lane: 'a', n: 1 }, { respondAsync: true }))
    // What the stranger knows goes past it: it has looked, and left the other alone.
    const known = idOf(await stranger.submit(other, { lane: 'a', n: 2 }, { respondAsync: true }))
    expect(await b.finished(known)).toMatchObject({ status: 'completed' })
    expect(await gateway.store.ticket(id)).toMatchObject({ status: 'pending', attempts: 0 })
    expect(await b.sql('SELECT FROM spillway.ready')).toHaveLength(1)
    const knowing = await b.intake()
    knowing.define('op', { body: Body, lane, run: (body) => body.n })
    expect(await b.finished(id)).toMatchObject({ status: 'completed', attempts: 1, result: 1 })
  })
})

describe('a process that is killed', () => {
  const program = fileURLToPath(new URL('../pipeline-worker-process.ts', import.meta.url))
  const turnsProgram = fileURLToPath(new URL('../turns-worker-process.ts', import.meta.url))
  const children: ChildProcess[] = []
  afterEach(async () => {
    for (const child of children.splice(0)) {
      if (child.exitCode !== null || child.signalCode !== null) continue
      child.kill('SIGKILL')
      await once(child, 'exit')
    }
  })

  it('leaves its work to others: effects in the store once, in order', async () => {
    await b.sql('CREATE TABLE effects (at bigserial, lane text, n int, who text)')
    const gateway = await b.intake({ role: 'direct' })
    const op = gateway.define('op', { body: Body, lane, run: () => undefined })
    for (let n = 1; n <= 5; n++) {
      for (const name of ['a', 'b']) await gateway.submit(op, { lane: name, n }, { respondAsync: true })
    }
    const child = spawn(process.execPath, ['--import', 'tsx', program, b.url], { stdio: ['ignore', 'pipe', 'inherit'] })
    children.push(child)
    const lines = createInterface({ input: child.stdout })
    // It writes with its transaction open, says so, and never ends: that is where it dies.
    await once(lines, 'line')
    child.kill('SIGKILL')
    await once(child, 'exit')
    const heir = await b.intake({ leaseMs: 1_000 })
    heir.define('op', {
      body: Body,
      lane,
      run: async (body, ctx) => {
        await ctx.tx.query('INSERT INTO effects (lane, n, who) VALUES ($1, $2, $3)', [body.lane, body.n, 'heir'])
      },
    })
    await drained(20_000)
    for (const name of ['a', 'b']) {
      const rows = await b.sql<{ n: number }>('SELECT n FROM effects WHERE lane = $1 ORDER BY at', [name])
      expect(rows.map((r) => r.n)).toEqual([1, 2, 3, 4, 5])
    }
    expect(b.logged.some((l) => l.message.includes('dead process'))).toBe(true)
    expect(await b.audit()).toEqual([])
  }, 60_000)

  it('holds its permits of a key until its lease is over, and then others run: never more at once than allowed', async () => {
    await b.sql('CREATE TABLE runs (at bigserial, op uuid, began timestamptz, ended timestamptz)')
    const gateway = await b.intake({ role: 'direct' })
    const op = gateway.define('op', { lane: { key: () => 'key', concurrency: 3 }, run: () => undefined })
    for (let n = 0; n < 40; n++) await gateway.submit(op, n, { respondAsync: true })
    const start = (runMs: number): ChildProcessByStdio<null, Readable, null> => {
      const args = ['--import', 'tsx', turnsProgram, b.url, `${runMs}`]
      const child = spawn(process.execPath, args, { stdio: ['ignore', 'pipe', 'inherit'] })
      children.push(child)
      return child
    }
    // It holds all three permits, and dies.
    const killed = start(3_600_000)
    const lines = createInterface({ input: killed.stdout })
    let began = 0
    for await (const _ of lines) if (++began === 3) break
    const others = [start(5), start(5)]
    killed.kill('SIGKILL')
    await once(killed, 'exit')
    await drained(30_000)
    for (const child of others) child.kill('SIGKILL')
    const [found] = await b.sql<{ most: number; runs: number; ops: number }>(`
      WITH spans AS (
        SELECT at, op, began, coalesce(ended, lead(began) OVER (PARTITION BY op ORDER BY at)) AS ended FROM runs
      )
      SELECT (SELECT count(*)::int FROM runs) AS runs, (SELECT count(DISTINCT op)::int FROM runs) AS ops,
        (SELECT max(n)::int FROM (
          SELECT count(*) AS n FROM spans x JOIN spans y ON y.began <= x.began AND y.ended > x.began GROUP BY x.at
        ) beside) AS most`)
    expect(found).toEqual({ most: 3, runs: 43, ops: 40 })
    expect(await b.sql('SELECT 1 FROM spillway.turns')).toEqual([])
    expect(await b.audit()).toEqual([])
  }, 90_000)
})

describe('a store that goes away', () => {
  it.each(['refuse', 'stall'] as const)(
    '(%s), under load: every submission is answered, and work continues when it is back',
    async (how) => {
      const proxy = await startHalfOpenProxy(addressOf(b.url))
      const intake = await b.intake({ leaseMs: 20_000, postgres: { url: through(proxy, b.url) } })
      const ran = new Set<number>()
      const op = intake.define('op', { body: Body, lane, run: (body) => void ran.add(body.n) })
      const accepted = new Set<number>()
      const codes = new Set<string>()
      const answered = { slowestMs: 0, stop: false, n: 0, refused: 0 }
      const client = async (name: string): Promise<void> => {
        while (!answered.stop) {
          const mine = ++answered.n
          const started = performance.now()
          const answer = await intake.submit(op, { lane: name, n: mine })
          answered.slowestMs = Math.max(answered.slowestMs, performance.now() - started)
          if (answer.kind === 'refused') {
            answered.refused++
            codes.add(answer.refusal.code)
            await new Promise((resolve) => setImmediate(resolve))
          } else accepted.add(mine)
        }
      }
      const clients = Array.from({ length: 8 }, (_, i) => client(`lane-${i}`))
      try {
        await eventually(() => (accepted.size > 50 ? true : undefined), 'fifty to be accepted')
        if (how === 'refuse') await proxy.refuse()
        else proxy.stall()
        await eventually(() => (answered.refused > 20 ? true : undefined), 'refusals', 15_000)
        await proxy.pass()
        const before = accepted.size
        await eventually(() => (accepted.size > before + 50 ? true : undefined), 'it to go on', 20_000)
      } finally {
        answered.stop = true
        await proxy.pass()
        await Promise.all(clients)
      }
      for (const code of codes) expect(code).toMatch(/^(store_unavailable|overloaded)$/)
      // A direct run that began before waits for its settlement, 5 s; everything else for the store, 2 s.
      expect(answered.slowestMs).toBeLessThan(8_000)
      await eventually(
        () => ([...accepted].every((id) => ran.has(id)) ? true : undefined),
        'all that was accepted to have run',
        20_000,
      )
      await drained(20_000)
      expect(await b.audit()).toEqual([])
      await intake.close()
      await proxy.close()
    },
    90_000,
  )

  it('for good: close does not hang', async () => {
    const gone = { yet: false }
    const failing = (store: Store): Store =>
      new Proxy(store, {
        get: (target, name) => {
          const method = Reflect.get(target, name)
          if (typeof method !== 'function' || ['close', 'poolState'].includes(String(name))) return method
          return (...args: unknown[]) => (gone.yet ? Promise.reject(away()) : Reflect.apply(method, target, args))
        },
      })
    const intake = await b.intake({ wrap: failing, drainMs: 200, directWaitMs: 100 })
    const release = signal()
    const op = intake.define('op', { body: Body, lane, run: () => release.promise })
    await intake.submit(op, { lane: 'a', n: 1 })
    gone.yet = true
    release.fire()
    const started = performance.now()
    await intake.close()
    expect(performance.now() - started).toBeLessThan(6_000)
  })
})
