/**
 * The only way to remove expired rows. Every kind of row that expires is a task, which removes a batch at a time:
 *
 *   waiting ──due──► takes the turn ──► a batch ──full──► rests, and is due again
 *      ▲                  │                └──not full──► rests, and is due after its interval
 *      └─another has it───┘
 *
 * The turn is a row in the store: over all processes one batch runs at a time, and after one that took t nobody sweeps for
 * 9 t. So sweeping goes on for as long as batches are full, and takes a tenth of the time at most. Due tasks take turns. A
 * task whose batches were all full for a minute is behind: rows expire faster than they may be removed, or very many expired
 * at once. If a process dies in its turn, others take over when its hold is over.
 */

import type { IntakeLog } from '../core/settings.js'
import type { Metrics } from '../metrics/metrics.js'
import type { Store } from '../store/port.js'
import { withDeadline } from '../time/with-deadline.js'

export interface SweptBatch {
  /** Rows, by table. */
  removed: Readonly<Record<string, number>>
  /** It reached its batch size, and there may be more. */
  isFull: boolean
  /** It has not looked everywhere yet. Default: whether it is full. */
  goesOn?: boolean
}

export interface SweepTask {
  name: string
  everyMs: number
  batch(): Promise<SweptBatch>
}

export interface SweepsOptions {
  store: Pick<Store, 'takeSweepTurn' | 'endSweepTurn'>
  isReady: () => boolean
  metrics: Pick<Metrics, 'sweptRows' | 'sweepSeconds' | 'sweepBehind'>
  log: Pick<IntakeLog, 'info' | 'warn'>
  /** In milliseconds. */
  now?: () => number
}

interface Known extends SweepTask {
  dueAt: number
  /** Since when all its batches were full. */
  fullSince: number | null
  isBehind: boolean
  /** In this round. */
  removed: Record<string, number>
}

/** A tenth of the time, at most. */
const restShare = 9
const holdMs = 120_000
const behindMs = 60_000
/** A process that starts may find rows that expired while none ran. */
const firstMs = 2_000
const stopMs = 2_000
/** While a batch runs, its hold does not say when it ends. */
const askAgainMs = 1_000
/** After a failure, or if the store cannot be reached: rows do not wait for a whole interval because of one moment. */
const retryMs = 5_000
/** The last holder of the turn waits longer than the others. */
const politeMs = 10

export class Sweeps {
  readonly #o: SweepsOptions
  readonly #now: () => number
  readonly #tasks = new Set<Known>()
  #started = false
  #stopped = false
  #timer: NodeJS.Timeout | undefined
  #running: Promise<void> | null = null
  #restUntil = 0

  constructor(options: SweepsOptions) {
    this.#o = options
    this.#now = options.now ?? (() => performance.now())
  }

  /** Returns a function that removes it. */
  add(task: SweepTask): () => Promise<void> {
    const known: Known = {
      ...task,
      batch: () => task.batch(),
      ...{
        dueAt: this.#now() + spread(Math.min(task.everyMs, firstMs)),
        fullSince: null,
        isBehind: false,
        removed: {},
      },
    }
    this.#tasks.add(known)
    this.#o.metrics.sweepBehind.labels(task.name).set(0)
    this.#schedule()
    return async () => {
      this.#tasks.delete(known)
      await this.#ended()
    }
  }

  start(): void {
    this.#started = true
    this.#schedule()
  }

