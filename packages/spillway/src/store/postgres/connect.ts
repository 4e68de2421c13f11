import pg from 'pg'
import { toStoreFault } from './faults.js'
import type { Reach } from './reach.js'
import { pinSql, type Settings } from './session.js'

/** The logger that this folder needs; a pino logger fits. */
export interface Log {
  info(fields: object, message: string): void
  warn(fields: object, message: string): void
  error(fields: object, message: string): void
}

interface PoolOptions {
  url: string
  /** The most connections this pool opens. */
  max: number
  /** Shown in pg_stat_activity. */
  applicationName: string
  /**
   * The driver stops waiting for an answer after this time and closes the connection: the only way out of a half-open
   * connection. Default: none.
   */
  queryTimeoutMs?: number
  /** To get a connection, new or free. Default 2,000. */
  connectTimeoutMs?: number
  /** Keeps idle connections. Default: they are closed after a minute. */
  keepIdle?: boolean
  /** Pins the session settings, plus these, before the first statement of each connection that can keep them. */
  pin?: { settings: Settings; reach(): Promise<Reach> }
  /** Logs the loss of an idle connection. Default: no log; the next query fails anyway. */
  log?: Log
}

const KEEP_ALIVE_DELAY_MS = 10_000
const IDLE_TIMEOUT_MS = 60_000

export function openPool(options: PoolOptions): pg.Pool {
  const { queryTimeoutMs, connectTimeoutMs = 2_000, pin, log } = options
  const pool = new pg.Pool({
    connectionString: options.url,
    max: options.max,
    application_name: options.applicationName,
    connectionTimeoutMillis: connectTimeoutMs,
    idleTimeoutMillis: options.keepIdle === true ? 0 : IDLE_TIMEOUT_MS,
    keepAlive: true,
    keepAliveInitialDelayMillis: KEEP_ALIVE_DELAY_MS,
    types: { getTypeParser },
    ...(queryTimeoutMs !== undefined && { query_timeout: queryTimeoutMs }),
    // The pool awaits this, and hands out no connection whose settings could not be pinned; its types do not say so.
    ...(pin && {
      onConnect: async (client: pg.ClientBase): Promise<void> => {
        if ((await pin.reach()) === 'transaction') return
        const query = { text: pinSql(pin.settings, { local: false }), query_timeout: connectTimeoutMs }
        await client.query(query)
      },
    }),
  })
  // Without a listener, the loss of an idle connection ends the process; the pool has already dropped it.
  pool.on('error', (error) => {
    // A pool that is ending does not wait for its sockets: the server may close them first, which is not a loss.
    if (pool.ending) return
    log?.warn({ err: toStoreFault(error) }, 'an idle database connection was lost')
  })
  // The pool listens to idle connections only. A caller that takes one out listens a moment later at best, and an error
  // without a listener ends the process. The failing statement reports the loss.
  pool.on('connect', (client) => client.on('error', () => undefined))
  return pool
}

/**
 * BIGINT as number: sequences, counts and fences stay far below 2^53 (a million a second for 285 years). A larger one is a
 * broken invariant, better thrown than rounded.
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
 * A flush returns a dozen arrays. The driver reads them character by character, which cost more than the rest of the answer
 * together.
 */
const parsers = new Map<number, (text: string) => unknown>([
  [pg.types.builtins.INT8, parseInt8],
  [1005, parseInt8Array], // smallint[]
  [1007, parseInt8Array], // int[]
  [1016, parseInt8Array], // bigint[]
  [textArrayOid, parseTextArray],
])

/** Drops the bounds; braces become brackets. */
function parseAnyInt8Array(text: string): (number | null)[] {
  const list = text.slice(text.indexOf('{')).replaceAll('{', '[').replaceAll('}', ']').replaceAll('NULL', 'null')
  return JSON.parse(list, (_, value) => (typeof value === 'number' ? parseInt8(String(value)) : value))
}

/** For integers of any size: `{1,2,NULL}`. Nested arrays stay nested, whatever the type says. */
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

/** Handlers may query anything: `{{1,2},{3,4}}`, or `[0:1]={1,2}` with its own bounds. */
const isFlat = (text: string): boolean => text[0] === '{' && text[1] !== '{'

/** `{a,"b c",NULL}`; without quotes, there is nothing to unescape. */
export function parseTextArray(text: string): (string | null)[] {
  if (text.includes('"') || !isFlat(text)) return parseAnyTextArray(text)
  const inner = text.slice(1, -1)
  if (inner === '') return []
  const values: (string | null)[] = inner.split(',')
  return inner.includes('NULL') ? values.map((value) => (value === 'NULL' ? null : value)) : values
}

/** Host, port and database of an address, without user and password. */
export function addressOf(url: string): string {
  try {
    const { hostname, port, pathname, searchParams } = new URL(url)
    const host = searchParams.get('host') ?? (hostname === '' ? 'localhost' : hostname)
    return `${host}:${port === '' ? '5432' : port}${pathname}`
  } catch {
    return 'of the given url'
  }
}
