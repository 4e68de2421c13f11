/** Statements of operators, which may take long: they retry after conflicts, and do not use the connections of messages. */
import { type Intake, retryConflicts, type Tx } from 'spillway/workload'

/** The rows, as answers show them: columns are named like the answer's members, and dates are RFC 3339. */
type Views = <View = Record<string, unknown>>(text: string, values?: readonly unknown[]) => Promise<View[]>

export interface Statements {
  read: Views
  /**
   * Reads over all partitions of a queue, or of all queues. With ten thousand partitions and ten groups they take a good part
   * of a second, so they do not use the connections that answer tickets, and wait for each other.
   */
  readLong: Views
  /** A write over many rows. It is retried after a deadlock with a push, a pop or an ack: the database rolled it back. */
  transaction<T>(timeoutMs: number, work: (query: Views) => Promise<T>): Promise<T>
}

const triesMax = 5
/** The server times out a little earlier than we do: a statement whose caller has left would keep its locks. */
const serverShare = 0.9
/** Operators have few connections, and halting needs one. */
const readsAtOnce = 2
const readTimeoutMs = 10_000

export function statementsOf(intake: Intake): Statements {
  const transaction: Statements['transaction'] = (timeoutMs, work) =>
    retryConflicts(triesMax, () =>
      intake.transaction(
        async (tx) => {
          await tx.query(`SET LOCAL statement_timeout = ${Math.round(timeoutMs * serverShare)}`)
          return work(views(tx.query))
        },
        { timeoutMs },
      ),
    )
  const waiting: (() => void)[] = []
  let running = 0
  return {
    transaction,
    read: views((text, values) => intake.read(text, values)),
    readLong: async (text, values) => {
      if (running >= readsAtOnce) await new Promise<void>((resolve) => waiting.push(resolve))
      else running++
      try {
        return await transaction(readTimeoutMs, (query) => query(text, values))
      } finally {
        const next = waiting.shift()
        if (next === undefined) running--
        else next()
      }
    },
  }
}

function views(query: Tx['query']): Views {
  return async <View>(text: string, values?: readonly unknown[]) => {
    const { rows } = await query(text, values)
    return rows.map((row) => {
      const shown = Object.entries(row).map(([name, value]) => [
        name,
        value instanceof Date ? value.toISOString() : value,
      ])
      return Object.fromEntries(shown) as View
    })
  }
}
