/**
 * Open-loop load and its latencies. Submission n is intended for `start + n ÷ rate`, whatever became of those before it,
 * and its latency counts from that instant: a system that falls behind cannot slow its own load down, and what waits
 * because of it is seen to wait.
 */
import { Worker } from 'node:worker_threads'
import { env } from './env.js'

export interface LatencyTask {
  readonly url: string
  readonly ratePerSecond: number
  readonly seconds: number
  /** At the same rate, before; not counted. */
  readonly warmUpSeconds: number
  readonly lanes: number
  /** The width of a point of the series. */
  readonly pointSeconds: number
  /** How the program is to do it; each says what it takes. */
  readonly settings: Readonly<Record<string, unknown>>
}

/** For the thread that keeps the time. */
export interface Beat {
  /** By `performance.timeOrigin + performance.now()`: the threads' own origins differ. */
  readonly startAt: number
  readonly everyMs: number
  readonly beats: number
}

export interface Spread {
  readonly p50: number
  readonly p95: number
  readonly p99: number
  readonly max: number
}

export interface LatencyReport {
  /** Completed ones; the figures are theirs. */
  readonly count: number
  /** Not taken: the honest answer to a rate that is too high, and no latency at all. */
  readonly refused: number
  /** Milliseconds from the intended start until it was completed. */
  readonly completed: Spread
  /** Until the handler had ended; null if it cannot be measured separately. */
  readonly ran: Spread | null
  /** How late the submissions were made. */
  readonly lateness: Spread
  /** Per `pointSeconds` of intended time. */
  readonly series: readonly {
    readonly second: number
    readonly p50: number
    readonly p99: number
    readonly max: number
  }[]
  /** CPU seconds of the process per second. */
  readonly cpu: number
}

/** What has not completed so long after the last submission never will. */
const completeMsMax = 15_000
/** Faster than this the metronome beats for several at once: the thread's wake-ups are not to be measured. */
const beatMsMin = 1

export const readTask = (): LatencyTask => JSON.parse(env('LATENCY_TASK')) as LatencyTask

export class OpenLoop {
  readonly #task: LatencyTask
  readonly #intended: Float64Array
  readonly #started: Float64Array
  /** NaN: it has not; of a refused one it never will. */
  readonly #ran: Float64Array
  /** 0: not yet; NaN: refused. */
  readonly #completed: Float64Array
  readonly #warm: number
  readonly #total: number
  #ended = 0
  #allEnded: () => void = () => undefined
  #fail: (fault: unknown) => void = () => undefined

  constructor(task: LatencyTask) {
    this.#task = task
    this.#warm = Math.round(task.warmUpSeconds * task.ratePerSecond)
    this.#total = this.#warm + Math.round(task.seconds * task.ratePerSecond)
    this.#intended = new Float64Array(this.#total)
    this.#started = new Float64Array(this.#total)
    this.#ran = new Float64Array(this.#total).fill(Number.NaN)
    this.#completed = new Float64Array(this.#total)
  }

  /** The handler of submission n has ended. */
  ran(n: number): void {
    this.#ran[n] ||= performance.now()
  }

