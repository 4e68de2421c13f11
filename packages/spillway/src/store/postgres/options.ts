/**
 * What `postgres()` takes. Part of the public types, so nothing here names the driver's: users need not have them.
 */
import { isText, methods, type Rule, timerMsMax, wholeNumber } from '../../core/options.js'

/** The logger that this folder needs; a pino logger fits. */
export interface Log {
  info(fields: object, message: string): void
  warn(fields: object, message: string): void
  error(fields: object, message: string): void
}

/** Made by scripts/generate-sql.mjs from the .sql files of one owner. */
export interface SqlModule {
  /** `core`, or the workload's name. */
  readonly name: string
  /** In order, ids `0001-…`, `0002-…`. Never edited once released. Runs with search_path set to the schema alone. */
  readonly tables: readonly { readonly id: string; readonly sql: string }[]
  readonly functions: readonly { readonly name: string; readonly sql: string }[]
}

/** What is used of a Pool of node-postgres, of any copy of pg from 8.2 on: users need no types for it. */
export interface PoolOfUser {
  readonly options: object
  readonly totalCount: number
  connect(): Promise<unknown>
  end(): Promise<unknown>
}

/** Connections at once: one for each lane (pools.ts), and two for streams. */
export const poolMaxLeast = 8

interface StoreOptions {
  /** A direct address of the same database for LISTEN, if `url` or `pool` leads to a pooler that cannot carry it. */
  listenUrl?: string
  /** Default `spillway`. */
  schema?: string
  /** Tables and functions that workloads add; the core's are always installed. */
  sql?: readonly SqlModule[]
  /**
   * Connections to the database, without one for heartbeats and one for LISTEN. At least 8. Default 10. With `pool`: how many
   * of its connections the intake uses at once, at most its max.
   */
  poolMax?: number
  /** A call that takes longer has failed. Default 2,000. */
  timeoutMs?: number
  /** Slows each write, for drills. Default 0. */
  delayMs?: number
  log?: Log
}

interface ByUrl extends StoreOptions {
  url: string
  pool?: never
}

interface ByPool extends StoreOptions {
  /**
   * A Pool of node-postgres (pg 8.2 or later) of yours. The intake takes connections from it like your own code, sets
   * what it needs for its transactions alone, and never ends it: call `pool.end()` after `intake.close()`. Its max must be at least 8, and more
   * for what your code runs at the same time. Two connections are opened beside it, from its options: for heartbeats and for
   * LISTEN.
   */
  pool: PoolOfUser
  url?: never
}

export type PostgresOptions = ByUrl | ByPool

export const postgresRules: Record<keyof ByUrl | keyof ByPool, Rule> = {
  url: isPostgresUrl,
  // Looked at in originOfPool.
  pool: () => null,
  listenUrl: isPostgresUrl,
  schema: isText,
  sql: (value) => (Array.isArray(value) ? null : 'a list of SQL modules'),
  poolMax: wholeNumber(poolMaxLeast, 10_000),
  timeoutMs: wholeNumber(1, timerMsMax),
  delayMs: wholeNumber(0, timerMsMax),
  log: methods('info', 'warn', 'error'),
}

export function isPostgresUrl(value: unknown): string | null {
  return typeof value === 'string' && /^postgres(ql)?:\/\//.test(value)
    ? null
    : 'a text like postgres://user@host:5432/database'
}
