/** Recurring work: once per due time, over all processes. */
import { fork } from 'node:child_process'
import { once } from 'node:events'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { rate } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Bench, bench, eventually, overriding } from '../pipeline-fixture.js'

const Body = Type.Object({ at: Type.Optional(Type.String()) })

let b: Bench
beforeEach(async () => {
  b = await bench()
  await setClock('2026-03-10T00:00:00Z')
})
afterEach(() => b.close())

/** The store's clock stands there. */
const setClock = async (at: string): Promise<void> => {
  await b.sql(`CREATE OR REPLACE FUNCTION spillway.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS
    $$ SELECT timestamptz '${at}' $$`)
}

/** Queued and finished operations. */
const queued = async (): Promise<number> => {
  const [row] = await b.sql<{ n: number }>(
    'SELECT (SELECT count(*) FROM spillway.ops)::int + (SELECT count(*) FROM spillway.history)::int AS n',
  )
  return row?.n ?? 0
}
/** The due times of all operations that were queued, by their bodies. */
const dueTimes = async (): Promise<string[]> =>
  (await b.sql<{ at: string }>("SELECT payload->>'at' AS at FROM spillway.ops ORDER BY id")).map(({ at }) => at)
const row = async (name = 'clean') =>
  (
    await b.sql<{ cron: string; next: string }>(
      'SELECT cron, next_at::text AS next FROM spillway.schedules WHERE name = $1',
      [name],
    )
  )[0]

/** Does not run what it queues. */
const accepting = (options: Parameters<Bench['intake']>[0] = {}) => b.intake({ role: 'direct', ...options })
const cleaning = (intake: Intake, options: { gates?: readonly [ReturnType<typeof rate>] } = {}) =>
  intake.define('clean', { body: Body, run: () => undefined, ...options })
/** Known to the store, and due now; no process is there. */
async function registered(): Promise<void> {
  const intake = await accepting()
  intake.schedule('0 * * * *', cleaning(intake), withTime)
  await intake.catchUp()
  await intake.close()
  await setClock('2026-03-10T01:00:00Z')
}
const withTime = (dueAt: Date) => ({ at: dueAt.toISOString() })

