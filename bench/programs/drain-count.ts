/**
 * What the drain programs share: the task, the counting and the report.
 *
 * Jobs are numbered. Number n belongs to lane n mod lanes, so that the number alone gives its lane and its place in it:
 * a handler that sees each number once, and in each lane in steps of `lanes`, has run everything once and in order.
 */
import { setTimeout as delay } from 'node:timers/promises'
import pg from 'pg'
import { env } from './env.js'

export interface DrainTask {
  readonly url: string
  readonly stage: 'preload' | 'drain'
  readonly count: number
  /** The number of the first job. */
  readonly from: number
  readonly lanes: number
  /** How the peer is set up; each program says what it takes. */
  readonly settings: Readonly<Record<string, unknown>>
  /** Stop after this many jobs, with the rest still pending; 0: drain all. */
  readonly stopAfter: number
}

export interface Preloaded {
  readonly count: number
  readonly seconds: number
}

export interface Drained {
  readonly count: number
  readonly doubled: number
  readonly missing: number
  readonly strange: number
  /** Steps out of order within a lane. Peers that keep no order are not judged by it. */
  readonly disordered: number
  /** False: the time was up before all had run, or it was asked to stop early. */
  readonly isComplete: boolean
  /**
   * The measured part: what ran after the first tenth, and from then until nothing unfinished was left in the store (or
   * until the last handler call, when not all were to be run). The first tenth is left out because it is not the same
   * for all: a worker that fetches 5,000 at once has paid for them before its first handler call.
   */
  readonly steadyCount: number
  readonly steadySeconds: number
  /** From the worker's start to the end. */
  readonly wallSeconds: number
  /** CPU of the worker's process in the measured part. */
  readonly cpuSeconds: number
}

/** A worker that cannot drain all jobs in this time is measured by the jobs it has run. */
const limitMs = 40_000
const warmUpShare = 0.1

const paddingText = 'x'.repeat(80)

export interface Job {
  n: number
  text: string
}

/** About 100 bytes of JSON, the same for all. */
export const jobOf = (n: number): Job => ({ n, text: paddingText })

export const readTask = (): DrainTask => JSON.parse(env('DRAIN_TASK')) as DrainTask

/** The last thing a program does, after it has closed what it opened: then it may be stopped. */
export function printReport(what: 'preloaded' | 'drained', report: Preloaded | Drained): void {
  process.stdout.write(`${what} ${JSON.stringify(report)}\n`)
}

/** Hands over all jobs in portions. */
export async function preload(
  task: DrainTask,
  portion: number,
  insert: (numbers: readonly number[]) => Promise<void>,
): Promise<Preloaded> {
  const began = performance.now()
  for (let at = 0; at < task.count; at += portion) {
    const size = Math.min(portion, task.count - at)
    await insert(Array.from({ length: size }, (_, i) => task.from + at + i))
  }
  return { count: task.count, seconds: (performance.now() - began) / 1_000 }
}

export class DrainCount {
  readonly #task: DrainTask
  readonly #seen: Uint8Array
  readonly #last: Float64Array
  readonly #goal: number
  readonly #warm: number
  readonly #allRan: Promise<void>
  #resolve: () => void = () => undefined
  #count = 0
  #doubled = 0
  #strange = 0
  #disordered = 0
  #startedAt = 0
  #warmAt = 0
  #lastAt = 0
  #cpuAtWarm: NodeJS.CpuUsage = { user: 0, system: 0 }

  constructor(task: DrainTask) {
    this.#task = task
    this.#seen = new Uint8Array(task.count)
    this.#last = new Float64Array(task.lanes).fill(-1)
    this.#goal = task.stopAfter > 0 ? task.stopAfter : task.count
    this.#warm = Math.max(1, Math.round(this.#goal * warmUpShare))
    this.#allRan = new Promise((resolve) => {
      this.#resolve = resolve
    })
  }

  /** The worker begins to look for work. */
  started(): void {
    this.#startedAt = performance.now()
  }

  /** For the handler. */
  ran(n: number): void {
    const index = n - this.#task.from
    const seen = this.#seen[index]
    if (seen === undefined) this.#strange++
    else if (seen > 0) this.#doubled++
    else this.#seen[index] = 1
    this.#order(n)
    this.#count++
    if (this.#count === this.#warm) {
      this.#warmAt = performance.now()
      this.#cpuAtWarm = process.cpuUsage()
    }
    if (this.#count === this.#goal) {
      this.#lastAt = performance.now()
      this.#resolve()
    }
  }

  #order(n: number): void {
    const { from, lanes, stopAfter } = this.#task
    const lane = n % lanes
    const last = this.#last[lane] ?? -1
    // Where a drain begins in the middle, the first of a lane may have any number.
    const isNext =
      last >= 0
        ? n === last + lanes
        : stopAfter > 0 || n === lane + Math.max(0, Math.ceil((from - lane) / lanes)) * lanes
    if (!isNext) this.#disordered++
    this.#last[lane] = n
  }

  /**
   * Waits for the last handler call, then for `settled` (if a worker can say that the store has its results), and then
   * asks `isEmpty` until the store has nothing unfinished. What was empty was so when it was asked: asking is not timed.
   */
  async finish(isEmpty: () => Promise<boolean>, settled?: () => Promise<void>): Promise<Drained> {
    const isLate = await this.#late()
    const isComplete = !isLate && this.#task.stopAfter === 0
    let endedAt = isLate ? performance.now() : this.#lastAt
    if (isComplete) {
      await settled?.()
      endedAt = performance.now()
      while (!(await isEmpty())) {
        await delay(1)
        endedAt = performance.now()
      }
    }
    const cpu = process.cpuUsage(this.#cpuAtWarm)
    const warmAt = this.#warmAt === 0 ? this.#startedAt : this.#warmAt
    const missing = isComplete ? this.#seen.reduce((sum, seen) => sum + (seen === 0 ? 1 : 0), 0) : 0
    return {
      count: this.#count,
      doubled: this.#doubled,
      missing,
      strange: this.#strange,
      disordered: this.#disordered,
      isComplete,
      // Those that ran after an early stop was due are not in the measured time.
      steadyCount: Math.min(this.#count, this.#goal) - (this.#warmAt === 0 ? 0 : this.#warm),
      steadySeconds: (endedAt - warmAt) / 1_000,
      wallSeconds: (endedAt - this.#startedAt) / 1_000,
      cpuSeconds: (cpu.user + cpu.system) / 1e6,
    }
  }

  async #late(): Promise<boolean> {
    let timer: NodeJS.Timeout | undefined
    const late = new Promise<boolean>((resolve) => {
      timer = setTimeout(() => resolve(true), limitMs)
    })
    const isLate = await Promise.race([this.#allRan.then(() => false), late])
    clearTimeout(timer)
    return isLate
  }
}

/** Asks a yes-or-no question on a connection of its own, which is opened beforehand. */
export async function asking(url: string, sql: string): Promise<{ ask(): Promise<boolean>; end(): Promise<void> }> {
  const client = new pg.Client({ connectionString: url })
  await client.connect()
  return {
    ask: async () => (await client.query<{ yes: boolean }>(`SELECT ${sql} AS yes`)).rows[0]?.yes === true,
    end: () => client.end(),
  }
}
