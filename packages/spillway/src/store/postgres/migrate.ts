/**
 * Brings a schema to the version of the code. Numbered migrations run once each, in order, each in a transaction of its
 * own together with its record. An advisory lock per schema, held by that transaction, lets one process work while the
 * others wait; whoever gets it reads the record again, so that several may take turns. No lock belongs to a session: behind
 * a pooler in transaction mode the next transaction may be in another one. A killed process loses lock and transaction with
 * its connection, so there is nothing to repair.
 */
import { createHash } from 'node:crypto'
import { setTimeout as delay } from 'node:timers/promises'
import pg from 'pg'
import type { Log } from './connect.js'
import { toStoreFault } from './faults.js'
import { beginSql, pinSql } from './session.js'

export interface Migration {
  /** 1, 2, 3, … without gaps. */
  version: number
  name: string
  /** May be several statements. Runs with search_path set to the schema alone. Never edited once released. */
  sql: string
}

/**
 * - `bad_list`        the given migrations are not numbered 1, 2, 3, …
 * - `server_version`  PostgreSQL is older than 15
 * - `server_encoding` the database is not in UTF8
 * - `newer`           the schema is newer than this code
 * - `edited`          a migration that was applied differs from the one in this code, or is missing in the record
 * - `lock_timeout`    another process holds the lock for longer than we wait
 * - `failed`          a migration's SQL failed and was rolled back; the server's reason is in `cause`
 */
export type MigrationErrorCode =
  | 'bad_list'
  | 'server_version'
  | 'server_encoding'
  | 'newer'
  | 'edited'
  | 'lock_timeout'
  | 'failed'

export class MigrationError extends Error {
  override readonly name = 'MigrationError'
  readonly code: MigrationErrorCode

  constructor(code: MigrationErrorCode, message: string, options?: { cause?: unknown }) {
    super(message, options)
    this.code = code
  }
}

export interface MigrateOptions {
  /** Made if missing, which needs the CREATE right on the database; superuser rights never are needed. */
  schema: string
  migrations: readonly Migration[]
  log: Log
  /** How long to wait for another process that migrates the same schema. Default 120,000. */
  lockWaitMs?: number
}

/** One connection is used; a pool's own query timeout applies to every migration, so a URL is better for long ones. */
export type MigrateTarget = { url: string; pool?: never } | { pool: pg.Pool; url?: never }

interface Applied {
  version: number
  name: string
  checksum: string
}

const SERVER_VERSION_MIN = 150_000
const LOCK_WAIT_DEFAULT_MS = 120_000
const LOCK_POLL_MS = 100
const LOCK_REPORT_MS = 5_000
/** A migration that waits for a table lock blocks everybody who asks after it. */
const TABLE_LOCK_WAIT_MS = 30_000

export async function migrate(options: MigrateOptions & MigrateTarget): Promise<{ from: number; to: number }> {
  checkList(options.migrations)
  return withClient(options, async (client) => {
    await checkServer(client)
    let from: number | undefined
    for (;;) {
      const applied = await withLock(client, options, () => applyNext(client, options))
      from ??= applied
      if (applied === options.migrations.length) return { from, to: applied }
    }
  })
}

export function checkList(migrations: readonly Migration[]): void {
  migrations.forEach(({ version, name }, index) => {
    if (version !== index + 1) {
      throw new MigrationError('bad_list', `migration ${version} (${name}) stands where ${index + 1} should`)
    }
  })
}

export function checksumOf(migration: Migration): string {
  return createHash('sha256').update(migration.sql).digest('hex')
}

/** Advisory locks live in their database, so the schema's name is all that needs to be told apart. */
export function lockKey(schema: string): string {
  return createHash('sha256').update(`spillway migrate ${schema}`).digest().readBigInt64BE().toString()
}

async function withClient<T>(target: MigrateTarget, use: (client: pg.ClientBase) => Promise<T>): Promise<T> {
  let broken: Error | undefined
  const onError = (error: Error) => {
    broken = error
  }
  try {
    if (target.pool) {
      const client = await target.pool.connect()
      client.on('error', onError)
      try {
        return await use(client)
      } catch (error) {
        // The session may still hold the lock or a transaction: it does not go back to the pool.
        broken ??= error instanceof Error ? error : new Error('migration failed', { cause: error })
        throw error
      } finally {
        client.off('error', onError)
        client.release(broken)
      }
    }
    const client = new pg.Client({
      connectionString: target.url,
      application_name: 'spillway migrate',
      connectionTimeoutMillis: 10_000,
      keepAlive: true,
    })
    client.on('error', onError)
    try {
      await client.connect()
      return await use(client)
    } finally {
      await client.end()
    }
  } catch (error) {
    throw error instanceof MigrationError ? error : toStoreFault(error)
  }
}

async function checkServer(client: pg.ClientBase): Promise<void> {
  const { rows } = await client.query<{ number: number; version: string; encoding: string }>(
    `SELECT current_setting('server_version_num')::int AS number, current_setting('server_version') AS version,
            current_setting('server_encoding') AS encoding`,
  )
  const [server] = rows
  if (!server || server.number < SERVER_VERSION_MIN) {
    throw new MigrationError(
      'server_version',
      `PostgreSQL 15 or newer is needed, and this server is ${server?.version}; upgrade it, or set DATABASE_URL to another one`,
    )
  }
  if (server.encoding !== 'UTF8') {
    throw new MigrationError(
      'server_encoding',
      `the database must be in UTF8, and this one is in ${server.encoding}; make one with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0, and set DATABASE_URL to it`,
    )
  }
}

