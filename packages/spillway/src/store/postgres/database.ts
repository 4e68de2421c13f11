/** The connections of a store, and how its statements run on them. */
import { setTimeout as delay } from 'node:timers/promises'
import { checkOptions, isText, methods, OptionError, type Rule, timerMsMax, wholeNumber } from '../../core/options.js'
import { stderrLog } from '../../core/stderr-log.js'
import type { Tx } from '../port.js'
import { AcceptProbe } from './accept-probe.js'
import type { Log } from './connect.js'
import type { SqlModule } from './migrate.js'
import type { QueryConfig, Result } from './pinned-query.js'
import { type Lane, openPools, poolMaxLeast } from './pools.js'
import { appendSettings } from './stream-log.js'

export interface PostgresOptions {
  url: string
  /** A direct address of the same database for LISTEN, if `url` leads to a pooler that cannot carry it. */
  listenUrl?: string
  /** Default `spillway`. */
  schema?: string
  /** Tables and functions that workloads add; the core's are always installed. */
  sql?: readonly SqlModule[]
  /** Connections to the database, without one for heartbeats and one for LISTEN. At least 8. Default 10. */
  poolMax?: number
  /** A call that takes longer has failed. Default 2,000. */
  timeoutMs?: number
  /** Slows each write, for drills. Default 0. */
  delayMs?: number
  log?: Log
}

const rules: Record<keyof PostgresOptions, Rule> = {
  url: isPostgresUrl,
  listenUrl: isPostgresUrl,
  schema: isText,
  sql: (value) => (Array.isArray(value) ? null : 'a list of SQL modules'),
  poolMax: wholeNumber(poolMaxLeast, 10_000),
  timeoutMs: wholeNumber(1, timerMsMax),
  delayMs: wholeNumber(0, timerMsMax),
  log: methods('info', 'warn', 'error'),
}

function isPostgresUrl(value: unknown): string | null {
  return typeof value === 'string' && /^postgres(ql)?:\/\//.test(value)
    ? null
    : 'a text like postgres://user@host:5432/database'
}

function checkPostgresOptions(options: PostgresOptions): void {
  checkOptions('postgres', options, rules)
  if (options.url === undefined) {
    throw new OptionError('postgres: url is missing; is the variable that should have it set? Give postgres({ url })')
  }
}

export type Database = ReturnType<typeof openDatabase>

export function openDatabase(options: PostgresOptions) {
  checkPostgresOptions(options)
  const { schema = 'spillway', timeoutMs = 2_000, poolMax = 10, delayMs = 0, log = stderrLog } = options
  const pools = openPools(options.url, poolMax, timeoutMs, appendSettings, log)
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
