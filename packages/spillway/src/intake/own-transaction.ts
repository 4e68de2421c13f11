/** Checks what a caller gives as its own transaction. Outside of one, the operation would be queued whatever becomes of its rows. */
import { methods, OptionError, shown } from '../core/options.js'
import type { Tx } from '../store/port.js'

const poolGiven = 'given: a Pool. Take a client with pool.connect(), and BEGIN on it'

/** Runs `write` in the caller's transaction. */
export async function within<T>(call: string, given: unknown, write: (tx: Tx) => Promise<T>): Promise<T> {
  const tx = await requireTransaction(call, given)
  try {
    return await write(tx)
  } catch (fault) {
    // The client learns it only with its next statement, so this may be that one.
    throw stateOf(fault) === '25P02' ? hasFailed(call, fault) : fault
  }
}

const stateOf = (fault: unknown): unknown => {
  const { code, sqlState } = fault as { code?: unknown; sqlState?: unknown }
  return sqlState ?? code
}

async function requireTransaction(call: string, tx: unknown): Promise<Tx> {
  const wanted = `${call}: tx must be a node-postgres client inside a transaction`
  // A transaction of the intake.
  if (methods('query', 'commit', 'rollback')(tx) === null) return tx as Tx
  if (methods('query')(tx) !== null) throw new OptionError(`${wanted}; given: ${shown(tx)}`)
  if (methods('connect', 'on')(tx) === null && 'totalCount' in (tx as object)) {
    throw new OptionError(`${wanted}; ${poolGiven}`)
  }
  const client = tx as Tx & { getTransactionStatus?: () => unknown }
  if (client.getTransactionStatus !== undefined) {
    const status = client.getTransactionStatus()
    if (status === 'I') throw inNone(wanted)
    if (status === 'E') throw hasFailed(call)
    return client
  }
  // Older drivers do not know. A savepoint is possible inside a transaction only, and not in one that failed.
  await client.query('SAVEPOINT spillway; RELEASE SAVEPOINT spillway').catch((fault: unknown) => {
    throw stateOf(fault) === '25P01'
      ? inNone(wanted, fault)
      : stateOf(fault) === '25P02'
        ? hasFailed(call, fault)
        : fault
  })
  return client
}

const inNone = (wanted: string, cause?: unknown): OptionError =>
  new OptionError(`${wanted}; this client is in none. Call BEGIN first`, { cause })

const hasFailed = (call: string, cause?: unknown): OptionError =>
  new OptionError(`${call}: an earlier statement of this transaction failed, so it can only be rolled back`, { cause })
