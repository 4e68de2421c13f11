import { type IntakeApi, retryConflicts, type Tx } from 'spillway/workload'

const triesMax = 5
/** The server times out a little earlier than we do: a statement whose caller has left would keep its locks. */
const serverShare = 0.9

/**
 * An operator's write over many rows. It may take long, and is retried after a deadlock with a push, a pop or an ack: the
 * database rolled it back.
 */
export function patientTransaction<T>(intake: IntakeApi, timeoutMs: number, work: (tx: Tx) => Promise<T>): Promise<T> {
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
