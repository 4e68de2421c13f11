/**
 * Migrates a schema to the version of the code.
 *
 * Each owner (the core, or a workload) has a SqlModule. Its tables are numbered steps that run once each, in order, each in
 * its own transaction together with its record. Its functions are repeatable: the whole set is installed in one transaction
 * when its digest differs from the recorded one. An older release never installs its functions over those of a newer one, so
 * that both can run side by side during an upgrade.
 *
 * A function whose signature changes gets a new name, and the old one stays for a release. CREATE OR REPLACE would leave the
 * old signature behind as an overload, so an install that ends with two signatures of one name fails.
 *
 * An advisory lock per schema, held by each transaction, lets one process work while the others wait. The next holder reads
 * the record again, so several processes may take turns. No lock belongs to a session: behind a pooler in transaction mode
 * the next transaction may run in another one. A killed process loses lock and transaction with its connection, so there is
 * nothing to repair.
 */
import { createHash } from 'node:crypto'
import { setTimeout as delay } from 'node:timers/promises'
import pg from 'pg'
import { version as ownRelease } from '../../version.js'
import { toStoreFault } from './faults.js'
import type { Log, SqlModule } from './options.js'
import { type Origin, originOf } from './origin.js'
import { beginSql, pinSql } from './session.js'

export type { SqlModule }

export type MigrationErrorCode =
  /** The given tables are not numbered 0001, 0002, …, or two modules have one name. */
  | 'bad_list'
  /** PostgreSQL is older than 15. */
  | 'server_version'
  /** The database is not in UTF8. */
  | 'server_encoding'
  /** The schema was made by release 0.1.0, whose tables this release cannot read. */
  | 'legacy'
  /** The schema is newer than this code. */
  | 'newer'
  /** A step that was applied differs from the one in this code, or is missing in the record. */
  | 'edited'
  /** Another process holds the lock for longer than we wait. */
  | 'lock_timeout'
  /** A step's SQL failed and was rolled back; the server's reason is in `cause`. */
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
  url: string | Origin
  /** Made if missing, which needs the CREATE right on the database. Superuser rights are never needed. */
  schema: string
  /** In the order of their dependencies: the core first. */
  sql: readonly SqlModule[]
  log: Log
  /** How long to wait for another process that migrates the same schema. Default 120,000. */
  lockWaitMs?: number
}

/** A row of the record: one per table step, and one with id `functions` per owner. */
export interface Recorded {
  owner: string
  id: string
  checksum: string
  /** The release that wrote the row. */
  release: string
}

export interface Step {
  kind: 'table' | 'functions'
  owner: string
  id: string
  sql: string
  checksum: string
}

const functionsId = 'functions'

const SERVER_VERSION_MIN = 150_000
const LOCK_WAIT_DEFAULT_MS = 120_000
const LOCK_POLL_MS = 100
const LOCK_REPORT_MS = 5_000
/** A migration that waits for a table lock blocks all later requests for it. */
const TABLE_LOCK_WAIT_MS = 30_000

/** `from` and `to` count the applied table steps of the given modules. */
export async function migrate(options: MigrateOptions): Promise<{ from: number; to: number }> {
  checkList(options.sql)
  return withClient(options.url, async (client) => {
    await checkServer(client)
    let from: number | undefined
    for (;;) {
      const { applied, isDone } = await withLock(client, options, () => applyNext(client, options))
      from ??= applied
      if (isDone) return { from, to: applied }
    }
  })
}

export function checkList(modules: readonly SqlModule[]): void {
  modules.forEach(({ name, tables }, index) => {
    if (modules.findIndex((other) => other.name === name) !== index) {
      throw new MigrationError('bad_list', `two SQL modules are named ${name}`)
    }
    tables.forEach(({ id }, position) => {
      const expected = String(position + 1).padStart(4, '0')
      if (!id.startsWith(`${expected}-`)) {
        throw new MigrationError('bad_list', `tables ${id} of ${name}: expected number ${expected}`)
      }
    })
  })
}

export function digestOf(sql: string): string {
  return createHash('sha256').update(sql).digest('hex')
}

