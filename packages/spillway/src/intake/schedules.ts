/**
 * Recurring work. Each schedule has a row in the store, with its next due time:
 *
 *   defined ──registered──► waits ──due, by the store's clock──► locked by one process: queued and moved in one transaction
 *                             ▲                                                  └──committed, or nothing happened──┐
 *                             └─────────────────────────────────────────────────────────────────────────────────────┘
 *
 * So there is one operation for a due time, whatever processes there are and whenever they die. The heartbeat looks for due
 * ones: an operation is queued a second after its due time at most. A due time that no process could queue within a minute was missed.
 */
import { Cron } from 'croner'
import { check, checkOptions, isFunction, isText, OptionError, oneOf, type Rule, shown } from '../core/options.js'
import type { IntakeLog } from '../core/settings.js'
import type { OpenTx, Store } from '../store/port.js'
import type { Answer } from './answer.js'
import type { Definition } from './define.js'
import { type OperationOptions, operationRules } from './operation-options.js'
import { type SubmitOptions, traceparentRule } from './submission.js'

export interface ScheduleOptions
  extends Omit<OperationOptions, 'idempotencyKey' | 'keyedOn' | 'delay' | 'runAt'>,
    Pick<SubmitOptions, 'traceparent'> {
  /** Over all processes. Two schedules of one type need names. Default: the operation's type. */
  name?: string
  /** A name of the IANA database: `Europe/Berlin`. Default `UTC`. */
  timezone?: string
  /**
   * For due times that passed more than a minute ago, while no process ran or nothing could be queued: `skip` them, or queue
   * one operation (`once`) for the last of them. Default `skip`.
   */
  missed?: 'skip' | 'once'
}

/** What is queued; the due time is known when it is due only. */
export type ScheduleBody<Body> = Body | ((dueAt: Date) => Body)

interface Schedule {
  readonly name: string
  readonly cron: string
  readonly timezone: string
  readonly missed: 'skip' | 'once'
  readonly definition: Definition
  readonly body: (dueAt: Date) => unknown
  /** Of a body that is always the same; else null. */
  readonly text: string | null
  readonly submit: SubmitOptions
  readonly times: Cron
  isRegistered: boolean
  /** Its last due time could not be queued, which was logged. */
  isTroubled: boolean
}

export interface SchedulesOptions {
  store: Store
  log: IntakeLog
  isDraining(): boolean
  /** Throws when a body that is always the same is not valid. */
  checkBody(call: string, definition: Definition, body: unknown, options: SubmitOptions): void
  enqueue(definition: Definition, body: unknown, tx: OpenTx, options: SubmitOptions): Promise<Answer>
}

const schedulesMax = 1_000
/** Due times that are older were missed. */
const missedAfterMs = 60_000
/** A schedule that no process defines is kept for so long: its definition may come back. */
const keepMs = 30 * 86_400_000
const seeEveryMs = 3_600_000
/** Other tasks of the heartbeat wait for this long at most; the rest is queued with the next one. */
const shareMs = 500
const transactionMs = 5_000

export class Schedules {
  readonly #o: SchedulesOptions
  readonly #all = new Map<string, Schedule>()
  #seenAt = Number.NEGATIVE_INFINITY

  constructor(options: SchedulesOptions) {
    this.#o = options
  }

  add(cron: string, definition: Definition, body: unknown, options: ScheduleOptions): void {
    const call = `schedule(${JSON.stringify(options?.name ?? definition.type)})`
    const schedule = scheduleOf(call, cron, definition, body, options)
    const known = this.#all.get(schedule.name)
    if (known !== undefined) {
      if (isSame(known, schedule)) return
      throw new OptionError(
        `${call}: there is a schedule of this name already, with another text, type, body or options; give each a name of its own`,
      )
    }
    if (this.#all.size >= schedulesMax) throw new OptionError(`${call}: there are ${schedulesMax} schedules already`)
    if (schedule.text !== null) this.#o.checkBody(call, definition, body, schedule.submit)
    this.#all.set(schedule.name, schedule)
  }

  /** The store was emptied. */
  forget(): void {
    for (const schedule of this.#all.values()) schedule.isRegistered = false
  }

  /** Runs with each heartbeat. */
  async look(): Promise<void> {
    if (this.#all.size === 0 || this.#o.isDraining()) return
    await this.#register()
    await this.#see()
    const until = performance.now() + shareMs
    for (const name of await this.#o.store.dueSchedules([...this.#all.keys()])) {
      if (this.#o.isDraining() || performance.now() > until) return
      const schedule = this.#all.get(name)
      if (schedule !== undefined) await this.#fire(schedule)
    }
  }

  async #register(): Promise<void> {
    const fresh = [...this.#all.values()].filter(({ isRegistered }) => !isRegistered)
    if (fresh.length === 0) return
    const { nowMs, lastMs } = await this.#o.store.scheduleTimes(fresh.map(({ name }) => name))
    for (const schedule of fresh) {
      const { name, cron, timezone, definition, times } = schedule
      const next = times.nextRun(new Date(Math.max(nowMs, lastMs[name] ?? 0)))
      schedule.isRegistered = await this.#o.store.putSchedule({ name, cron, timezone, type: definition.type, next })
    }
  }

  async #see(): Promise<void> {
    const now = performance.now()
    if (now - this.#seenAt < seeEveryMs) return
    const removed = await this.#o.store.seeSchedules([...this.#all.keys()], keepMs)
    this.#seenAt = now
    if (removed > 0) this.#o.log.info({ removed }, 'schedules were removed that no process has defined for 30 days')
  }

  async #fire(schedule: Schedule): Promise<void> {
    const { name } = schedule
    try {
      const trouble = await this.#queue(schedule)
      if (trouble !== null && !schedule.isTroubled) {
        this.#o.log.warn(
          { schedule: name, refusal: trouble },
          'a schedule is due and was refused; it is retried each second',
        )
      }
      schedule.isTroubled = trouble !== null
    } catch (fault) {
      if (!schedule.isTroubled && !this.#o.isDraining()) {
        this.#o.log.warn(
          { err: fault, schedule: name },
          'a schedule is due and could not be queued; it is retried each second',
        )
      }
      schedule.isTroubled = true
    }
  }

  /** Queues what is due, and moves the schedule. Returns the code of a refusal that may pass; then nothing happened. */
  async #queue(schedule: Schedule): Promise<string | null> {
    const { store, log } = this.#o
    const { name, definition } = schedule
    const tx = await store.begin(transactionMs, 'operators')
    try {
      const row = await store.takeSchedule(tx, { ...schedule, type: definition.type })
      if (row === null) {
        await tx.rollback()
        return null
      }
      const { due, next, last, missed } = dueTimes(schedule, row)
      for (const dueAt of due) {
        const answer = await this.#o.enqueue(definition, schedule.body(dueAt), tx, schedule.submit)
        if (answer.kind === 'refused') {
          if (answer.refusal.retryAfterMs !== undefined) {
            await tx.rollback()
            return answer.refusal.code
          }
          log.error(
            { schedule: name, dueAt, refusal: answer.refusal },
            'an operation of a schedule was refused; its due time is skipped',
          )
        }
      }
      await store.moveSchedule(tx, name, last, next)
      await tx.commit()
      if (missed)
        log.warn({ schedule: name, policy: schedule.missed, nextAt: next }, 'due times of a schedule were missed')
      log.debug({ schedule: name, due, nextAt: next }, 'a schedule was due')
      return null
    } catch (fault) {
      await tx.rollback()
      throw fault
    }
  }
}

