/** `spillway/testing`, on a database that is given. */
import pg from 'pg'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { capacity, halt, RetryOperation, rate } from '../../src/index.js'
import type { Intake as WholeIntake } from '../../src/intake/intake.js'
import { createTestIntake, type TestIntake, type TestIntakeOptions } from '../../src/testing/index.js'
import { eventually, loggingTo, signal } from '../pipeline-fixture.js'
import { freshDatabase, type TestDatabase } from '../setup/database.js'

const Body = Type.Object({ n: Type.Number() })

let database: TestDatabase
let admin: pg.Client
const open: TestIntake[] = []
beforeEach(async () => {
  database = await freshDatabase({ empty: true })
  admin = new pg.Client({ connectionString: database.url })
  await admin.connect()
})
afterEach(async () => {
  await Promise.all(open.splice(0).map((t) => t.close()))
  await admin.end()
  await database.drop()
})

const create = async (options: TestIntakeOptions = {}): Promise<TestIntake> => {
  const t = await createTestIntake({ url: database.url, log: loggingTo([]), ...options })
  open.push(t)
  return t
}
const schemas = async (): Promise<string[]> => {
  const { rows } = await admin.query("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'spillway%' ORDER BY 1")
  return rows.map(({ nspname }) => nspname)
}
const counts = async (schema: string): Promise<Record<string, number>> => {
  const { rows } = await admin.query<{ name: string }>(
    "SELECT relname AS name FROM pg_class WHERE relnamespace = $1::regnamespace AND relkind IN ('r', 'p')",
    [schema],
  )
  const found: Record<string, number> = {}
  for (const { name } of rows) {
    const { rows: counted } = await admin.query(`SELECT count(*)::int AS n FROM "${schema}"."${name}"`)
    if (counted[0].n > 0) found[name] = counted[0].n
  }
  return found
}

