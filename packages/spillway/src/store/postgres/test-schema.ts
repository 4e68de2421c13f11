/**
 * A schema for one test intake, with a clock that can be moved. The process that made it holds an advisory lock of its
 * session, taken before the schema exists; so a schema whose lock is free was left by a run that was killed, and the next run
 * drops it.
 *
 *   locked ──schema made──► in use ──close, or the session ends──► free ──close, or the next run──► dropped
 */
import { randomBytes } from 'node:crypto'
import pg from 'pg'
import { retryConflicts } from '../../accept/conflict-retry.js'
import { StoreFault, toStoreFault } from './faults.js'

/** An operation that is not finished. */
export interface Unfinished {
  id: string
  type: string
  queue: string
  partition: string
  attempts: number
  maxAttempts: number
  error: string | null
  /** Of its lane: why it waits, and for how long; null for ever. */
  parked: 'delay' | 'retry' | 'pause' | null
  waitMs: number | null
  running: boolean
}

export interface TestSchema {
  readonly name: string
  /** Removes all rows but what live processes hold, and sets the clock back. */
  empty(): Promise<void>
  /** Moves the clock. The lease of this process is moved with it; those of others are not. */
  advance(ms: number, worker: string): Promise<void>
  now(): Promise<Date>
  /** The time until a schedule is due that is not due yet, in milliseconds; null if there is none. */
  nextDueMs(): Promise<number | null>
  /** The first ones, in the order of acceptance. */
  unfinished(limit: number): Promise<Unfinished[]>
  drop(): Promise<void>
}

const prefix = 'spillway_test_'
const lockClass = 'spillway test schema'
const timeoutMs = 30_000
/** Dropped at each start; there are more only after many killed runs. */
const leftoversMax = 8
/** A killed process's statements may still run; then the run after this one drops its schema. */
const dropWaitMs = 2_000

export async function makeTestSchema(url: string): Promise<TestSchema> {
  const client = await connect(url)
  const name = `${prefix}${randomBytes(8).toString('hex')}`
  const quoted = pg.escapeIdentifier(name)
  try {
    await client.query('SELECT pg_advisory_lock(hashtext($1), hashtext($2))', [lockClass, name])
    await client.query(
      `CREATE SCHEMA ${quoted};
       CREATE TABLE ${quoted}.test_clock (ahead interval NOT NULL);
       INSERT INTO ${quoted}.test_clock VALUES ('0');
       CREATE FUNCTION ${quoted}.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS
         $$ SELECT clock_timestamp() + (SELECT ahead FROM ${quoted}.test_clock) $$`,
    )
  } catch (error) {
    await client.end()
    throw toStoreFault(error)
  }
  return {
    name,
    empty: async () => {
      await retryConflicts(10, () => ask(() => client.query(emptySql(quoted))))
    },
    advance: async (ms, worker) => {
      await ask(() =>
        client.query(
          `WITH moved AS (UPDATE ${quoted}.test_clock SET ahead = ahead + $1 * interval '1 ms')
           UPDATE ${quoted}.workers SET until = until + $1 * interval '1 ms' WHERE id = $2`,
          [ms, worker],
        ),
      )
    },
    now: async () => {
      const { rows } = await ask(() => client.query<{ now: Date }>(`SELECT ${quoted}.clock() AS now`))
      return rows[0]?.now ?? new Date(Number.NaN)
    },
    nextDueMs: async () => {
      const { rows } = await ask(() =>
        client.query<{ ms: number | null }>(
          `SELECT (extract(epoch FROM min(next_at) - ${quoted}.clock()) * 1000)::float8 AS ms FROM ${quoted}.schedules
             WHERE next_at > ${quoted}.clock() AND next_at < 'infinity'`,
        ),
      )
      return rows[0]?.ms ?? null
    },
    unfinished: async (limit) => (await ask(() => client.query<Unfinished>(unfinishedSql(quoted), [limit]))).rows,
    drop: async () => {
      try {
        await ask(() => client.query(`DROP SCHEMA IF EXISTS ${quoted} CASCADE`))
      } finally {
        await client.end()
      }
    },
  }
}

/** Drops schemas whose owner is gone. Not those of other accounts, which only they may drop. */
export async function dropLeftovers(url: string): Promise<void> {
  const client = await connect(url)
  try {
    const { rows } = await client.query<{ name: string }>(
      `SELECT nspname AS name FROM pg_namespace WHERE starts_with(nspname, $1) AND pg_has_role(nspowner, 'USAGE') ORDER BY random()`,
      [prefix],
    )
    let dropped = 0
    for (const { name } of rows) {
      if (dropped === leftoversMax) return
      if (await dropIfFree(client, name)) dropped++
    }
  } catch (error) {
    throw toStoreFault(error)
  } finally {
    await client.end()
  }
}