interface DueTimes {
  /** To be queued. */
  due: Date[]
  /** The last one that is handled by that. */
  last: Date
  next: Date | null
  missed: boolean
}

/** `nextMs` is the first due time that was not handled. */
export function dueTimes(
  { times, missed }: Pick<Schedule, 'times' | 'missed'>,
  { nextMs, nowMs }: { nextMs: number; nowMs: number },
): DueTimes {
  const first = new Date(nextMs)
  const limit = new Date(nowMs - missedAfterMs)
  const isMissed = first < limit
  const due: Date[] = []
  let last = first
  let at: Date | null = first
  if (isMissed) {
    // It may be of an earlier text, which had other times.
    const [before] = times.previousRuns(1, limit)
    if (before !== undefined && before > last) last = before
    if (missed === 'once') due.push(last)
    at = times.nextRun(new Date(Math.max(last.getTime(), limit.getTime() - 1)))
  }
  while (at !== null && at.getTime() <= nowMs) {
    due.push(at)
    last = at
    at = times.nextRun(at)
  }
  return { due, last, next: at, missed: isMissed }
}

const isName: Rule = (value) =>
  typeof value === 'string' && value !== '' && value.length <= 200 && !value.includes('\0')
    ? null
    : 'a text of 1 to 200 characters'

/** Each due time is queued once, and nobody waits for it. */
const notHere = ['idempotencyKey', 'keyedOn', 'delay', 'runAt']
const rules: Record<string, Rule> = {
  name: isName,
  timezone: isTimezone,
  missed: oneOf('skip', 'once'),
  traceparent: traceparentRule,
  ...Object.fromEntries(Object.entries(operationRules).filter(([name]) => !notHere.includes(name))),
}

function scheduleOf(
  call: string,
  cron: string,
  definition: Definition,
  body: unknown,
  options: ScheduleOptions,
): Schedule {
  checkOptions(call, options, rules)
  const { name = definition.type, timezone = 'UTC', missed = 'skip', ...submit } = options
  const isMade = isFunction(body) === null
  return {
    ...{ name, cron, timezone, missed, definition, submit },
    times: timesOf(call, cron, timezone),
    body: isMade ? (body as (dueAt: Date) => unknown) : () => body,
    text: isMade ? null : JSON.stringify(body ?? null),
    isRegistered: false,
    isTroubled: false,
  }
}

/** Computes due times only: no timer runs. */
function timesOf(call: string, cron: unknown, timezone: string): Cron {
  check(call, 'cron', cron, (value) => (isText(value) === null ? null : "a cron text like '0 3 * * *'"))
  let times: Cron
  try {
    times = new Cron(cron as string, { timezone, paused: true })
  } catch (fault) {
    const reason = (fault as Error).message.replace(/^CronPattern: /, '')
    throw new OptionError(
      `${call}: cron must be a cron text: minute, hour, day of month, month, day of week (and seconds before them, if needed), as in '0 3 * * *'; given: ${shown(cron)}: ${reason}`,
      { cause: fault },
    )
  }
  if (times.nextRun() === null) throw new OptionError(`${call}: cron must be due at some time; given: ${shown(cron)}`)
  return times
}

function isTimezone(value: unknown): string | null {
  const wanted = 'a name of the IANA time zone database, like Europe/Berlin'
  if (typeof value !== 'string' || value === '') return wanted
  try {
    new Intl.DateTimeFormat('en', { timeZone: value })
    return null
  } catch {
    return wanted
  }
}

/** The same in every respect: the definitions of a process may be made twice. */
function isSame(a: Schedule, b: Schedule): boolean {
  const textOf = ({ cron, timezone, missed, definition, submit }: Schedule): string =>
    JSON.stringify([cron, timezone, missed, definition.type, submit])
  return textOf(a) === textOf(b) && (a.text === null ? b.text === null : a.text === b.text)
}
