/** Objectives (docs/guides/routing.md#alerts-and-objectives): the counts of all processes, over windows, compared with their targets. */
import type { Objective, ObjectiveName } from '@spillway/protocol/wire'
import { type Intake, periodic, withDeadline } from 'spillway/workload'
import type { Workload } from '../../workload.js'
import { Batches } from './batches.js'
import { objectivesSql } from './generated/sql.js'
import { createObjectiveMetrics } from './metrics.js'
import { type ObjectivesOptions, objectiveTiming } from './options.js'
import { objectiveRoutes } from './routes.js'
import { ObjectiveTotals } from './totals.js'

export const objectives: Workload = {
  name: 'objectives',
  sql: objectivesSql,
  define: ({ intake, schema, log, registry }) => {
    const workload = defineObjectives(intake, { schema, log, metrics: createObjectiveMetrics(registry) })
    return {
      offers: { objectives: workload },
      routes: (add) => add.plugin(objectiveRoutes(workload)),
      close: () => workload.close(),
    }
  },
}

export interface Objectives {
  readonly intake: Intake
  /** `good` of `total`: messages or seconds. Adds to sums in memory. */
  count(objective: ObjectiveName, good: number, total: number): void
  /** The counts of all processes, some seconds old. */
  read(): Promise<Objective[]>
  /** Call before the intake is closed: adds this process's counts if the store answers. */
  close(): Promise<void>
}

const closeMs = 2_000

export function defineObjectives(intake: Intake, options: ObjectivesOptions): Objectives {
  const { schema, log, metrics } = options
  const timing = { ...objectiveTiming, ...options.timing }
  const totals = new ObjectiveTotals(intake, schema)
  const batches = new Batches()
  const flush = async (): Promise<void> => {
    const batch = batches.next()
    if (batch === null) return
    await totals.add(batch)
    batches.confirmed()
  }
  const show = async (): Promise<void> => {
    for (const { name, error_budget_left, burn_rate } of await totals.read()) {
      metrics.errorBudgetLeft.set({ objective: name }, error_budget_left)
      metrics.burnRate.set({ objective: name }, burn_rate)
    }
  }
  const whenReady = (work: () => Promise<void>) => async () => {
    if (intake.isReady) await work()
  }
  const repeat = (everyMs: number, what: string, work: () => Promise<void>) =>
    periodic(everyMs, whenReady(work), {
      onFault: (fault) => log.warn({ err: fault, retryMs: everyMs }, `${what} failed, retrying`),
    })
  const flushing = repeat(timing.flushMs, 'adding counts to the objectives', flush)
  const showing = repeat(timing.readMs, 'reading the objectives', show)
  const batch = async () => ({ removed: { objective_counts: await totals.sweep() }, isFull: false })
  const stopSweep = intake.sweeps.add({ name: 'objectives', everyMs: timing.sweepMs, batch })
  const flushLast = async (): Promise<void> => {
    await Promise.all([flushing.stop(), showing.stop()])
    try {
      // Twice: the batch whose answer is missing, and the counts since then.
      await flush()
      await flush()
    } catch (fault) {
      log.warn({ err: fault }, 'the last counts of the objectives are lost')
    }
  }
  return {
    intake,
    count: (objective, good, total) => batches.add(objective, good, total),
    read: () => totals.read(),
    close: async () => {
      await stopSweep()
      await withDeadline(flushLast(), closeMs, () => undefined)
    },
  }
}
