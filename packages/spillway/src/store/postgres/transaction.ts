import type { OpenTx, Tx } from '../port.js'
import type { Connection, ConnectionSource } from './borrowed-pool.js'
import { toStoreFault } from './faults.js'
import { beginSql, resetSql } from './session.js'

/** A handler's timer may fire late; the database must not time out before it. */
const idleGraceMs = 2_000

/**
 * `timeoutMs` limits each statement here, and in the database the time between two of them: a client that vanished would
 * otherwise hold its locks until TCP notices, which may take hours. `pins`: settings for this transaction alone, if the
 * connection cannot keep them. `onEnd` is called once, when the connection is free, also if there was none.
 */
export async function openTx(
  pool: ConnectionSource,
  timeoutMs: number,
  pins: string | null,
  onEnd: () => void,
): Promise<OpenTx> {
  let client: Connection | undefined
  let running = 0
  let broken = false
  // Between two statements nobody else listens, and an error event without a listener ends the process. The next statement
  // reports the loss to the caller.
  const onLoss = (): void => {
    broken = true
  }
  const query: Tx['query'] = async (text, values) => {
    if (client === undefined) throw new Error('the transaction has ended')
    running++
    try {
      const config = { text, query_timeout: timeoutMs, ...(values && { values: [...values] }) }
      return await client.query(config)
    } catch (error) {
      const fault = toStoreFault(error)
      broken ||= fault.code === 'timeout' || fault.code === 'unavailable'
      throw fault
    } finally {
      running--
    }
  }
  let ended = false
  const end = (destroy: boolean): void => {
    client?.off('error', onLoss)
    client?.release(destroy || broken)
    client = undefined
    if (!ended) onEnd()
    ended = true
  }
  try {
    client = await pool.connect()
    client.on('error', onLoss)
    const begin = pins === null ? 'BEGIN' : `${beginSql}; ${pins}`
    await query(`${begin}; SET LOCAL idle_in_transaction_session_timeout = ${Math.round(timeoutMs + idleGraceMs)}`)
  } catch (error) {
    end(true)
    throw toStoreFault(error)
  }
  return {
    query,
    commit: async () => {
      try {
        await query(pins === null ? `COMMIT; ${resetSql}` : 'COMMIT')
        end(false)
      } catch (error) {
        end(true)
        throw error
      }
    },
    rollback: async () => {
      if (client === undefined) return
      // A query that still runs, e.g. of an abandoned handler, must not share a connection with the next one.
      if (running > 0 || broken) return end(true)
      try {
        await query('ROLLBACK')
        end(false)
      } catch {
        // The connection is broken, which ends the transaction as well.
        end(true)
      }
    },
  }
}
