import type { IntakeApi, Tx } from 'spillway/workload'
import { patientTransaction } from './patient-transaction.js'

/** Operators have few connections, and halting needs one. */
const atOnce = 2
const timeoutMs = 10_000

/**
 * Reads over all partitions of a queue, or of all queues. With ten thousand partitions and ten groups they take a good part
 * of a second, so they do not use the connections that answer tickets, and wait for each other.
 */
export class PatientReads {
  readonly #intake: IntakeApi
  readonly #waiting: (() => void)[] = []
  #running = 0

  constructor(intake: IntakeApi) {
    this.#intake = intake
  }

  query: Tx['query'] = async (text, values) => {
    if (this.#running >= atOnce) await new Promise<void>((resolve) => this.#waiting.push(resolve))
    else this.#running++
    try {
      return await patientTransaction(this.#intake, timeoutMs, (tx) => tx.query(text, values))
    } finally {
      const next = this.#waiting.shift()
      if (next === undefined) this.#running--
      else next()
    }
  }
}
