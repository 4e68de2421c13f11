import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import pg from 'pg'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { OptionError } from '../../src/core/options.js'
import type { Answer } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import type { ClaimRequest, Store } from '../../src/store/port.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

const body = Type.Object({ n: Type.Integer() })
const away = () => Object.assign(new Error('the connection was lost'), { code: 'unavailable' })

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const idOf = (answer: Answer): string => {
  if (!('operationId' in answer)) throw new Error(`expected an operation, not ${JSON.stringify(answer)}`)
  return answer.operationId
}

/** `short` in the general slots, `long` in two of its own; each holds its handlers until it is opened. */
function kinds(intake: Intake, held: { short?: Promise<void>; long?: Promise<void> } = {}) {
  const ran = { short: [] as number[], long: [] as number[] }
  const now = { short: 0, long: 0 }
  const most = { short: 0, long: 0 }
  const runner = (kind: 'short' | 'long') => async (order: { n: number }) => {
    now[kind]++
    most[kind] = Math.max(most[kind], now[kind])
    await held[kind]
    now[kind]--
    ran[kind].push(order.n)
  }
  const short = intake.define('short', { body, lane: ({ n }) => ['short', `${n}`], run: runner('short') })
  const long = intake.define('long', {
    body,
    lane: ({ n }) => ['long', `${n}`],
    slots: { name: 'long', concurrency: 2 },
    run: runner('long'),
  })
  return { short, long, ran, now, most }
}

const numbers = (count: number): number[] => Array.from({ length: count }, (_, i) => i)
const holds = <T>(is: () => boolean, what: string, value: T) => eventually(() => (is() ? value : undefined), what)

