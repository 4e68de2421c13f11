import pg from 'pg'
import { toStoreFault } from './faults.js'
import type { Log } from './options.js'
import { type Origin, originOf } from './origin.js'
import type { Reach } from './reach.js'
import { pinSql, type Settings } from './session.js'
import { types } from './types.js'

interface PoolOptions {
  url: string | Origin
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
    ...originOf(options.url).config,
    max: options.max,
    application_name: options.applicationName,
    connectionTimeoutMillis: connectTimeoutMs,
    idleTimeoutMillis: options.keepIdle === true ? 0 : IDLE_TIMEOUT_MS,
    keepAlive: true,
    keepAliveInitialDelayMillis: KEEP_ALIVE_DELAY_MS,
    types,
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