async function dropIfFree(client: pg.Client, name: string): Promise<boolean> {
  const lock = [lockClass, name]
  const { rows } = await client.query<{ free: boolean }>(
    'SELECT pg_try_advisory_lock(hashtext($1), hashtext($2)) AS free',
    lock,
  )
  if (rows[0]?.free !== true) return false
  try {
    await client.query(`SET lock_timeout = ${dropWaitMs}; DROP SCHEMA IF EXISTS ${pg.escapeIdentifier(name)} CASCADE`)
    return true
  } catch (error) {
    if (toStoreFault(error).code !== 'timeout') throw error
    return false
  } finally {
    await client.query('SELECT pg_advisory_unlock(hashtext($1), hashtext($2))', lock)
  }
}

/** Sessions of others on the server, in all databases. */
export async function countSessions(url: string): Promise<number> {
  const client = await connect(url)
  try {
    const { rows } = await client.query<{ n: number }>(
      "SELECT count(*)::int AS n FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
    )
    return rows[0]?.n ?? 0
  } finally {
    await client.end()
  }
}

async function connect(url: string): Promise<pg.Client> {
  const client = new pg.Client({
    connectionString: url,
    application_name: 'spillway test',
    connectionTimeoutMillis: timeoutMs,
    query_timeout: timeoutMs,
  })
  // The next statement reports a loss.
  client.on('error', () => undefined)
  try {
    await client.connect()
    return client
  } catch (error) {
    await client.end().catch(() => undefined)
    throw toStoreFault(error)
  }
}

async function ask<T>(query: () => Promise<T>): Promise<T> {
  try {
    return await query()
  } catch (error) {
    const fault = toStoreFault(error)
    if (fault.code !== 'other') throw fault
    throw new StoreFault('other', { cause: error })
  }
}

/**
 * In the lock order of tables/0001-core.sql, and then the tables that it does not name. DELETE, because tests leave few rows: a
 * TRUNCATE makes a file for each table and index. Workers, permits and registered gates belong to live processes; tables with
 * a column `one` have a single row.
 */
const emptySql = (s: string): string => `
  DO $do$
  DECLARE
    v_first text[] := ARRAY['leases', 'idempotency', 'rates', 'gates', 'lanes', 'turns', 'ops', 'ready', 'parked',
      'tallies'];
    v_kept text[] := ARRAY['migrations', 'workers', 'gates', 'connection_pools', 'connections', 'connection_writers',
      'history_spans', 'stream_spans', 'test_clock', 'ledger'];
    v_table text;
  BEGIN
    PERFORM set_config('search_path', '${s.replaceAll("'", "''")}', true);
    FOR v_table IN
      SELECT c.relname FROM pg_class c
      WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND c.relkind IN ('r', 'p')
        AND NOT c.relispartition AND (c.relname = 'gates' OR c.relname <> ALL (v_kept))
        AND NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'one')
      ORDER BY coalesce(array_position(v_first, c.relname::text), 1000), c.relname
    LOOP
      IF v_table = 'gates' THEN
        UPDATE gates SET held = 0, overflowing = false WHERE held > 0 OR overflowing;
      ELSE
        EXECUTE format('DELETE FROM %I', v_table);
      END IF;
    END LOOP;
    IF EXISTS (SELECT FROM ledger) THEN
      ALTER TABLE ledger DISABLE TRIGGER USER;
      DELETE FROM ledger;
      ALTER TABLE ledger ENABLE TRIGGER USER;
      UPDATE ledger_head SET seq = 0, hash = repeat('0', 64);
    END IF;
    UPDATE test_clock SET ahead = '0' WHERE ahead <> '0';
  END $do$`

const unfinishedSql = (s: string): string => `
  SELECT o.id, o.type, l.queue, l.partition, o.attempts, o.max_attempts AS "maxAttempts", o.error, p.reason AS parked,
    (extract(epoch FROM nullif(p.until, 'infinity') - ${s}.clock()) * 1000)::float8 AS "waitMs",
    EXISTS (SELECT FROM ${s}.leases x WHERE o.lane = ANY (x.lanes)) AS running
  FROM ${s}.ops o JOIN ${s}.lanes l ON l.id = o.lane LEFT JOIN ${s}.parked p ON p.lane = o.lane
    AND p.reason <> 'turn'
  ORDER BY o.id LIMIT $1`
