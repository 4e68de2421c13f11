/**
 * Where the connections of a store lead: to an address, or to where a pool of the user leads. With such a pool, statements
 * run on its connections (borrowed-pool.ts); connections that must always be available, or must not go back, are made from
 * its options: one for heartbeats, one for LISTEN, and one at the start for migrating.
 */
import pg from 'pg'
import { OptionError, shown, wholeNumber } from '../../core/options.js'
import type { PoolOfUser } from './options.js'
import { types } from './types.js'

export interface Origin {
  /** For pools of ours. */
  readonly config: pg.PoolConfig
  /** A connection of its own, not yet opened. */
  client(own: pg.ClientConfig): pg.Client
  /** Host, port and database, for messages: without user and password. */
  readonly address: string
  /** The user's. */
  readonly pool: pg.Pool | null
}

type ClientClass = new (config: pg.ClientConfig) => pg.Client

/** An origin stays what it is. */
export function originOf(target: string | Origin): Origin {
  if (typeof target !== 'string') return target
  const config = { connectionString: target }
  return { config, client: (own) => new pg.Client({ ...config, ...own }), address: addressOf(target), pool: null }
}

/** `poolMaxLeast`: the connections that it must be able to open at once. */
export function originOfPool(given: PoolOfUser, poolMaxLeast: number): Origin {
  const pool = given as unknown as pg.Pool & {
    Client?: ClientClass
    options?: pg.PoolOptions & { binary?: boolean; pipeline?: boolean }
  }
  const wanted =
    'postgres: pool must be a Pool of node-postgres (pg 8.2 or later), as in new Pool({ connectionString, max: 20 })'
  const { Client, options } = pool
  if (typeof pool.connect !== 'function' || typeof Client !== 'function' || options === undefined) {
    throw new OptionError(`${wanted}; given: ${shown(given)}`)
  }
  for (const name of ['binary', 'pipeline'] as const) {
    if (options[name]) throw new OptionError(`${wanted}; its option ${name} must not be set`)
  }
  if (pool.ending) throw new OptionError(`${wanted}; this one was ended`)
  const max = options.max
  if (wholeNumber(poolMaxLeast)(max) !== null) {
    throw new OptionError(
      `postgres: the max of pool must be at least ${poolMaxLeast}, and more for what your own code runs at the same time; it is ${shown(max)}. Give new Pool({ max: ${poolMaxLeast * 2} })`,
    )
  }
  // The pool hides its password from copies.
  const config = { ...options, password: options.password, query_timeout: 0, types } as pg.PoolConfig
  const client = (own: pg.ClientConfig): pg.Client => new Client({ ...config, ...own })
  const sample = client({}) as pg.Client & { connection?: { parse?: unknown } }
  const parse = sample.connection?.parse
  if (typeof parse !== 'function') throw new OptionError(`${wanted}, not of pg.native`)
  // Before 8.2 the messages of one round trip had to be announced.
  if (parse.length > 1) throw new OptionError(`${wanted}; this one is older`)
  return { config: { ...config, Client } as unknown as pg.PoolConfig, client, pool, address: addressOfClient(sample) }
}

const addressOfClient = ({ host, port, database }: pg.Client): string => `${host}:${port}/${database ?? ''}`

/** Host, port and database of an address. */
export function addressOf(url: string): string {
  try {
    const { hostname, port, pathname, searchParams } = new URL(url)
    const host = searchParams.get('host') ?? (hostname === '' ? 'localhost' : hostname)
    return `${host}:${port === '' ? '5432' : port}${pathname}`
  } catch {
    return 'of the given url'
  }
}
