/** Objectives (contract §5): the counts of all processes, over windows, compared with their targets. */
import { randomUUID } from 'node:crypto'
import { type Objective, type ObjectiveName, objectiveNames } from '@spillway/protocol/wire'
import type { IntakeApi } from 'spillway/workload'
import { Batches } from './batches.js'
import { type Counted, objectiveView } from './figures.js'
import { type ObjectivesOptions, objectiveTiming } from './options.js'

export type { ObjectivesOptions } from './options.js'
export { objectiveRoutes } from './routes.js'

export interface Objectives {
  readonly intake: IntakeApi
  /** `good` of `total`: messages or seconds. Adds to sums in memory. */
  count(objective: ObjectiveName, good: number, total: number): void
  /** The counts of all processes, some seconds old. */
  read(): Promise<Objective[]>
  /** Call before the intake is closed: adds this process's counts if the store answers. */
  close(): Promise<void>
}

interface Sums extends Record<string, unknown> {
  objective: string
  hour_good: number
  hour_total: number
  month_good: number
  month_total: number
}

const nothing: Counted = { good: 0, total: 0 }
const closeMs = 2_000

export function defineObjectives(intake: IntakeApi, options: ObjectivesOptions): Objectives {
  const { schema, log, metrics } = options
  const timing = { ...objectiveTiming, ...options.timing }
  const writer = randomUUID()
  const batches = new Batches()

  const flush = async (): Promise<void> => {
    const batch = batches.next()
    if (batch === null) return
    const { number, counts } = batch
    await intake.statements.release(`SELECT ${schema}.objective_add($1, $2, $3, $4, $5)`, [
      ...[writer, number, counts.map(({ objective }) => objective)],
      ...[counts.map(({ good }) => good), counts.map(({ total }) => total)],
    ])
    batches.confirmed()
  }
  const read = async (): Promise<Objective[]> => {
    const { rows } = await intake.read<Sums>(
      `SELECT objective, hour_good, hour_total, month_good, month_total FROM ${schema}.objective_sums()`,
    )
    return objectiveNames.map((name) => {
      const row = rows.find(({ objective }) => objective === name)
      if (row === undefined) return objectiveView(name, { '1h': nothing, '30d': nothing })
      return objectiveView(name, {
        '1h': { good: row.hour_good, total: row.hour_total },
        '30d': { good: row.month_good, total: row.month_total },
      })
    })
  }
  const show = async (): Promise<void> => {
    for (const { name, error_budget_left, burn_rate } of await read()) {
      metrics.errorBudgetLeft.set({ objective: name }, error_budget_left)
      metrics.burnRate.set({ objective: name }, burn_rate)
    }
  }
  const stopSweep = intake.core.sweeps.add({
    name: 'objectives',
    everyMs: timing.sweepMs,
    // One row for each minute of two hours and each hour of a month: never many.
    batch: async () => {
      const { rows } = await intake.transaction((tx) =>
        tx.query<{ n: number }>(`SELECT ${schema}.objective_sweep() AS n`),
      )
      return { removed: { objective_counts: rows[0]?.n ?? 0 }, isFull: false }
    },
  })

  let closing = false
  const timers = new Set<NodeJS.Timeout>()
  /** One at a time, so that a batch is not sent twice at once. */
  let running: Promise<void> = Promise.resolve()
  const inTurn = (whenFailed: string, work: () => Promise<void>): Promise<void> => {
    running = running.then(work).catch((fault: unknown) => {
      log.warn({ err: fault }, whenFailed)
    })
    return running
  }
  const every = (ms: number, whenFailed: string, work: () => Promise<void>): void => {
    const timer = setTimeout(() => {
      timers.delete(timer)
      const done = intake.core.isReady ? inTurn(whenFailed, work) : Promise.resolve()
      void done.then(() => closing || every(ms, whenFailed, work))
    }, ms)
    timer.unref()
    timers.add(timer)
  }
  every(timing.flushMs, 'counts could not be added to the objectives; they are sent again', flush)
  every(timing.readMs, 'the objectives could not be read; their gauges are old', show)

  return {
    intake,
    count: (objective, good, total) => batches.add(objective, good, total),
    read,
    close: async () => {
      closing = true
      await stopSweep()
      for (const timer of timers) clearTimeout(timer)
      let late: NodeJS.Timeout | undefined
      const patience = new Promise<void>((resolve) => {
        late = setTimeout(resolve, closeMs)
      })
      // Twice: the batch in progress, and the counts since then.
      const last = async (): Promise<void> => {
        await flush()
        await flush()
      }
      await Promise.race([inTurn('the last counts could not be added to the objectives, and are lost', last), patience])
      clearTimeout(late)
    },
  }
}
