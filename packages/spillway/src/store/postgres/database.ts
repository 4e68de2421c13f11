/** The connections of a store, and how its statements run on them. */
import { setTimeout as delay } from 'node:timers/promises'
import { check, checkOptions, OptionError, wholeNumber } from '../../core/options.js'
import { stderrLog } from '../../core/stderr-log.js'
import type { Tx } from '../port.js'
import { AcceptProbe } from './accept-probe.js'
import { type PostgresOptions, poolMaxLeast, postgresRules } from './options.js'
import { type Origin, originOf, originOfPool } from './origin.js'
import type { QueryConfig, Result } from './pinned-query.js'
import { type Lane, openPools } from './pools.js'
import { appendSettings } from './stream-log.js'

/** Checks the options, and says where the connections lead. */
function originFrom(options: PostgresOptions): Origin {
  checkOptions('postgres', options, postgresRules)
  const { url, pool } = options
  if (url !== undefined && pool !== undefined) {
    throw new OptionError('postgres: url and pool exclude each other; remove one of them')
  }
  if (pool !== undefined) return originOfPool(pool, poolMaxLeast)
  if (url !== undefined) return originOf(url)
  throw new OptionError(
    'postgres: url is missing; is the variable that should have it set? Give postgres({ url }), or postgres({ pool })',
  )
}

/** No more than the user's pool has. */
function poolMaxOf({ poolMax }: PostgresOptions, { pool }: Origin): number {
  if (pool === null) return poolMax ?? poolMaxDefault
  if (poolMax !== undefined) check('postgres', 'poolMax', poolMax, wholeNumber(poolMaxLeast, pool.options.max))
  return poolMax ?? Math.min(poolMaxDefault, pool.options.max)
}

const poolMaxDefault = 10

export type Database = ReturnType<typeof openDatabase>

export function openDatabase(options: PostgresOptions) {
  const origin = originFrom(options)
  const { schema = 'spillway', timeoutMs = 2_000, delayMs = 0, log = stderrLog } = options
  const pools = openPools(origin, poolMaxOf(options, origin), timeoutMs, appendSettings, log)
  const probe = new AcceptProbe()
  /** The names of prepared statements, by text. */
  const prepared = new Map<string, string>()
  /** Prepared once per connection, so there must be few such texts. */
  const prepare = (text: string): string => {
    if (!prepared.has(text)) prepared.set(text, `spillway_${prepared.size}`)
    return text
  }
  const configOf = (text: string, values?: readonly unknown[]): QueryConfig => {
    const name = prepared.get(text)
    return { text, ...(values && { values: [...values] }), ...(name !== undefined && { name }) }
  }
  const runner =
    (ask: <Row>(config: QueryConfig) => Promise<Result<Row>>): Tx['query'] =>
    (text, values) =>
      ask(configOf(text, values))
  const inLane = (lane: Lane): Tx['query'] => runner((config) => pools.query(lane, config))
  const preparing =
    (query: Tx['query']): Tx['query'] =>
    (text, values) =>
      query(prepare(text), values)
  const accepting = inLane('accept')
  const accept: Tx['query'] = async (text, values) => {
    const answer = await accepting<never>(text, values)
    probe.proven()
    return answer
  }

  return {
    /** The schema, quoted. */
    s: `"${schema.replaceAll('"', '""')}"`,
    schema,
    origin,
    channel: `spillway_${schema}`,
    timeoutMs,
    log,
    pools,
    probe,
    on: {
      accept,
      settle: inLane('settle'),
      reads: inLane('reads'),
      heartbeat: runner(pools.heartbeat),
      sweep: runner(pools.sweep),
    },
    /** The rows of `settle` as arrays: objects with twenty members cost more than their contents. */
    rows: async (text: string, values: readonly unknown[]): Promise<unknown[][]> =>
      (await pools.query<unknown[]>('settle', { ...configOf(text, values), rowMode: 'array' })).rows,
    statements: { take: preparing(inLane('take')), release: preparing(inLane('settle')) },
    streams: preparing(runner(pools.streams)),
    prepare,
    /** For writes: slowed by `delayMs`. */
    slowly: async <T>(write: () => Promise<T>): Promise<T> => {
      if (delayMs > 0) await delay(delayMs)
      return write()
    },
    /** The result of a function call. */
    value: async <T>(query: Tx['query'], call: string, values: readonly unknown[]): Promise<T | undefined> => {
      const { rows } = await query<{ v: T }>(`SELECT ${call} AS v`, values)
      return rows[0]?.v
    },
  }
}