describe('a schedule', () => {
  it('queues one operation per due time, over four processes that look at the same moment', async () => {
    const intakes = await Promise.all([1, 2, 3, 4].map(() => accepting()))
    for (const intake of intakes) intake.schedule('0 * * * *', cleaning(intake), withTime)
    await Promise.all(intakes.map((intake) => intake.catchUp()))
    expect(await queued()).toBe(0)
    for (let h = 1; h <= 5; h++) {
      await setClock(`2026-03-10T0${h}:00:00Z`)
      await Promise.all(intakes.map((intake) => intake.catchUp()))
    }
    expect(await dueTimes()).toEqual([1, 2, 3, 4, 5].map((h) => `2026-03-10T0${h}:00:00.000Z`))
  })

  it('runs like any other operation, with the body and the options of the schedule', async () => {
    const intake = await b.intake()
    const seen: unknown[] = []
    const op = intake.define('clean', { body: Body, run: (body, ctx) => void seen.push([body, ctx.identity]) })
    intake.schedule('30 2 * * *', op, { at: 'always' }, { name: 'nightly', identity: 'night' })
    await intake.catchUp()
    await setClock('2026-03-10T02:30:00Z')
    await intake.catchUp()
    await eventually(() => seen.length > 0 || undefined, 'the run')
    expect(seen).toEqual([[{ at: 'always' }, 'night']])
  })

  it.each(['takeSchedule', 'acceptWithin', 'moveSchedule'] as const)(
    'is not queued twice, nor lost, by a process that fails after %s',
    async (fails) => {
      await registered()
      const failing = await accepting({
        wrap: (store) =>
          overriding(store, {
            [fails]: async (...given: never[]) => {
              await (store[fails] as (...all: never[]) => Promise<unknown>)(...given)
              throw new Error('it fails')
            },
          }),
      })
      failing.schedule('0 * * * *', cleaning(failing), withTime)
      await failing.catchUp()
      expect(await queued()).toBe(0)
      const other = await accepting()
      other.schedule('0 * * * *', cleaning(other), withTime)
      await eventually(async () => {
        await Promise.all([failing.catchUp(), other.catchUp()])
        return (await queued()) > 0 || undefined
      }, 'the other to queue it')
      await Promise.all([failing.catchUp(), other.catchUp()])
      expect(await dueTimes()).toEqual(['2026-03-10T01:00:00.000Z'])
    },
  )

  it('continues when the process that was about to queue it is killed', async () => {
    await registered()
    const child = fork(new URL('../schedule-process.ts', import.meta.url), [b.url], {
      execArgv: ['--import', 'tsx'],
      stdio: ['ignore', 'inherit', 'inherit', 'ipc'],
    })
    try {
      // It holds the row, in an open transaction.
      const ended = once(child, 'exit').then(([code]) => Promise.reject(new Error(`it ended with ${code}`)))
      ended.catch(() => undefined)
      await Promise.race([once(child, 'message'), ended])
      const intake = await accepting()
      intake.schedule('0 * * * *', cleaning(intake), withTime)
      await intake.catchUp()
      expect(await queued()).toBe(0)
      child.kill('SIGKILL')
      await eventually(async () => {
        await intake.catchUp()
        return (await queued()) > 0 || undefined
      }, 'it to be queued')
      expect(await dueTimes()).toEqual(['2026-03-10T01:00:00.000Z'])
    } finally {
      child.kill('SIGKILL')
      if (child.exitCode === null && child.signalCode === null) await once(child, 'exit')
    }
  })

  it.each([
    { missed: 'skip' as const, expected: ['2026-03-10T09:59:30.000Z', '2026-03-10T10:00:00.000Z'] },
    {
      missed: 'once' as const,
      expected: ['2026-03-10T09:59:00.000Z', '2026-03-10T09:59:30.000Z', '2026-03-10T10:00:00.000Z'],
    },
  ])('that was missed follows its policy: $missed', async ({ missed, expected }) => {
    const first = await accepting()
    first.schedule('*/30 * * * * *', cleaning(first), withTime, { missed })
    await first.catchUp()
    await first.close()
    await setClock('2026-03-10T10:00:15Z')
    const second = await accepting()
    second.schedule('*/30 * * * * *', cleaning(second), withTime, { missed })
    await second.catchUp()
    expect(await dueTimes()).toEqual(expected)
    expect((await row())?.next).toBe('2026-03-10 10:00:30+00')
    expect(b.logged.filter(({ message }) => message.includes('were missed'))).toHaveLength(1)
  })

  it('takes a new text, and the process with the old one leaves it alone', async () => {
    const old = await accepting()
    old.schedule('0 * * * *', cleaning(old), withTime)
    await old.catchUp()
    await setClock('2026-03-10T01:00:00Z')
    await old.catchUp()
    const fresh = await accepting()
    fresh.schedule('*/20 * * * *', cleaning(fresh), withTime)
    await fresh.catchUp()
    // 01:00 is due by both, and was handled.
    expect(await row()).toEqual({ cron: '*/20 * * * *', next: '2026-03-10 01:20:00+00' })
    await setClock('2026-03-10T01:20:00Z')
    await old.catchUp()
    expect(await dueTimes()).toEqual(['2026-03-10T01:00:00.000Z'])
    await fresh.catchUp()
    expect(await dueTimes()).toEqual(['2026-03-10T01:00:00.000Z', '2026-03-10T01:20:00.000Z'])
  })

  it('of a name that two types have is queued by the one that registered last', async () => {
    const [one, two] = [await accepting(), await accepting()]
    one.schedule('0 * * * *', cleaning(one), withTime, { name: 'shared' })
    await one.catchUp()
    const other = two.define('other', { body: Body, run: () => undefined })
    two.schedule('0 * * * *', other, withTime, { name: 'shared' })
    await two.catchUp()
    await setClock('2026-03-10T01:00:00Z')
    await one.catchUp()
    expect(await queued()).toBe(0)
    await two.catchUp()
    expect(await b.sql('SELECT type FROM spillway.ops')).toEqual([{ type: 'other' }])
  })

  it('follows the clock of the store, not of the process', async () => {
    const intake = await accepting()
    // The store is eight months before this process's clock, or more.
    intake.schedule('0 3 1 * *', cleaning(intake), withTime)
    await intake.catchUp()
    expect((await row())?.next).toBe('2026-04-01 03:00:00+00')
    expect(await queued()).toBe(0)
  })

  it('waits while it is refused, and is missed after a minute', async () => {
    const intake = await accepting()
    const op = intake.define('clean', { body: Body, run: () => undefined, gates: [rate({ limit: 1, per: '10m' })] })
    intake.schedule('0 * * * *', op, withTime)
    await intake.catchUp()
    await intake.submit(op, {}, { respondAsync: true })
    await setClock('2026-03-10T01:00:00Z')
    await intake.submit(op, { at: 'other' }, { respondAsync: true, identity: 'local' })
    await intake.catchUp()
    expect(await dueTimes()).not.toContain('2026-03-10T01:00:00.000Z')
    const warnings = () => b.logged.filter(({ message }) => message.includes('is due and was refused'))
    await eventually(() => warnings().length > 0 || undefined, 'the warning')
    await setClock('2026-03-10T01:10:30Z')
    await intake.catchUp()
    expect(warnings()).toHaveLength(1)
    expect((await row())?.next).toBe('2026-03-10 02:00:00+00')
    await setClock('2026-03-10T02:00:00Z')
    await intake.catchUp()
    expect(await dueTimes()).toContain('2026-03-10T02:00:00.000Z')
  })

  it('of another process that is gone is kept for 30 days', async () => {
    const first = await accepting()
    first.schedule('0 3 * * *', cleaning(first), {}, { name: 'gone' })
    await first.catchUp()
    await first.close()
    for (const [at, n] of [
      ['2026-04-08T00:00:00Z', 2],
      ['2026-04-10T00:00:00Z', 1],
    ] as const) {
      await setClock(at)
      const next = await accepting()
      next.schedule('0 3 * * *', cleaning(next), {}, { name: 'here' })
      await next.catchUp()
      await next.close()
      expect(await b.sql('SELECT name FROM spillway.schedules')).toHaveLength(n)
    }
  })

  it('keeps to the local time over a change of it', async () => {
    const intake = await accepting()
    await setClock('2026-03-28T12:00:00Z')
    intake.schedule('30 2 * * *', cleaning(intake), withTime, { timezone: 'Europe/Berlin' })
    await intake.catchUp()
    // 02:30 does not exist on the 29th, and is there twice on October 25th.
    for (const at of ['2026-03-29T01:00:00Z', '2026-03-30T00:30:00Z']) {
      await setClock(at)
      await intake.catchUp()
    }
    expect(await dueTimes()).toEqual(['2026-03-29T01:00:00.000Z', '2026-03-30T00:30:00.000Z'])
    await b.sql("UPDATE spillway.schedules SET next_at = '2026-10-24T00:30:00Z'")
    for (const at of ['2026-10-24T00:30:00Z', '2026-10-25T00:30:00Z', '2026-10-25T01:30:00Z', '2026-10-26T01:30:00Z']) {
      await setClock(at)
      await intake.catchUp()
    }
    expect((await dueTimes()).slice(2)).toEqual([
      '2026-10-24T00:30:00.000Z',
      '2026-10-25T00:30:00.000Z',
      '2026-10-26T01:30:00.000Z',
    ])
  })

  it('is refused at once if it is wrong', async () => {
    const intake = await accepting()
    const op = cleaning(intake)
    const schedule = intake.schedule.bind(intake) as (...given: unknown[]) => void
    const wrong: [unknown[], string][] = [
      [
        ['0 3 * *', op, {}],
        `schedule("clean"): cron must be a cron text: minute, hour, day of month, month, day of week`,
      ],
      [['61 * * * *', op, {}], "given: '61 * * * *': Invalid value for minute: 61"],
      [['0 0 30 2 *', op, {}], "cron must be due at some time; given: '0 0 30 2 *'"],
      [[undefined, op, {}], "cron must be a cron text like '0 3 * * *'; given: undefined"],
      [
        ['0 3 * * *', op, {}, { timezone: 'Mars/Base' }],
        'timezone must be a name of the IANA time zone database, like Europe',
      ],
      [['0 3 * * *', op, {}, { missed: 'all' }], 'missed must be "skip" or "once"; given: \'all\''],
      [['0 3 * * *', op, {}, { timezon: 'UTC' }], 'unknown option "timezon"; did you mean timezone?'],
      [['0 3 * * *', op, {}, { idempotencyKey: 'k' }], 'unknown option "idempotencyKey"'],
      [['0 3 * * *', op, {}, { name: '' }], 'name must be a text of 1 to 200 characters'],
      [['0 3 * * *', op, { at: 5 }], 'schedule("clean"): the body is not valid for clean: '],
    ]
    for (const [given, message] of wrong) expect(() => schedule(...given), message).toThrow(message)
    schedule('0 3 * * *', op, {})
    schedule('0 3 * * *', op, {})
    expect(() => schedule('0 4 * * *', op, {})).toThrow('there is a schedule of this name already')
    expect(() => schedule('0 3 * * *', { type: 'unknown' }, {})).toThrow('unknown is not defined on this intake')
    await intake.close()
    expect(() => schedule('0 5 * * *', op, {})).toThrow('this intake is closed')
  })
})
