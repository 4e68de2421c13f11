import pg from 'pg'
import { toStoreFault } from './faults.js'
import type { Reach } from './reach.js'
import { pinSql, type Settings } from './session.js'

/** What this room needs of a logger; a pino logger is one. */
export interface Log {
  info(fields: object, message: string): void
  warn(fields: object, message: string): void
  error(fields: object, message: string): void
}

export interface PoolOptions {
  url: string
  /** The most connections this pool opens. */
  max: number
  /** Seen in pg_stat_activity. */
  applicationName: string
  /** The server cancels a statement that runs longer (57014). Default: none. */
  statementTimeoutMs?: number
  /**
   * The driver gives up on an answer after this time and the connection is closed: the only way out of a half-open
   * connection. Should be longer than the statement timeout. Default: none.
   */
  queryTimeoutMs?: number
  /** To get a connection, new or free. Default 2,000. */
  connectTimeoutMs?: number
  /** Keeps connections that are idle. Default: they are closed after a minute. */
  keepIdle?: boolean
  /** Pins the session settings, with these of its own, before the first statement of each connection that can keep them. */
  pin?: { settings: Settings; reach(): Promise<Reach> }
  /** Where the loss of an idle connection is told. Default: nowhere; the next query shows it anyway. */
  log?: Log
}

const CONNECT_TIMEOUT_MS = 2_000
const KEEP_ALIVE_DELAY_MS = 10_000
const IDLE_TIMEOUT_MS = 60_000

export function openPool(options: PoolOptions): pg.Pool {
  const { statementTimeoutMs, queryTimeoutMs, pin, log } = options
  const connectTimeoutMs = options.connectTimeoutMs ?? CONNECT_TIMEOUT_MS
  const pool = new pg.Pool({
    connectionString: options.url,
    max: options.max,
    application_name: options.applicationName,
    connectionTimeoutMillis: connectTimeoutMs,
    idleTimeoutMillis: options.keepIdle === true ? 0 : IDLE_TIMEOUT_MS,
    keepAlive: true,
    keepAliveInitialDelayMillis: KEEP_ALIVE_DELAY_MS,
    types: { getTypeParser },
    ...(statementTimeoutMs !== undefined && { statement_timeout: statementTimeoutMs }),
    ...(queryTimeoutMs !== undefined && { query_timeout: queryTimeoutMs }),
    // Awaited by the pool, which gives nobody a connection whose settings could not be pinned; its types do not say so.
    ...(pin && {
      onConnect: async (client: pg.ClientBase): Promise<void> => {
        if ((await pin.reach()) === 'transaction') return
        const query = { text: pinSql(pin.settings, { local: false }), query_timeout: connectTimeoutMs }
        await client.query(query)
      },
    }),
  })
  // Without a listener the loss of an idle connection ends the process; the pool has already dropped it.
  pool.on('error', (error) => {
    // A pool that was told to end does not wait for its sockets: the server may end them first, which is no loss.
    if (pool.ending) return
    log?.warn({ err: toStoreFault(error) }, 'an idle database connection was lost')
  })
  // The pool listens to idle connections only. Whoever takes one out listens a moment later at best, and an error that
  // nobody listens to ends the process; the statement that fails tells of the loss.
  pool.on('connect', (client) => client.on('error', () => undefined))
  return pool
}

/**
 * BIGINT as number: sequences, counts and fences stay far below 2^53 (a million a second for 285 years). One that does
 * not is a broken invariant, better thrown than rounded.
 */
export function parseInt8(text: string): number {
  const value = Number(text)
  if (!Number.isSafeInteger(value)) throw new RangeError(`the bigint ${text} is not a safe integer`)
  return value
}

const textArrayOid = 1009

const getTypeParser: typeof pg.types.getTypeParser = (oid: number, format?: 'text' | 'binary') => {
  if (format === 'binary') return pg.types.getTypeParser(oid, 'binary')
  return parsers.get(oid) ?? pg.types.getTypeParser(oid, 'text')
}

/**
 * A flush answers with a dozen arrays. The driver reads them character by character, which cost more than the rest of
 * the answer together.
 */
const parsers = new Map<number, (text: string) => unknown>([
  [pg.types.builtins.INT8, parseInt8],
  [1005, parseInt8Array], // smallint[]
  [1007, parseInt8Array], // int[]
  [1016, parseInt8Array], // bigint[]
  [textArrayOid, parseTextArray],
])

/** Without the bounds; braces become brackets. */
function parseAnyInt8Array(text: string): (number | null)[] {
  const list = text.slice(text.indexOf('{')).replaceAll('{', '[').replaceAll('}', ']').replaceAll('NULL', 'null')
  return JSON.parse(list, (_, value) => (typeof value === 'number' ? parseInt8(String(value)) : value))
}

/** Of whole numbers of any size: `{1,2,NULL}`. Deep ones stay deep, whatever the type says. */
export function parseInt8Array(text: string): (number | null)[] {
  if (!isFlat(text)) return parseAnyInt8Array(text)
  const list = `[${text.slice(1, -1)}]`
  const values: (number | null)[] = JSON.parse(list.includes('N') ? list.replaceAll('NULL', 'null') : list)
  for (const value of values) {
    if (value !== null && !Number.isSafeInteger(value))
      throw new RangeError(`a bigint of ${text} is not a safe integer`)
  }
  return values
}

const parseAnyTextArray: (text: string) => (string | null)[] = pg.types.getTypeParser(textArrayOid as never, 'text')

/** Handlers ask for what they like: `{{1,2},{3,4}}`, or `[0:1]={1,2}` with bounds of its own. */
const isFlat = (text: string): boolean => text[0] === '{' && text[1] !== '{'

/** `{a,"b c",NULL}`; without quotes there is nothing to unescape. */
export function parseTextArray(text: string): (string | null)[] {
  if (text.includes('"') || !isFlat(text)) return parseAnyTextArray(text)
  const inner = text.slice(1, -1)
  if (inner === '') return []
  const values: (string | null)[] = inner.split(',')
  return inner.includes('NULL') ? values.map((value) => (value === 'NULL' ? null : value)) : values
}
