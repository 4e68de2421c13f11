/** The one PostgreSQL of a run: an embedded one in a temporary folder, or the one that was named. */
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { startEmbedded } from '@spillway/embedded-postgres'
import pg from 'pg'
import { UsageError } from './options.js'
import type { BenchPostgres } from './section.js'

export interface RunningPostgres extends BenchPostgres {
  /** Where its data is, as far as this machine can see it. */
  readonly dataDir: string | null
  /** Drops the databases that a section left, and writes out what is dirty, so that the next one begins alike. */
  clear(): Promise<void>
  /** Clears, and stops what was started. */
  close(): Promise<void>
}

/** What decides about speed and durability, printed with every result. */
const shownSettings = [
  'fsync',
  'synchronous_commit',
  'full_page_writes',
  'wal_sync_method',
  'wal_level',
  'wal_compression',
  'commit_delay',
  'shared_buffers',
  'min_wal_size',
  'max_wal_size',
  'checkpoint_timeout',
  'autovacuum_naptime',
  'max_connections',
  'jit',
]

/** All variants of a section are alive at once, each with a pool. */
const embeddedConnections = 400

export async function openPostgres(databaseUrl: string | null): Promise<RunningPostgres> {
  if (databaseUrl !== null) return describe(databaseUrl, null, async () => undefined)
  const dataDir = await mkdtemp(path.join(tmpdir(), 'spillway-bench-'))
  const faults: string[] = []
  const note = (fields: object, message: string): void => {
    faults.push(`${message} ${JSON.stringify(fields)}`)
  }
  try {
    const server = await startEmbedded({
      dataDir: path.join(dataDir, 'data'),
      log: { info: () => undefined, warn: note, error: note },
      settings: { max_connections: String(embeddedConnections) },
    })
    const url = new URL(server.url)
    url.pathname = '/postgres'
    return await describe(url.href, dataDir, async () => {
      await server.stop()
      await rm(dataDir, { recursive: true, force: true })
    })
  } catch (fault) {
    await rm(dataDir, { recursive: true, force: true })
    throw new Error(`The embedded PostgreSQL did not start.${faults.map((line) => `\n${line}`).join('')}`, {
      cause: fault,
    })
  }
}

async function describe(url: string, dataDir: string | null, stop: () => Promise<void>): Promise<RunningPostgres> {
  const pool = new pg.Pool({ connectionString: url, max: 2, application_name: 'bench' })
  // The server is stopped before the pool's idle connections are closed.
  pool.on('error', () => undefined)
  const made = new Set<string>()
  const version = await firstAnswer(pool)
  const { rows } = await pool.query<{ name: string; value: string }>(
    'SELECT name, current_setting(name) AS value FROM pg_settings WHERE name = ANY($1)',
    [shownSettings],
  )
  const current = new Map(rows.map(({ name, value }) => [name, value]))
  const dropDatabase = async (name: string): Promise<void> => {
    await pool.query(`DROP DATABASE IF EXISTS ${pg.escapeIdentifier(databaseName(name))} WITH (FORCE)`)
    made.delete(name)
  }
  const dropAll = async (): Promise<void> => {
    for (const name of [...made]) await dropDatabase(name)
  }
  return {
    url,
    version,
    dataDir,
    settings: Object.fromEntries(shownSettings.map((name) => [name, current.get(name) ?? 'unknown'])),
    dropDatabase,
    async createDatabase(name) {
      await dropDatabase(name)
      await pool.query(`CREATE DATABASE ${pg.escapeIdentifier(databaseName(name))}`)
      made.add(name)
      const own = new URL(url)
      own.pathname = `/${databaseName(name)}`
      return own.href
    },
    async clear() {
      await dropAll()
      await pool.query('CHECKPOINT')
    },
    async close() {
      try {
        await dropAll()
      } finally {
        await pool.end()
        await stop()
      }
    },
  }
}

/** The prefix keeps our databases apart from others on a server that the caller named. */
const databaseName = (name: string): string => `spillway_bench_${name}`

async function firstAnswer(pool: pg.Pool): Promise<string> {
  try {
    const { rows } = await pool.query<{ version: string; super: string }>(
      "SELECT current_setting('server_version') AS version, current_setting('is_superuser') AS super",
    )
    if (rows[0]?.super !== 'on') throw new UsageError('The benchmark makes databases of its own and needs a superuser.')
    return rows[0].version
  } catch (fault) {
    await pool.end()
    if (fault instanceof UsageError) throw fault
    const why = fault instanceof Error ? fault.message : String(fault)
    throw new UsageError(`The PostgreSQL cannot be reached: ${why}`, { cause: fault })
  }
}