  /** Stops between two batches. Resolves when none runs any more, or after a time limit: the database may not answer. */
  async stop(): Promise<void> {
    this.#stopped = true
    clearTimeout(this.#timer)
    await this.#ended()
  }

  async #ended(): Promise<void> {
    if (this.#running !== null) await withDeadline(this.#running, stopMs, () => undefined)
  }

  #schedule(): void {
    if (!this.#started || this.#stopped || this.#running !== null || this.#tasks.size === 0) return
    clearTimeout(this.#timer)
    const due = Math.max(this.#restUntil, Math.min(...[...this.#tasks].map(({ dueAt }) => dueAt)))
    this.#timer = setTimeout(
      () => {
        this.#running = this.#turn().finally(() => {
          this.#running = null
          this.#schedule()
        })
      },
      Math.max(0, due - this.#now()),
    )
    this.#timer.unref()
  }

  async #turn(): Promise<void> {
    const { store, isReady, log } = this.#o
    const [task] = [...this.#tasks].sort((a, b) => a.dueAt - b.dueAt)
    if (task === undefined) return
    if (!isReady()) {
      task.dueAt = this.#now() + spread(Math.min(task.everyMs, retryMs))
      return
    }
    const started = this.#now()
    try {
      const waitMs = await store.takeSweepTurn(holdMs)
      if (waitMs > 0) {
        this.#restUntil = this.#now() + Math.min(waitMs, askAgainMs) + Math.random() * politeMs * 0.8
        return
      }
      let tookMs = 0
      try {
        const batch = await task.batch()
        tookMs = this.#now() - started
        this.#count(task, batch)
      } finally {
        tookMs ||= this.#now() - started
        this.#o.metrics.sweepSeconds.inc(tookMs / 1_000)
        this.#restUntil = this.#now() + tookMs * restShare + politeMs
        await store.endSweepTurn(tookMs * restShare)
      }
    } catch (fault) {
      task.dueAt = this.#now() + spread(Math.min(task.everyMs, retryMs))
      log.warn(
        { err: fault, task: task.name, retryMs: Math.round(task.dueAt - this.#now()) },
        'sweep failed, retrying later',
      )
    }
  }

  #count(task: Known, { removed, isFull, goesOn = isFull }: SweptBatch): void {
    const { metrics, log } = this.#o
    for (const [table, rows] of Object.entries(removed)) {
      if (rows === 0) continue
      metrics.sweptRows.labels(table).inc(rows)
      task.removed[table] = (task.removed[table] ?? 0) + rows
    }
    const now = this.#now()
    task.dueAt = goesOn ? now : now + spread(task.everyMs)
    task.fullSince = isFull ? (task.fullSince ?? now) : null
    const isBehind = task.fullSince !== null && now - task.fullSince >= behindMs
    if (isBehind !== task.isBehind) {
      task.isBehind = isBehind
      metrics.sweepBehind.labels(task.name).set(isBehind ? 1 : 0)
      const fields = { task: task.name, removed: task.removed }
      if (isBehind) log.warn(fields, 'the sweep is behind: rows expire faster than a tenth of the time can remove them')
      else log.info(fields, 'the sweep has caught up')
    }
    if (goesOn) return
    if (Object.keys(task.removed).length > 0) {
      log.info({ task: task.name, removed: task.removed }, 'expired rows were removed')
    }
    task.removed = {}
  }
}

/** Jitter, so that processes that start together do not sweep together. */
const spread = (ms: number): number => ms * (0.9 + Math.random() * 0.2)

/** With the queue's own tables as the first task. */
export function queueSweeps(store: Store, retentionMs: number, options: Omit<SweepsOptions, 'store'>): Sweeps {
  const sweeps = new Sweeps({ ...options, store })
  sweeps.add({
    name: 'queue',
    everyMs: 60_000,
    batch: async () => {
      const swept = await store.sweep(retentionMs)
      const { keys: idempotency, rate_rows: rates, lanes, cancels, history, partitions_dropped, isFull } = swept
      return {
        removed: { idempotency, rates, lanes, cancels, history, history_partitions: partitions_dropped },
        isFull,
      }
    },
  })
  sweeps.add({
    name: 'notes',
    everyMs: 300_000,
    batch: async () => {
      const { failures, progress, isFull } = await store.sweepNotes()
      return { removed: { failures, progress }, isFull }
    },
  })
  return sweeps
}