/**
 * Runs `use` in a transaction that holds the lock. Polled, not waited for in the server: a blocked statement could neither
 * report progress nor respect a pool's timeout.
 */
async function withLock<T>(client: pg.ClientBase, options: MigrateOptions, use: () => Promise<T>): Promise<T> {
  const waitMs = options.lockWaitMs ?? LOCK_WAIT_DEFAULT_MS
  const began = performance.now()
  let reportAt = began
  for (;;) {
    const done = await inTransaction(client, async () => {
      const { rows } = await client.query<{ taken: boolean }>('SELECT pg_try_advisory_xact_lock($1::bigint) AS taken', [
        lockKey(options.schema),
      ])
      return rows[0]?.taken === true ? { value: await use() } : null
    })
    if (done !== null) return done.value
    const now = performance.now()
    if (now - began >= waitMs) {
      throw new MigrationError(
        'lock_timeout',
        `another process has been migrating schema ${options.schema} for more than ${Math.round(waitMs / 1000)} s`,
      )
    }
    if (now >= reportAt) {
      const waitedMs = Math.round(now - began)
      options.log.info({ schema: options.schema, waitedMs }, 'waiting for another process that migrates the schema')
      reportAt = now + LOCK_REPORT_MS
    }
    await delay(LOCK_POLL_MS)
  }
}

async function inTransaction<T>(client: pg.ClientBase, use: () => Promise<T>): Promise<T> {
  await client.query(`${beginSql}; ${pinSql({}, { local: true })}`)
  try {
    const result = await use()
    await client.query('COMMIT')
    return result
  } catch (error) {
    // With the connection gone the server rolls back by itself.
    if (error instanceof MigrationError || toStoreFault(error).code !== 'unavailable') await client.query('ROLLBACK')
    throw error
  }
}

/** Applies the first that is missing, if any; answers how many there were before. */
async function applyNext(client: pg.ClientBase, { schema, migrations, log }: MigrateOptions): Promise<number> {
  await ensureRecord(client, schema)
  const { rows: applied } = await client.query<Applied>(
    `SELECT version, name, checksum FROM ${pg.escapeIdentifier(schema)}.migrations ORDER BY version`,
  )
  compare(applied, migrations)
  const migration = migrations[applied.length]
  if (migration === undefined) return applied.length
  const began = performance.now()
  await applyOne(client, schema, migration)
  const { version, name } = migration
  log.info({ schema, version, name, durationMs: Math.round(performance.now() - began) }, 'migration applied')
  return applied.length
}

async function ensureRecord(client: pg.ClientBase, schema: string): Promise<void> {
  // CREATE SCHEMA IF NOT EXISTS asks for the CREATE right even where the schema exists, which an operator may have made.
  const { rowCount } = await client.query('SELECT 1 FROM pg_namespace WHERE nspname = $1', [schema])
  if (!rowCount) await client.query(`CREATE SCHEMA ${pg.escapeIdentifier(schema)}`)
  const table = `${pg.escapeIdentifier(schema)}.migrations`
  const { rows } = await client.query<{ present: boolean }>('SELECT to_regclass($1) IS NOT NULL AS present', [table])
  if (rows[0]?.present) return
  await client.query(
    `CREATE TABLE ${table} (
       version    integer     PRIMARY KEY CHECK (version > 0),
       name       text        NOT NULL,
       checksum   text        NOT NULL,
       applied_at timestamptz NOT NULL DEFAULT now()
     )`,
  )
}

export function compare(applied: readonly Applied[], migrations: readonly Migration[]): void {
  const newest = applied.at(-1)
  if (newest && newest.version > migrations.length) {
    throw new MigrationError(
      'newer',
      `the schema is at version ${newest.version} (${newest.name}), this program knows up to ${migrations.length}; run the newer release that made it, or restore a backup from before`,
    )
  }
  applied.forEach((record, index) => {
    const migration = migrations[index]
    if (!migration || record.version !== migration.version) {
      throw new MigrationError(
        'edited',
        `the record of applied migrations misses version ${index + 1}; restore it from a backup`,
      )
    }
    if (record.checksum !== checksumOf(migration)) {
      throw new MigrationError(
        'edited',
        `migration ${migration.version} (${migration.name}) is not the one that was applied to this schema; run the release that made it, or put the text of the migration back and add a new one`,
      )
    }
  })
}

async function applyOne(client: pg.ClientBase, schema: string, migration: Migration): Promise<void> {
  const { version, name, sql } = migration
  try {
    await client.query(
      `SET LOCAL search_path TO ${pg.escapeIdentifier(schema)};
       SET LOCAL lock_timeout TO ${TABLE_LOCK_WAIT_MS};
       SET LOCAL statement_timeout TO 0`,
    )
    await client.query(sql)
    await client.query(
      `INSERT INTO ${pg.escapeIdentifier(schema)}.migrations (version, name, checksum) VALUES ($1, $2, $3)`,
      [version, name, checksumOf(migration)],
    )
  } catch (error) {
    const fault = toStoreFault(error)
    if (fault.code === 'unavailable') throw fault
    throw new MigrationError('failed', `migration ${version} (${name}) failed and was rolled back`, { cause: fault })
  }
}
