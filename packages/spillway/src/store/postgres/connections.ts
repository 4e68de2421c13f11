import type { ConnectionChange, Tx } from '../port.js'
import { plainArray, textArray } from './arrays.js'

const outcomes = ['granted', 'identity_full', 'pool_full'] as const

export async function changeConnections(
  query: Tx['query'],
  schema: string,
  worker: string,
  pool: string,
  { seq, held, gives, takes }: ConnectionChange,
): Promise<(typeof outcomes)[number][] | null> {
  const { rows } = await query<{ codes: number[] | null }>(
    `SELECT ${schema}.connections_change($1, $2, $3, $4, $5, $6, $7, $8, $9) AS codes`,
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
  const codes = rows[0]?.codes ?? null
  if (codes === null) return null
  return codes.map((code) => {
    const outcome = outcomes[code]
    if (outcome === undefined) throw new Error(`the store answered with the unknown code ${code}`)
    return outcome
  })
}