describe('a test intake', () => {
  it('has a schema of its own, which is gone when it is closed', async () => {
    const [one, two] = [await create(), await create()]
    expect(await schemas()).toEqual([one.schema, two.schema].sort())
    const ops = [one, two].map(({ intake }) => intake.define('op', { body: Body, run: ({ n }) => n }))
    expect(await one.intake.submit(ops[0] as never, { n: 1 })).toMatchObject({ kind: 'done', result: 1 })
    expect(Object.keys(await counts(two.schema))).not.toContain('history')
    await Promise.all([one.close(), one.close()])
    expect(await schemas()).toEqual([two.schema])
  })

  it('starts in less than a second, and resets in less than 50 ms', async () => {
    await (await create()).close()
    const began = performance.now()
    const t = await create()
    const startMs = performance.now() - began
    const op = t.intake.define('op', { body: Body, run: ({ n }) => n })
    await Promise.all(Array.from({ length: 50 }, (_, n) => t.intake.submit(op, { n }, { waitMs: 10_000 })))
    const times: number[] = []
    for (let i = 0; i < 5; i++) {
      const at = performance.now()
      await t.reset()
      times.push(performance.now() - at)
    }
    console.log(`warm start ${Math.round(startMs)} ms, reset ${times.map((ms) => Math.round(ms)).join(', ')} ms`)
    // The figures above are measured on a quiet machine; this one may be busy.
    expect(startMs).toBeLessThan(10_000)
    expect(Math.min(...times)).toBeLessThan(1_000)
  })

  it('resets: nothing is left but what the live process has, and its definitions work as before', async () => {
    const t = await create()
    const gates = [rate({ limit: 2, per: '1h' }), capacity({ limit: 2 }), halt()]
    const before = await counts(t.schema)
    const op = t.intake.define('op', { body: Body, gates, run: ({ n }) => n, maxRetries: 0 })
    const fails = t.intake.define('fails', { body: Body, run: () => Promise.reject(new Error('no')), maxRetries: 0 })
    const use = async (): Promise<string[]> => {
      const answers = []
      for (let n = 0; n < 3; n++) answers.push(await t.intake.submit(op, { n }, { idempotencyKey: `${n}` }))
      await t.intake.submit(fails, { n: 1 }, { respondAsync: true })
      await t.drain()
      await t.intake.transaction((tx) =>
        t.intake.ledger.append(tx, [{ type: 'a', actor: 'b', traceId: 'c', payload: {} }]),
      )
      return answers.map((answer) => (answer.kind === 'refused' ? answer.refusal.code : answer.kind))
    }
    expect(await use()).toEqual(['done', 'done', 'rate_limited'])
    await t.intake.halt('stop')
    expect(await t.intake.submit(op, { n: 1 })).toMatchObject({ refusal: { code: 'halted' } })
    await t.reset()
    const left = await counts(t.schema)
    expect(Object.keys(left).filter((name) => !(name in before) && name !== 'gates')).toEqual([])
    expect(left.gates).toBe(1)
    expect(await use()).toEqual(['done', 'done', 'rate_limited'])
    expect(await t.intake.ledger.verify()).toMatchObject({ ok: true })
  })

  it('resets while handlers run: they are asked to stop, their outcome is discarded, and new work runs', async () => {
    const t = await create({ concurrency: 4 })
    const aborted: unknown[] = []
    const started = signal()
    const op = t.intake.define('op', {
      body: Body,
      lane: ({ n }) => String(n),
      run: ({ n }, ctx) => {
        if (n === 100) return n
        return new Promise((_, reject) => {
          ctx.signal.addEventListener('abort', () => {
            aborted.push(ctx.signal.reason)
            reject(new Error('aborted'))
          })
          started.fire()
        })
      },
    })
    for (let n = 0; n < 8; n++) await t.intake.submit(op, { n }, { respondAsync: true })
    await started.promise
    await t.reset()
    expect(aborted.length).toBeGreaterThan(0)
    await t.drain()
    expect(await t.intake.submit(op, { n: 100 })).toMatchObject({ kind: 'done', result: 100 })
    const store = (t.intake as WholeIntake).store
    expect(await store.audit()).toEqual([])
    expect(await counts(t.schema)).toMatchObject({ history: 1 })
  })

  it('drains: waits for what is queued and running, retries included', async () => {
    const t = await create({ retryBaseMs: 10, retryMaxMs: 20 })
    const ran: string[] = []
    const op = t.intake.define('op', {
      body: Body,
      lane: ({ n }) => String(n % 3),
      run: ({ n }, ctx) => {
        if (ctx.attempt === 1) throw new Error('once')
        ran.push(`${n}`)
      },
    })
    void Promise.all(Array.from({ length: 20 }, (_, n) => t.intake.submit(op, { n }, { respondAsync: true })))
    await t.drain()
    expect(ran).toHaveLength(20)
  })

  it('says what hinders it from draining', async () => {
    const t = await create()
    const release = signal()
    const op = t.intake.define('op', { body: Body, lane: () => 'lane', run: () => release.promise })
    const later = t.intake.define('later', { body: Body, delayMs: () => 3_600_000, run: () => 1 })
    const fails = t.intake.define('fails', {
      body: Body,
      lane: () => 'failing',
      run: () => {
        throw new RetryOperation('not yet', { afterMs: 90_000 })
      },
    })
    await t.intake.submit(later, { n: 1 }, { respondAsync: true })
    await t.intake.submit(fails, { n: 1 }, { respondAsync: true })
    await eventually(async () => (await t.drain().then(() => '', String)).includes('not yet') || undefined, 'the retry')
    const fault = String(await t.drain().catch((error: unknown) => error))
    expect(fault).toContain('drain: 2 operations will finish only after the time is moved: clock.advance(…)')
    expect(fault).toMatch(/later [0-9a-f-]{36} in later\/.*: delayed, in 3600 s/)
    expect(fault).toMatch(/fails .*failing.*: to be retried, in \d+ s; attempt 1 of 4 failed: not yet/)
    void t.intake.submit(op, { n: 1 })
    await expect(t.drain({ timeoutMs: 200 })).rejects.toThrow(
      /3 operations will finish not within 200 ms[\s\S]*op .*lane.*: running/,
    )
    release.fire()
    await expect(t.drain({ timeout: 5 } as never)).rejects.toThrow('unknown option "timeout"')
  })

  it('moves its clock: delays, retries, rates and schedules', async () => {
    const t = await create()
    const ran: string[] = []
    const record = (what: string) => () => void ran.push(what)
    const later = t.intake.define('later', { body: Body, delayMs: () => 3_600_000, run: record('later') })
    const limited = t.intake.define('limited', {
      body: Body,
      gates: [rate({ limit: 1, per: '1h' })],
      run: record('limited'),
    })
    const fails = t.intake.define('fails', {
      body: Body,
      retry: { baseMs: 60_000, maxMs: 60_000 },
      run: (_, ctx) => {
        ran.push(`attempt ${ctx.attempt}`)
        if (ctx.attempt === 1) throw new Error('once')
      },
    })
    const nightly = t.intake.define('nightly', { body: Body, run: record('nightly') })
    const hourly: string[] = []
    const every = t.intake.define('every', { body: Type.String(), run: (at) => void hourly.push(at) })
    t.intake.schedule('0 3 * * *', nightly, { n: 1 })
    t.intake.schedule('0 * * * *', every, (dueAt) => dueAt.toISOString())
    await t.intake.submit(later, { n: 1 }, { respondAsync: true })
    expect(await t.intake.submit(limited, { n: 1 })).toMatchObject({ kind: 'done' })
    expect(await t.intake.submit(limited, { n: 2 })).toMatchObject({ refusal: { code: 'rate_limited' } })
    await t.intake.submit(fails, { n: 1 }, { respondAsync: true })
    await eventually(() => ran.includes('attempt 1') || undefined, 'the first attempt')
    expect(ran).toEqual(['limited', 'attempt 1'])
    const before = await t.clock.now()
    await t.clock.advance('61s')
    await eventually(() => ran.includes('attempt 2') || undefined, 'the retry')
    await t.clock.advance('1h')
    expect((await t.clock.now()).getTime() - before.getTime()).toBeGreaterThanOrEqual(3_661_000)
    await eventually(() => ran.includes('later') || undefined, 'the delayed one')
    expect(await t.intake.submit(limited, { n: 3 })).toMatchObject({ kind: 'done' })
    await t.clock.advance('1d')
    await t.drain()
    expect(ran.filter((what) => what === 'nightly')).toHaveLength(1)
    expect(new Set(hourly).size).toBe(hourly.length)
    expect(hourly.length).toBeGreaterThanOrEqual(25)
    await t.reset()
    expect(Math.abs((await t.clock.now()).getTime() - Date.now())).toBeLessThan(600_000)
    await expect(t.clock.advance('soon')).rejects.toThrow("or a text like 500ms, 10s, 15m, 1h or 7d; given: 'soon'")
    await t.clock.advance(86_400_000)
    await t.drain()
    expect(ran.filter((what) => what === 'nightly')).toHaveLength(2)
  })

  it('misses no due time of a schedule while its clock moves, and stops for none that is refused', async () => {
    const t = await create()
    const due: string[] = []
    const often = t.intake.define('often', { body: Type.String(), run: (at) => void due.push(at) })
    const never = t.intake.define('never', { body: Body, gates: [halt({ scope: 'never' })], run: () => undefined })
    await t.intake.halt('for ever', 'never')
    t.intake.schedule('*/10 * * * * *', often, (dueAt) => dueAt.toISOString())
    t.intake.schedule('* * * * *', never, { n: 1 })
    await t.clock.advance('10m')
    await t.drain()
    const seconds = due.map((at) => Date.parse(at) / 1_000).sort((a, b) => a - b)
    expect(seconds.length).toBeGreaterThanOrEqual(59)
    expect(seconds.map((one, i) => one - (seconds[i - 1] ?? one - 10))).toEqual(seconds.map(() => 10))
  })

  it('keeps its own lease when its clock moves, and takes over from a process that is gone', async () => {
    const t = await create()
    const whole = t.intake as WholeIntake
    const { instance } = whole
    await admin.query(`SELECT "${t.schema}".enlist(gen_random_uuid(), 'gone', 15000, '{}')`)
    await t.clock.advance('1h')
    expect(whole.instance).toBe(instance)
    await eventually(async () => (await counts(t.schema)).workers === 1 || undefined, 'the other to be removed')
  })

  it('leaves no schema of a killed run: the next one drops it', async () => {
    const gone = 'spillway_test_0123456789abcdef'
    await admin.query(`CREATE SCHEMA ${gone}; CREATE TABLE ${gone}.rows (n int); CREATE SCHEMA spillway_other`)
    const live = await create()
    await eventually(async () => !(await schemas()).includes(gone) || undefined, 'it to be dropped')
    await create()
    expect(await schemas()).toContain(live.schema)
    expect(await schemas()).toContain('spillway_other')
  })

  it('takes the database from SPILLWAY_TEST_DATABASE_URL', async () => {
    const given = process.env.SPILLWAY_TEST_DATABASE_URL
    process.env.SPILLWAY_TEST_DATABASE_URL = database.url
    try {
      const t = await createTestIntake()
      open.push(t)
      expect(t.url).toBe(database.url)
    } finally {
      if (given === undefined) delete process.env.SPILLWAY_TEST_DATABASE_URL
      else process.env.SPILLWAY_TEST_DATABASE_URL = given
    }
  })

  it('says at once what is wrong', async () => {
    await expect(createTestIntake({ uri: 'x' } as never)).rejects.toThrow(
      'createTestIntake: unknown option "uri"; did you mean url?',
    )
    await expect(createTestIntake({ url: 'mysql://x' })).rejects.toThrow('url must be a text like postgres://')
    await expect(createTestIntake({ url: 'postgres://a:b@127.0.0.1:1/c' })).rejects.toMatchObject({
      code: 'unavailable',
    })
    await expect(createTestIntake({ url: database.url, concurrency: 0 })).rejects.toThrow(
      'concurrency must be a whole number',
    )
    expect(await schemas()).toEqual([])
  })
})