/** Advisory locks are per database, so the schema's name is enough to distinguish them. */
export function lockKey(schema: string): string {
  return createHash('sha256').update(`spillway migrate ${schema}`).digest().readBigInt64BE().toString()
}

function stepsOf(module: SqlModule): Step[] {
  const sql = module.functions.map((file) => file.sql).join('\n')
  return [
    ...module.tables.map((table) => ({
      kind: 'table' as const,
      owner: module.name,
      id: table.id,
      sql: table.sql,
      checksum: digestOf(table.sql),
    })),
    { kind: 'functions', owner: module.name, id: functionsId, sql, checksum: digestOf(sql) },
  ]
}

/** Positive if `a` is the newer release. Only the three numbers count. */
function compareReleases(a: string, b: string): number {
  const numbers = (release: string): number[] => release.split(/[.+-]/, 3).map((part) => Number(part) || 0)
  const [x, y] = [numbers(a), numbers(b)]
  return [0, 1, 2].map((i) => (x[i] ?? 0) - (y[i] ?? 0)).find((difference) => difference !== 0) ?? 0
}

/** The pending steps, in order. Throws if the record does not fit the modules. */
export function pendingSteps(
  recorded: readonly Recorded[],
  modules: readonly SqlModule[],
  release: string = ownRelease,
): Step[] {
  return modules.flatMap((module) => {
    const own = recorded.filter(({ owner }) => owner === module.name)
    checkTables(own, module)
    return stepsOf(module).filter((step) => {
      const row = own.find(({ id }) => id === step.id)
      if (row === undefined) return true
      return step.kind === 'functions' && row.checksum !== step.checksum && compareReleases(release, row.release) >= 0
    })
  })
}

function checkTables(recorded: readonly Recorded[], { name, tables }: SqlModule): void {
  const applied = recorded.filter(({ id }) => id !== functionsId).sort((a, b) => (a.id < b.id ? -1 : 1))
  const unknown = applied.find(({ id }) => !tables.some((table) => table.id === id))
  if (unknown !== undefined && applied.length > tables.length) {
    throw new MigrationError(
      'newer',
      `the schema has tables ${unknown.id} of ${name}, which this release (${ownRelease}) does not know; run the newer release that made it, or restore a backup from before`,
    )
  }
  applied.forEach(({ id, checksum }, index) => {
    const table = tables[index]
    if (table === undefined || table.id !== id) {
      throw new MigrationError(
        'edited',
        `the record of applied tables of ${name} has ${id} where ${table?.id ?? 'nothing'} is expected; restore it from a backup`,
      )
    }
    if (checksum !== digestOf(table.sql)) {
      throw new MigrationError(
        'edited',
        `tables ${id} of ${name}: the file is not the one that was applied to this schema; run the release that made it, or restore the file and add a new one`,
      )
    }
  })
}

async function withClient<T>(url: string | Origin, use: (client: pg.ClientBase) => Promise<T>): Promise<T> {
  const client = originOf(url).client({
    application_name: 'spillway migrate',
    connectionTimeoutMillis: 10_000,
    keepAlive: true,
  })
  // The current statement reports a loss.
  client.on('error', () => undefined)
  try {
    await client.connect()
    return await use(client)
  } catch (error) {
    throw error instanceof MigrationError ? error : toStoreFault(error)
  } finally {
    await client.end()
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
 * Runs `use` in a transaction that holds the lock. Polls instead of blocking: a blocked statement could not report
 * progress.
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
    // Without a connection the server rolls back by itself.
    if (error instanceof MigrationError || toStoreFault(error).code !== 'unavailable') await client.query('ROLLBACK')
    throw error
  }
}

/** Applies the first missing step, if any. `applied`: the number of table steps afterwards. */
async function applyNext(
  client: pg.ClientBase,
  { schema, sql: modules, log }: MigrateOptions,
): Promise<{ applied: number; isDone: boolean }> {
  const recorded = (await readRecord(client, schema)) ?? (await makeRecord(client, schema))
  const pending = pendingSteps(recorded, modules)
  const tables = modules.reduce((n, module) => n + module.tables.length, 0)
  const applied = tables - pending.filter(({ kind }) => kind === 'table').length
  const [step] = pending
  if (step === undefined) return { applied, isDone: true }
  const began = performance.now()
  await applyStep(client, schema, step)
  const { owner, id } = step
  const durationMs = Math.round(performance.now() - began)
  log.info({ schema, owner, id, durationMs }, step.kind === 'table' ? 'migration applied' : 'functions installed')
  return { applied, isDone: false }
}