describe('slots of their own', () => {
  it('leave the others their share, however long the large ones last', async () => {
    const open = signal()
    const intake = await b.intake({ concurrency: 2 })
    const { short, long, ran, now, most } = kinds(intake, { long: open.promise })
    for (const n of numbers(6)) await intake.submit(long, { n }, { respondAsync: true })
    await holds(() => now.long === 2, 'its slots to be full', true)
    const answers = await Promise.all(numbers(20).map((n) => intake.submit(short, { n }, { waitMs: 10_000 })))
    expect(answers.map(({ kind }) => kind)).toEqual(numbers(20).map(() => 'done'))
    expect(ran.long).toEqual([])
    open.fire()
    await holds(() => ran.long.length === 6, 'the long ones to end', true)
    expect(most.long).toBe(2)
  })

  it('are available though others fill all of the rest', async () => {
    const open = signal()
    const intake = await b.intake({ concurrency: 2 })
    const { short, long, now } = kinds(intake, { short: open.promise })
    for (const n of numbers(6)) await intake.submit(short, { n }, { respondAsync: true })
    await holds(() => now.short === 2, 'the general slots to be full', true)
    expect(await intake.submit(long, { n: 1 })).toMatchObject({ kind: 'done' })
    open.fire()
  })

  it('are shared by definitions that name the same', async () => {
    const open = signal()
    const intake = await b.intake()
    const { long, now } = kinds(intake, { long: open.promise })
    const other = intake.define('other', { body, slots: { name: 'long', concurrency: 2 }, run: () => 1 })
    for (const n of numbers(2)) await intake.submit(long, { n }, { respondAsync: true })
    await holds(() => now.long === 2, 'the slots to be full', true)
    expect(await intake.submit(other, { n: 1 })).toMatchObject({ kind: 'queued', reason: 'system_busy' })
    open.fire()
  })

  it.each([
    { name: 'long', concurrency: 3 },
    { name: 'none', concurrency: 0 },
    { name: '', concurrency: 1 },
  ])('of %o are refused', async (slots) => {
    const intake = await b.intake()
    kinds(intake)
    expect(() => intake.define('other', { body, slots, run: () => 1 })).toThrow(OptionError)
  })

  it('claim types of their own only, and count in parts of their own', async () => {
    const claims: { part: number; types: readonly string[] | undefined }[] = []
    const intake = await b.intake({ wrap: (store) => overriding(store, { step: recording(store, claims) }) })
    const { short, long, ran } = kinds(intake)
    for (const n of numbers(10)) {
      await intake.submit(short, { n }, { respondAsync: true })
      await intake.submit(long, { n }, { respondAsync: true })
    }
    await holds(() => ran.short.length + ran.long.length === 20, 'all to run', true)
    const parts = (type: string) => new Set(claims.filter(({ types }) => types?.[0] === type).map(({ part }) => part))
    expect(new Set(claims.map(({ types }) => types?.join()))).toEqual(new Set(['short', 'long']))
    expect([...parts('short')].filter((part) => parts('long').has(part))).toEqual([])
    expect(await b.audit()).toEqual([])
  })

  it("are found by their type, without walking over others' operations", async () => {
    const intake = await b.intake({ role: 'direct' })
    const { short, long } = kinds(intake)
    await Promise.all(numbers(2_000).map((n) => intake.submit(short, { n }, { respondAsync: true })))
    const client = new pg.Client({ connectionString: b.url })
    await client.connect()
    const rowsRead = async (): Promise<number> => {
      await client.query('BEGIN')
      await client.query(`SELECT * FROM spillway.claim($1, 16, 100, 1, 1::smallint, '{long,none}', '{}', '{}')`, [
        intake.instance,
      ])
      const { rows } = await client.query<{ n: string }>(
        `SELECT idx_tup_fetch + seq_tup_read AS n FROM pg_stat_xact_user_tables WHERE schemaname = 'spillway' AND relname = 'ready'`,
      )
      await client.query('COMMIT')
      return Number(rows[0]?.n)
    }
    try {
      expect(await rowsRead()).toBeLessThan(20)
      await intake.submit(long, { n: 1 }, { respondAsync: true })
      expect(await rowsRead()).toBeLessThan(20)
      expect(await b.sql(`SELECT FROM spillway.ready WHERE type = 'long'`)).toEqual([])
    } finally {
      await client.end()
    }
  })

  it('are waited for by close, as the others are', async () => {
    const open = { short: signal(), long: signal() }
    const intake = await b.intake({ drainMs: 20_000 })
    const { short, long, now, ran } = kinds(intake, { short: open.short.promise, long: open.long.promise })
    const ids = [
      idOf(await intake.submit(short, { n: 1 }, { respondAsync: true })),
      idOf(await intake.submit(long, { n: 1 }, { respondAsync: true })),
    ]
    await holds(() => now.short + now.long === 2, 'both to run', true)
    const closed = intake.close()
    open.short.fire()
    await holds(() => ran.short.length === 1, 'the short one to end', true)
    expect(await Promise.race([closed.then(() => 'closed'), b.sql('SELECT 1').then(() => 'waiting')])).toBe('waiting')
    open.long.fire()
    await closed
    for (const id of ids) expect(await b.ticket(id)).toMatchObject({ status: 'completed', attempts: 1 })
  })
})

function recording(store: Store, claims: { part: number; types: ClaimRequest['types'] }[]): Store['step'] {
  return (worker, part, settlements, claim) => {
    if (claim !== null) claims.push({ part, types: claim.types })
    return store.step(worker, part, settlements, claim)
  }
}

