/** Objectives (docs/guides/routing.md#alerts-and-objectives): the counts of all processes, over windows, compared with their targets. */
import { randomUUID } from 'node:crypto'
import { type Objective, type ObjectiveName, objectiveNames } from '@spillway/protocol/wire'
import { type Intake, type IntakeLog, type Periodic, type SweptBatch, withDeadline } from 'spillway/workload'
import { repeatWhenReady } from '../../time.js'
import type { Workload } from '../../workload.js'
import { Batches } from './batches.js'
import { objectiveView } from './figures.js'
import { objectivesSql } from './generated/sql.js'
import { createObjectiveMetrics } from './metrics.js'
import { objectiveRoutes } from './routes.js'

export const objectives: Workload = {
  name: 'objectives',
  sql: objectivesSql,
  define: ({ intake, schema, log, registry }) => {
    const workload = new Objectives(intake, { schema, log, metrics: createObjectiveMetrics(registry) })
    return {
      offers: { objectives: workload },
      routes: (add) => add.plugin(objectiveRoutes(workload)),
      close: () => workload.close(),
    }
  },
}

/** How often this process adds its counts to the shared totals, updates the gauges, and sweeps. */
const defaultTiming = { flushMs: 15_000, readMs: 30_000, sweepMs: 300_000 }
const closeMs = 2_000

export interface ObjectivesOptions {
  /** Of the store's tables, quoted for SQL. */
  schema: string
  log: IntakeLog
  metrics: ReturnType<typeof createObjectiveMetrics>
  timing?: typeof defaultTiming
}

interface Sums extends Record<string, unknown> {
  objective: string
  hour_good: number
  hour_total: number
  month_good: number
  month_total: number
}

export class Objectives {
  readonly intake: Intake
  readonly #options: ObjectivesOptions
  readonly #batches = new Batches()
  readonly #writer = randomUUID()
  readonly #periodic: Periodic[]
  readonly #stopSweep: () => Promise<void>

  constructor(intake: Intake, options: ObjectivesOptions) {
    this.intake = intake
    this.#options = options
    const { log, timing = defaultTiming } = options
    this.#periodic = [
      repeatWhenReady(intake, log, timing.flushMs, 'adding counts to the objectives', () => this.#flush()),
      repeatWhenReady(intake, log, timing.readMs, 'reading the objectives', () => this.#show()),
    ]
    this.#stopSweep = intake.sweeps.add({ name: 'objectives', everyMs: timing.sweepMs, batch: () => this.#sweep() })
  }

  /** `good` of `total`: messages or seconds. Adds to sums in memory. */
  count(objective: ObjectiveName, good: number, total: number): void {
    this.#batches.add(objective, good, total)
  }

  /** The counts of all processes, some seconds old. */
  async read(): Promise<Objective[]> {
    const { rows } = await this.intake.read<Sums>(
      `SELECT objective, hour_good, hour_total, month_good, month_total FROM ${this.#options.schema}.objective_sums()`,
    )
    return objectiveNames.map((name) => {
      const row = rows.find(({ objective }) => objective === name)
      return objectiveView(name, {
        '1h': { good: row?.hour_good ?? 0, total: row?.hour_total ?? 0 },
        '30d': { good: row?.month_good ?? 0, total: row?.month_total ?? 0 },
      })
    })
  }

  /** Call before the intake is closed: adds this process's counts if the store answers. */
  async close(): Promise<void> {
    await this.#stopSweep()
    await withDeadline(this.#flushLast(), closeMs, () => undefined)
  }

  async #flushLast(): Promise<void> {
    await Promise.all(this.#periodic.map((task) => task.stop()))
    try {
      // Twice: the batch whose answer is missing, and the counts since then.
      await this.#flush()
      await this.#flush()
    } catch (fault) {
      this.#options.log.warn({ err: fault }, 'the last counts of the objectives are lost')
    }
  }

  /** A batch counts once, however often it is added. */
  async #flush(): Promise<void> {
    const batch = this.#batches.next()
    if (batch === null) return
    const { number, counts } = batch
    await this.intake.statements.release(`SELECT ${this.#options.schema}.objective_add($1, $2, $3, $4, $5)`, [
      this.#writer,
      number,
      counts.map(({ objective }) => objective),
      counts.map(({ good }) => good),
      counts.map(({ total }) => total),
    ])
    this.#batches.confirmed()
  }

  async #show(): Promise<void> {
    const { metrics } = this.#options
    for (const { name, error_budget_left, burn_rate } of await this.read()) {
      metrics.errorBudgetLeft.set({ objective: name }, error_budget_left)
      metrics.burnRate.set({ objective: name }, burn_rate)
    }
  }

  /** One row for each minute of two hours and each hour of a month: never many. */
  async #sweep(): Promise<SweptBatch> {
    const { rows } = await this.intake.transaction((tx) =>
      tx.query<{ n: number }>(`SELECT ${this.#options.schema}.objective_sweep() AS n`),
    )
    return { removed: { objective_counts: rows[0]?.n ?? 0 }, isFull: false }
  }
}