async function makeRecord(client: pg.ClientBase, schema: string): Promise<Recorded[]> {
  // CREATE SCHEMA IF NOT EXISTS needs the CREATE right even if the schema exists, and an operator may have made it.
  const { rowCount } = await client.query('SELECT 1 FROM pg_namespace WHERE nspname = $1', [schema])
  if (!rowCount) await client.query(`CREATE SCHEMA ${pg.escapeIdentifier(schema)}`)
  await client.query(
    `CREATE TABLE ${recordOf(schema)} (
       owner      text        NOT NULL,
       id         text        NOT NULL,
       checksum   text        NOT NULL,
       release    text        NOT NULL,
       applied_at timestamptz NOT NULL DEFAULT now(),
       PRIMARY KEY (owner, id)
     )`,
  )
  return []
}

const recordOf = (schema: string): string => `${pg.escapeIdentifier(schema)}.migrations`

/** Null if the schema has no record yet. */
export async function readRecord(
  client: Pick<pg.Pool | pg.ClientBase, 'query'>,
  schema: string,
): Promise<Recorded[] | null> {
  const { rows: columns } = await client.query<{ name: string }>(
    'SELECT attname AS name FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped',
    [recordOf(schema)],
  )
  if (columns.length === 0) return null
  if (!columns.some(({ name }) => name === 'owner')) {
    throw new MigrationError(
      'legacy',
      `schema ${schema} was made by Spillway 0.1.0, and this release (${ownRelease}) cannot read its tables; let 0.1.0 finish what is queued, then start this release on an empty database, or set SPILLWAY_DB_SCHEMA to another schema name`,
    )
  }
  const { rows } = await client.query<Recorded>(`SELECT owner, id, checksum, release FROM ${recordOf(schema)}`)
  return rows
}

async function applyStep(client: pg.ClientBase, schema: string, step: Step): Promise<void> {
  const { owner, id, sql, checksum } = step
  try {
    // Bodies are not checked during the install, because functions may use each other in any order.
    await client.query(
      `SET LOCAL search_path TO ${pg.escapeIdentifier(schema)};
       SET LOCAL lock_timeout TO ${TABLE_LOCK_WAIT_MS};
       SET LOCAL statement_timeout TO 0;
       SET LOCAL check_function_bodies TO off`,
    )
    if (sql !== '') await client.query(sql)
    if (step.kind === 'functions') await checkOverloads(client, step)
    await client.query(
      `INSERT INTO ${recordOf(schema)} (owner, id, checksum, release) VALUES ($1, $2, $3, $4)
         ON CONFLICT (owner, id) DO UPDATE
           SET checksum = excluded.checksum, release = excluded.release, applied_at = excluded.applied_at`,
      [owner, id, checksum, ownRelease],
    )
  } catch (error) {
    if (error instanceof MigrationError) throw error
    const fault = toStoreFault(error)
    if (fault.code === 'unavailable') throw fault
    throw new MigrationError('failed', `${id} of ${owner} failed and was rolled back`, { cause: fault })
  }
}

async function checkOverloads(client: pg.ClientBase, { owner, sql }: Step): Promise<void> {
  const names = [...sql.matchAll(/^CREATE OR REPLACE FUNCTION (\w+)/gm)].map(([, name]) => name)
  const { rows } = await client.query<{ name: string }>(
    `SELECT proname AS name FROM pg_proc WHERE pronamespace = quote_ident(current_schema())::regnamespace AND proname = ANY ($1)
       GROUP BY proname HAVING count(*) > 1 ORDER BY proname`,
    [names],
  )
  const [twice] = rows
  if (twice === undefined) return
  throw new MigrationError(
    'failed',
    `functions of ${owner}: ${twice.name} now has two signatures; a function whose signature changes needs a new name`,
  )
}
