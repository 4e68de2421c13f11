/**
 * Maintenance: pushes are accepted and held in the operation queue, on every instance, and reach their partitions in order
 * when it ends. It is a pause of the operation type in the store, so it is exact and outlives every process.
 */
import type { Definition, IntakeApi } from 'spillway/workload'
import { pushType } from './push.js'

export interface MaintenanceState {
  maintenanceMode: boolean
  bufferedMessages: number
}

export class Maintenance {
  readonly #intake: IntakeApi
  readonly #schema: string
  readonly #definition: Definition

  constructor(intake: IntakeApi, schema: string, definition: Definition) {
    this.#intake = intake
    this.#schema = schema
    this.#definition = definition
  }

  on(): Promise<void> {
    return this.#intake.pauseType(this.#definition)
  }

  off(): Promise<void> {
    return this.#intake.resumeType(this.#definition)
  }

  async state(): Promise<MaintenanceState> {
    // The operation queue's limit bounds the waiting pushes.
    const { rows } = await this.#intake.read<{ held: boolean; n: number }>(
      `SELECT EXISTS (SELECT FROM ${this.#schema}.pauses p WHERE p.queue = '' AND p.partition = $1) AS held,
         coalesce((SELECT sum(json_array_length(o.payload->'messages')) FROM ${this.#schema}.ops o WHERE o.type = $1), 0) AS n`,
      [pushType],
    )
    return { maintenanceMode: rows[0]?.held === true, bufferedMessages: Number(rows[0]?.n ?? 0) }
  }
}
