/** Capacity gates, halts and connection permits. */
import type { ConnectionChange, Tx } from '../port.js'
import { plainArray, textArray } from './arrays.js'
import type { Database } from './database.js'

type PermitOutcome = 'granted' | 'identity_full' | 'pool_full'

export function gateStatements({ s, on, value }: Database) {
  return {
    registerGate: async (name: string, fullAt: number, resumeBelow: number): Promise<void> => {
      await on.reads(`SELECT ${s}.gate_register($1, $2, $3)`, [name, fullAt, resumeBelow])
    },
    releaseGate: async (tx: Tx, name: string, count: number): Promise<void> => {
      await tx.query(`SELECT ${s}.gates_release($1, $2)`, [[name], [count]])
    },
    /** False when it was halted already. With `tx`: inside that transaction. */
    halt: async (scope: string, reason: string, tx?: Tx): Promise<boolean> =>
      (await value<boolean>(tx?.query ?? on.settle, `${s}.halt_set($1, $2)`, [scope, reason])) === true,
    unhalt: async (scope: string, tx?: Tx): Promise<boolean> =>
      ((await (tx?.query ?? on.settle)(`DELETE FROM ${s}.halts WHERE scope = $1`, [scope])).rowCount ?? 0) > 0,
    /**
     * Changes the permits that a process holds of a pool; returns a result for each that it takes. Null: a later change of
     * the same process came first, and nothing happened.
     */
    changeConnections: async (
      worker: string,
      pool: string,
      { seq, held, gives, takes }: ConnectionChange,
    ): Promise<PermitOutcome[] | null> => {
      const outcomes = await value<PermitOutcome[] | null>(
        on.accept,
        `${s}.permits_change($1, $2, $3, $4, $5, $6, $7, $8, $9)`,
        [
          worker,
          pool,
          seq,
          held === null ? null : textArray([...held.keys()]),
          held === null ? null : plainArray([...held.values()]),
          textArray(gives),
          textArray(takes.map(({ identity }) => identity)),
          plainArray(takes.map(({ perIdentity }) => perIdentity)),
          plainArray(takes.map(({ total }) => total)),
        ],
      )
      return outcomes ?? null
    },
  }
}