  /** Submission n is completed. A second call for the same n is a fault of the measured system. */
  completed(n: number): void {
    // A refusal may mean that nobody confirmed it; it was not taken for all its caller knows.
    if (Number.isNaN(this.#completed[n])) return
    if (this.#completed[n] !== 0) {
      this.#fail(new Error(`submission ${n} was completed twice, or never made`))
      return
    }
    this.#completed[n] = performance.now()
    this.#end()
  }

  /** How long ago submission n was meant to be made. */
  ageMs(n: number): number {
    return performance.now() - (this.#intended[n] ?? 0)
  }

  /** It was not taken. */
  refused(n: number): void {
    this.#completed[n] = Number.NaN
    this.#end()
  }

  #end(): void {
    this.#ended++
    if (this.#ended === this.#total) this.#allEnded()
  }

  /** Makes all submissions, each without waiting for the others, and waits until all are completed. */
  async run(submit: (n: number) => Promise<void>, onWarm: () => void = printMeasuring): Promise<LatencyReport> {
    const finished = new Promise<void>((resolve, reject) => {
      this.#allEnded = resolve
      this.#fail = reject
    })
    const everyMs = 1_000 / this.#task.ratePerSecond
    const beatMs = Math.max(beatMsMin, everyMs)
    const startAt = performance.now() + 100
    const beat: Beat = {
      startAt: performance.timeOrigin + startAt,
      everyMs: beatMs,
      beats: Math.ceil((this.#total * everyMs) / beatMs) + 1,
    }
    const metronome = new Worker(new URL('./latency-metronome.mjs', import.meta.url), { workerData: beat })
    metronome.once('error', (fault) => this.#fail(fault))
    let next = 0
    let cpuAtStart = process.cpuUsage()
    metronome.on('message', (beaten: number) => {
      const now = performance.now()
      // By the beat, not by our own clock: that may be some microseconds behind the thread's.
      const due = Math.min(this.#total, Math.floor((beaten * beatMs) / everyMs + 1e-6) + 1)
      for (; next < due; next++) {
        if (next === this.#warm) {
          cpuAtStart = process.cpuUsage()
          onWarm()
        }
        this.#intended[next] = startAt + next * everyMs
        this.#started[next] = now
        submit(next).catch((fault: unknown) => this.#fail(fault))
      }
    })
    try {
      await this.#orLate(finished, startAt + this.#total * everyMs - performance.now() + completeMsMax)
    } finally {
      await metronome.terminate()
    }
    return this.#report(process.cpuUsage(cpuAtStart))
  }

  async #orLate(finished: Promise<void>, ms: number): Promise<void> {
    let timer: NodeJS.Timeout | undefined
    const late = new Promise<never>((_resolve, reject) => {
      timer = setTimeout(() => {
        const left = this.#total - this.#ended
        reject(new Error(`${left} of ${this.#total} were not completed ${completeMsMax / 1_000} s after the last`))
      }, ms)
    })
    try {
      await Promise.race([finished, late])
    } finally {
      clearTimeout(timer)
    }
  }

  #report(cpu: NodeJS.CpuUsage): LatencyReport {
    const { seconds, pointSeconds, ratePerSecond } = this.#task
    const since = (until: Float64Array, from: number, to: number): Float64Array =>
      until
        .subarray(from, to)
        .map((at, i) => at - (this.#intended[from + i] ?? 0))
        .filter((ms) => !Number.isNaN(ms))
    const completed = since(this.#completed, this.#warm, this.#total)
    const point = Math.round(pointSeconds * ratePerSecond)
    const series = Array.from({ length: Math.ceil((this.#total - this.#warm) / point) }, (_, i) => {
      const from = this.#warm + i * point
      const spread = spreadOf(since(this.#completed, from, Math.min(from + point, this.#total)))
      return { second: i * pointSeconds, p50: spread.p50, p99: spread.p99, max: spread.max }
    })
    return {
      count: completed.length,
      refused: this.#total - this.#warm - completed.length,
      completed: spreadOf(completed),
      ran: this.#ran.some((at) => at > 0) ? spreadOf(since(this.#ran, this.#warm, this.#total)) : null,
      lateness: spreadOf(since(this.#started, this.#warm, this.#total)),
      series,
      cpu: (cpu.user + cpu.system) / 1e6 / seconds,
    }
  }
}

/** From here on the section may look at the tables. */
function printMeasuring(): void {
  process.stdout.write('measuring\n')
}

export function printReport(report: LatencyReport): void {
  process.stdout.write(`latency ${JSON.stringify(report)}\n`)
}

/** By nearest rank. One sort for all: of the 1,800,000 of five minutes it is what takes the time. */
function spreadOf(values: Float64Array): Spread {
  const sorted = values.slice().sort()
  const of = (share: number): number =>
    Number((sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)] ?? Number.NaN).toFixed(3))
  return { p50: of(0.5), p95: of(0.95), p99: of(0.99), max: of(1) }
}
