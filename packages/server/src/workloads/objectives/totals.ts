/** The counts of all processes, in the database. */
import { randomUUID } from 'node:crypto'
import { type Objective, objectiveNames } from '@spillway/protocol/wire'
import type { Intake } from 'spillway/workload'
import type { Batch } from './batches.js'
import { type Counted, objectiveView } from './figures.js'

interface Sums extends Record<string, unknown> {
  objective: string
  hour_good: number
  hour_total: number
  month_good: number
  month_total: number
}

const nothing: Counted = { good: 0, total: 0 }

export class ObjectiveTotals {
  readonly #intake: Intake
  readonly #schema: string
  readonly #writer = randomUUID()

  constructor(intake: Intake, schema: string) {
    this.#intake = intake
    this.#schema = schema
  }

  /** A batch counts once, however often it is added. */
  async add({ number, counts }: Batch): Promise<void> {
    await this.#intake.statements.release(`SELECT ${this.#schema}.objective_add($1, $2, $3, $4, $5)`, [
      this.#writer,
      number,
      counts.map(({ objective }) => objective),
      counts.map(({ good }) => good),
      counts.map(({ total }) => total),
    ])
  }

  async read(): Promise<Objective[]> {
    const { rows } = await this.#intake.read<Sums>(
      `SELECT objective, hour_good, hour_total, month_good, month_total FROM ${this.#schema}.objective_sums()`,
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

  /** One row for each minute of two hours and each hour of a month: never many. */
  async sweep(): Promise<number> {
    const { rows } = await this.#intake.transaction((tx) =>
      tx.query<{ n: number }>(`SELECT ${this.#schema}.objective_sweep() AS n`),
    )
    return rows[0]?.n ?? 0
  }
}
