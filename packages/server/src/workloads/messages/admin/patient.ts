/** Statements of operators, which may take long: they retry after conflicts, and do not use the connections of messages. */
import { type Intake, retryConflicts, type Tx } from 'spillway/workload'

const triesMax = 5
/** The server times out a little earlier than we do: a statement whose caller has left would keep its locks. */
const serverShare = 0.9
/** Operators have few connections, and halting needs one. */
const readsAtOnce = 2
const readTimeoutMs = 10_000

/** A write over many rows. It is retried after a deadlock with a push, a pop or an ack: the database rolled it back. */
export function patientTransaction<T>(intake: Intake, timeoutMs: number, work: (tx: Tx) => Promise<T>): Promise<T> {
  return retryConflicts(triesMax, () =>
    intake.transaction(
      async (tx) => {
        await tx.query(`SET LOCAL statement_timeout = ${Math.round(timeoutMs * serverShare)}`)
        return work(tx)
      },
      { timeoutMs },
    ),
  )
}

/**
 * Reads over all partitions of a queue, or of all queues. With ten thousand partitions and ten groups they take a good part
 * of a second, so they do not use the connections that answer tickets, and wait for each other.
 */
export function patientReads(intake: Intake): Tx['query'] {
  const waiting: (() => void)[] = []
  let running = 0
  return async (text, values) => {
    if (running >= readsAtOnce) await new Promise<void>((resolve) => waiting.push(resolve))
    else running++
    try {
      return await patientTransaction(intake, readTimeoutMs, (tx) => tx.query(text, values))
    } finally {
      const next = waiting.shift()
      if (next === undefined) running--
      else next()
    }
  }
}
