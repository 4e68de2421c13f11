/**
 * Removes what has been kept long enough (mq_sweep), in short steps over the partitions, one instance at a time:
 *
 *   waiting ──its time──► sweeping ──to the last partition, or long enough, or a fault──► waiting
 *                             └──────────another instance sweeps──────────────────────────────┘
 *
 * Between two rounds it waits for a multiple of what the last one took: with very many partitions it comes around more seldom,
 * and never takes more than its share of the database.
 */
import type { IntakeApi, IntakeLog } from '../../index.js'

export interface Swept {
  removed: number
  givenUp: number
  traces: number
}

export interface SweepStore {
  /** Runs `work` while no other instance does; null: another does. */
  alone(work: () => Promise<Swept>): Promise<Swept | null>
  /** Looks at the next partitions behind `after`, and removes `most` messages at most; `last` null: those were the last. */
  step(most: number, after: string | null): Promise<Swept & { last: string | null }>
}

export interface SweeperOptions {
  store: SweepStore
  isReady: () => boolean
  log: IntakeLog
  /** Default 5,000. */
  everyMs?: number
  /** Of one transaction: it holds locks that pushes wait for. Default 2,000. */
  most?: number
  /** In milliseconds. */
  now?: () => number
  /** Calls once, after so long; answers how to forget it. */
  after?: (ms: number, call: () => void) => () => void
}

const everyMsDefault = 5_000
const mostDefault = 2_000
/** A tenth of the time, at most. */
const restShare = 9
/** The lock of `alone` is not held for longer; the next round goes on from there. */
const roundMs = 20_000

export class Sweeper {
  readonly #options: Required<SweeperOptions>
  #forget: () => void = () => undefined
  #stopped = false
  #sweeping: Promise<void> = Promise.resolve()
  /** The last partition that was looked at. */
  #at: string | null = null

  constructor(options: SweeperOptions) {
    this.#options = {
      everyMs: everyMsDefault,
      most: mostDefault,
      now: () => performance.now(),
      after: timer,
      ...options,
    }
  }

  start(): void {
    this.#next(this.#options.everyMs)
  }

  /** Resolves when nothing of it runs any more. */
  async stop(): Promise<void> {
    this.#stopped = true
    this.#forget()
    await this.#sweeping
  }

  #next(ms: number): void {
    if (this.#stopped) return
    this.#forget = this.#options.after(ms, () => {
      this.#sweeping = this.#round()
    })
  }

  async #round(): Promise<void> {
    const { log, everyMs, isReady, store, now } = this.#options
    const started = now()
    try {
      const swept = isReady() ? await store.alone(() => this.#steps(started)) : null
      if (swept !== null && swept.removed + swept.givenUp + swept.traces > 0) {
        log.info({ ...swept }, 'old messages are removed')
      }
    } catch (fault) {
      log.warn({ err: fault }, 'old messages could not be removed; it is tried again')
    }
    this.#next(Math.max(everyMs, (now() - started) * restShare))
  }

  async #steps(started: number): Promise<Swept> {
    const { store, most, now } = this.#options
    const all: Swept = { removed: 0, givenUp: 0, traces: 0 }
    while (!this.#stopped) {
      const { removed, givenUp, traces, last } = await store.step(most, this.#at)
      all.removed += removed
      all.givenUp += givenUp
      all.traces += traces
      // When it took all that it may, the same partitions may have more.
      const isFull = Math.max(removed, givenUp, traces) >= most
      if (!isFull) this.#at = last
      if ((!isFull && last === null) || now() - started >= roundMs) break
    }
    return all
  }
}

function timer(ms: number, call: () => void): () => void {
  const handle = setTimeout(call, ms)
  handle.unref()
  return () => clearTimeout(handle)
}

const stepMs = 10_000
const stepPartitions = 500

export function sweepStore(intake: IntakeApi, schema: string): SweepStore {
  return {
    alone: async (work) => {
      // One statement in a while for those who keep everything.
      const { rows: needs } = await intake.read<{ needed: boolean }>(
        `SELECT EXISTS (SELECT FROM ${schema}.mq_queues q WHERE q.retention_enabled OR q.max_wait_seconds > 0) OR EXISTS (SELECT FROM ${schema}.mq_traces) AS needed`,
      )
      if (needs[0]?.needed !== true) return null
      return intake.transaction(
        async (tx) => {
          const { rows } = await tx.query<{ mine: boolean }>(
            `SELECT pg_try_advisory_xact_lock(hashtext('spillway.mq_sweep'), hashtext($1)) AS mine`,
            [schema],
          )
          return rows[0]?.mine === true ? work() : null
        },
        { timeoutMs: roundMs + stepMs },
      )
    },
    step: (most, after) =>
      intake.transaction(
        async (tx) => {
          const { rows } = await tx.query<{ removed: number; given_up: number; traces: number; last: string | null }>(
            `SELECT removed, given_up, traces, last FROM ${schema}.mq_sweep($1, $2, $3)`,
            [most, after, stepPartitions],
          )
          const [row] = rows
          if (row === undefined) throw new Error('a sweep without an answer')
          return { removed: row.removed, givenUp: row.given_up, traces: row.traces, last: row.last }
        },
        { timeoutMs: stepMs },
      ),
  }
}