describe('leases', () => {
  it('whose claim was never answered are given back in both kinds of slots, and no others', async () => {
    const lost = { short: 1, long: 1 }
    const open = signal()
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          accept: async (items, context) => {
            const accepted = await store.accept(items, context)
            const type = items[0]?.type as 'short' | 'long'
            if (items[0]?.payload === '{"n":1}' && lost[type]-- > 0) throw away()
            return accepted
          },
        }),
    })
    const { short, long, ran, now } = kinds(intake, { long: open.promise })
    const running = intake.submit(long, { n: 0 }, { waitMs: 30_000 })
    await holds(() => now.long === 1, 'one to run', true)
    for (const kind of [short, long]) {
      expect(await intake.submit(kind, { n: 1 })).toMatchObject({ refusal: { code: 'store_unavailable' } })
    }
    await b.sql("UPDATE spillway.leases SET claimed_at = claimed_at - interval '1 minute'")
    await eventually(() => (now.long === 2 && ran.short.length === 1 ? true : undefined), 'both to be found', 15_000)
    open.fire()
    expect(await running).toMatchObject({ kind: 'done' })
    await holds(() => ran.long.length === 2, 'the other to end', true)
    expect(ran).toEqual({ short: [1], long: expect.arrayContaining([0, 1]) })
    expect(await b.audit()).toEqual([])
  }, 30_000)

  const children: ChildProcess[] = []
  afterEach(async () => {
    for (const child of children.splice(0)) {
      if (child.exitCode !== null || child.signalCode !== null) continue
      child.kill('SIGKILL')
      await once(child, 'exit')
    }
  })

  it('of a process that is killed are taken over, in both kinds of slots', async () => {
    const gateway = await b.intake({ role: 'direct' })
    const { short, long } = kinds(gateway)
    for (const kind of [short, long]) {
      for (const n of numbers(4)) await gateway.submit(kind, { n }, { respondAsync: true })
    }
    const program = fileURLToPath(new URL('../library-slots-process.ts', import.meta.url))
    const child = spawn(process.execPath, ['--import', 'tsx', program, b.url], { stdio: ['ignore', 'pipe', 'inherit'] })
    children.push(child)
    const running: string[] = []
    createInterface({ input: child.stdout }).on('line', (line) => running.push(line))
    await eventually(() => (running.length === 6 ? true : undefined), 'all short and two long ones to run', 30_000)
    expect(running.filter((type) => type === 'long')).toHaveLength(2)
    child.kill('SIGKILL')
    await once(child, 'exit')
    const heir = await b.intake({ leaseMs: 1_000 })
    const { ran } = kinds(heir)
    await eventually(() => (ran.short.length + ran.long.length === 8 ? true : undefined), 'the heir to end all', 20_000)
    expect([...ran.long].sort()).toEqual(numbers(4))
    expect(await b.audit()).toEqual([])
  }, 60_000)
})

describe('a ticket at once (waitMs 0)', () => {
  it('runs here, also in a process that does not claim, and says so', async () => {
    const open = signal()
    const intake = await b.intake({ role: 'direct' })
    const { long, now, ran } = kinds(intake, { long: open.promise })
    const answer = await intake.submit(long, { n: 1 }, { waitMs: 0 })
    expect(answer).toMatchObject({ kind: 'queued', reason: 'still_running', position: 0, replayed: false })
    await holds(() => now.long === 1, 'it to run', true)
    open.fire()
    expect(await b.finished(idOf(answer))).toMatchObject({ status: 'completed', attempts: 1 })
    expect(ran.long).toEqual([1])
  })

  it('waits in the queue when no slot is free, not here for one to become free', async () => {
    const open = signal()
    const intake = await b.intake({ role: 'direct' })
    const { long, now } = kinds(intake, { long: open.promise })
    const answers = await Promise.all(numbers(6).map((n) => intake.submit(long, { n }, { waitMs: 0 })))
    const reasons = answers.map((answer) => (answer.kind === 'queued' ? answer.reason : answer.kind))
    expect(reasons.sort()).toEqual([...numbers(2).map(() => 'still_running'), ...numbers(4).map(() => 'system_busy')])
    await holds(() => now.long === 2, 'two to run', true)
    expect(await b.sql('SELECT FROM spillway.ready')).toHaveLength(4)
    open.fire()
  })

  it('waits behind its lane, and reports so', async () => {
    const open = signal()
    const intake = await b.intake({ role: 'direct' })
    const { long } = kinds(intake, { long: open.promise })
    await intake.submit(long, { n: 1 }, { waitMs: 0 })
    expect(await intake.submit(long, { n: 1 }, { waitMs: 0 })).toMatchObject({
      reason: 'maintaining_order',
      position: 0,
    })
    open.fire()
  })

  it('is returned again for the same key, however soon it is repeated', async () => {
    const open = signal()
    const intake = await b.intake()
    const { long, ran } = kinds(intake, { long: open.promise })
    const options = { waitMs: 0, idempotencyKey: 'k' }
    const answers = await Promise.all(numbers(5).map(() => intake.submit(long, { n: 1 }, options)))
    expect(new Set(answers.map(idOf)).size).toBe(1)
    expect(answers.filter((answer) => answer.kind === 'queued' && answer.reason === 'still_running')).toHaveLength(5)
    open.fire()
    await b.finished(idOf(answers[0] as Answer))
    expect(ran.long).toEqual([1])
  })
})
