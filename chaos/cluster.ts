/**
 * The run's own PostgreSQL: the embedded binaries in a folder of the run, fsync on, killed and watched by the harness.
 * It is started again by its starter, on the same port.
 */
import { setTimeout as delay } from 'node:timers/promises'
import { startEmbedded } from '@spillway/embedded-postgres'
import { workloadSql } from '@spillway/server/internal'
import pg from 'pg'
import { coreSql, migrate } from 'spillway/workload'
import { messagesAuditSql, messagesRestSql, messagesSql, unconsumedSql } from './message-tables.js'
import type { Effect, Ticket } from './records.js'

export const schema = 'spillway'

export interface Cluster {
  readonly url: string
  readonly address: { host: string; port: number }
  /** Ends the postmaster, or one client's backend, with SIGKILL. Resolves when it answers again; gives both times. */
  crash(which: 'postgres' | 'backend', pick: number): Promise<{ pid: number; killedAt: number; backAt: number }>
  /** Operations that the process with this pid holds by lease; null when nobody can be asked. */
  heldBy(pid: number): Promise<string[] | null>
  /** Whether the process with this pid is among those that work. */
  isEnlisted(pid: number): Promise<boolean>
  unfinished(): Promise<number>
  /** What these groups have to read and hold: partitions and leases. */
  unconsumed(groups: readonly string[]): Promise<number>
  effects(): Promise<Effect[]>
  tickets(): Promise<Ticket[]>
  audit(): Promise<string[]>
  /** What must hold of the messages while all goes on; null when nobody can be asked. */
  messagesAudit(): Promise<string[] | null>
  petitionsMoved(): Promise<string[]>
  placesHeld(): Promise<{ gate: string; held: number }[]>
  settings(): Promise<Record<string, string>>
  stop(): Promise<void>
}

const queryTimeoutMs = 2_000
const lookPauseMs = 20
/** Crash recovery of what a run writes takes well below a second; a slow disk gets its time. */
const backMaxMs = 60_000

export async function startCluster(dataDir: string, note: (line: string) => void): Promise<Cluster> {
  const say =
    (level: string) =>
    (fields: object, message: string): void =>
      note(JSON.stringify({ at: Date.now(), level, message, ...fields }))
  const log = { info: say('info'), warn: say('warn'), error: say('error') }
  const server = await startEmbedded({ dataDir, log })
  try {
    await migrate({ url: server.url, schema, sql: [coreSql, ...workloadSql], log })
    await prepare(server.url)
  } catch (fault) {
    await server.stop()
    throw fault
  }
  const { hostname, port } = new URL(server.url)
  const pool = new pg.Pool({
    connectionString: server.url,
    max: 4,
    connectionTimeoutMillis: queryTimeoutMs,
    query_timeout: queryTimeoutMs,
    application_name: 'chaos observer',
  })
  // The loss of an idle connection is what the harness itself brings about.
  pool.on('error', () => undefined)
  const rows = async <Row extends pg.QueryResultRow>(sql: string, values: unknown[] = []): Promise<Row[]> =>
    (await pool.query<Row>(sql, values)).rows

  return {
    url: server.url,
    address: { host: hostname, port: Number(port) },
    crash: (which, pick) =>
      crash(server.url, async (sentinel) => (which === 'postgres' ? server.pid : aBackend(sentinel, pick))),
    heldBy: async (pid) => {
      try {
        const held = await rows<{ id: string }>(heldSql, [`%:${pid}`])
        return held.map(({ id }) => id)
      } catch {
        // PostgreSQL is down, by our own doing.
        return null
      }
    },
    isEnlisted: async (pid) => {
      try {
        return (await rows(`SELECT FROM ${schema}.workers WHERE name LIKE $1`, [`%:${pid}`])).length > 0
      } catch {
        // PostgreSQL is down, by our own doing.
        return false
      }
    },
    unfinished: async () => (await rows<{ n: number }>(`SELECT count(*)::int AS n FROM ${schema}.ops`))[0]?.n ?? 0,
    unconsumed: async (groups) => (await rows<{ n: number }>(unconsumedSql(schema), [groups]))[0]?.n ?? 0,
    effects: () =>
      rows<Effect & pg.QueryResultRow>(
        `SELECT ord::int, (extract(epoch FROM at) * 1000)::float8 AS at, lane, n, operation, route FROM chaos.effects UNION ALL ${petitionsSql} UNION ALL ${messagesSql(schema)} ORDER BY ord`,
      ),
    tickets: () => rows<Ticket & pg.QueryResultRow>(ticketsSql),
    audit: async () => (await rows<{ fault: string }>(auditSql)).map((r) => r.fault),
    messagesAudit: async () => {
      try {
        return (await rows<{ fault: string }>(messagesAuditSql(schema))).map((r) => r.fault)
      } catch {
        // PostgreSQL is down, by our own doing.
        return null
      }
    },
    petitionsMoved: async () =>
      (await rows<{ id: string }>(`SELECT id FROM ${schema}.petitions WHERE state <> 'RECEIVED'`)).map((r) => r.id),
    placesHeld: () =>
      rows<{ gate: string; held: number }>(
        `SELECT name AS gate, held::int FROM ${schema}.gates WHERE held <> 0 AND name <> 'petitions'
         UNION ALL SELECT 'connections ' || pool, sum(held)::int FROM ${schema}.connections GROUP BY pool`,
      ),
    settings: async () => {
      const names = ['server_version', 'fsync', 'synchronous_commit', 'full_page_writes']
      const found = await rows<{ name: string; setting: string }>(
        'SELECT name, setting FROM pg_settings WHERE name = ANY ($1)',
        [names],
      )
      return Object.fromEntries(found.map(({ name, setting }) => [name, setting]))
    },
    stop: async () => {
      await pool.end()
      await server.stop()
    },
  }
}

const heldSql = `SELECT o.id FROM ${schema}.workers w JOIN ${schema}.leases l ON l.worker = w.id, unnest(l.lanes, l.uptos) z(lane, upto)
  JOIN ${schema}.ops o ON o.lane = z.lane AND o.seq <= z.upto WHERE w.name LIKE $1`

/** One row for each receipt, so that two of one petition are seen as two. */
const petitionsSql = `SELECT l.seq::int, (extract(epoch FROM p.created_at) * 1000)::float8, p.submitter, split_part(p.text, '#', 2)::int, p.id, 'petition'
  FROM ${schema}.petitions p LEFT JOIN ${schema}.ledger l ON l.type = 'petition.submission.received' AND (l.payload::json->>'petition_id')::uuid = p.id`

const auditSql = `SELECT fault FROM ${schema}.audit() UNION ALL SELECT fault FROM ${schema}.petitions_audit()
  UNION ALL SELECT 'ledger: row ' || c.broken_at || ' does not follow from the one before it' FROM ${schema}.ledger_check(0, repeat('0', 64), 2147483647) c WHERE c.broken_at IS NOT NULL
  UNION ALL SELECT 'ledger: ' || c.seen || ' rows up to ' || coalesce(c.last_seq, 0) || ', but the head is at ' || h.seq
    FROM ${schema}.ledger_check(0, repeat('0', 64), 2147483647) c, ${schema}.ledger_head h WHERE (c.seen, c.last_seq, c.last_hash) IS DISTINCT FROM (h.seq, h.seq, h.hash) AND h.seq > 0
  UNION ALL SELECT 'ledger: ' || l.n || ' receipts of ' || p.n || ' petitions' FROM (SELECT count(*) AS n FROM ${schema}.petitions) p,
    (SELECT count(*) AS n FROM ${schema}.ledger WHERE type = 'petition.submission.received') l WHERE l.n <> p.n
  UNION ALL SELECT fault FROM (${messagesRestSql(schema)}) m`

const ticketsSql = `SELECT id, partition AS lane, type, status, (extract(epoch FROM finished_at) * 1000)::float8 AS "finishedAt", error, CASE WHEN type = 'messages.push' THEN result->'ids'->>0 END AS message FROM ${schema}.history
  UNION ALL SELECT id, partition, type, 'failed', (extract(epoch FROM died_at) * 1000)::float8, error, CASE WHEN type = 'messages.push' THEN payload->'messages'->0->>'id' END FROM ${schema}.dead_letters
  UNION ALL SELECT o.id, l.partition, o.type, 'pending', NULL, o.error, NULL FROM ${schema}.ops o JOIN ${schema}.lanes l ON l.id = o.lane`

/** No key and no constraint: whatever is written twice shall be seen twice. */
async function prepare(url: string): Promise<void> {
  const client = new pg.Client({ connectionString: url })
  await client.connect()
  try {
    await client.query(`CREATE SCHEMA chaos; CREATE TABLE chaos.effects (
      ord bigint GENERATED ALWAYS AS IDENTITY, at timestamptz NOT NULL DEFAULT clock_timestamp(),
      lane text NOT NULL, n int NOT NULL, operation uuid NOT NULL, route text NOT NULL)`)
  } finally {
    await client.end()
  }
}

/** One of the connections of the processes; the sentinel's own, when they have none. */
async function aBackend(sentinel: pg.Client, pick: number): Promise<number> {
  const { rows } = await sentinel.query<{ pid: number }>(
    `SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'spillway%' OR pid = pg_backend_pid()
     ORDER BY pid = pg_backend_pid(), pid`,
  )
  const pid = rows[Math.floor(pick * Math.max(1, rows.length - 1))]?.pid
  if (pid === undefined) throw new Error('PostgreSQL does not list the session that asks')
  return pid
}

async function crash(url: string, whom: (sentinel: pg.Client) => Promise<number>) {
  // Its own connection shows when the server is really gone; before that a probe would be answered by the old one.
  const sentinel = new pg.Client({ connectionString: url, connectionTimeoutMillis: backMaxMs })
  const gone = new Promise<void>((resolve) => {
    sentinel.on('error', () => resolve())
    sentinel.on('end', () => resolve())
  })
  await sentinel.connect()
  const pid = await whom(sentinel)
  const killedAt = Date.now()
  process.kill(pid, 'SIGKILL')
  await gone
  const backAt = await answering(url)
  return { pid, killedAt, backAt }
}

async function answering(url: string): Promise<number> {
  const deadline = Date.now() + backMaxMs
  for (;;) {
    const client = new pg.Client({ connectionString: url, connectionTimeoutMillis: queryTimeoutMs })
    // A connection that breaks half-way is seen by its query.
    client.on('error', () => undefined)
    try {
      await client.connect()
      await client.query('SELECT 1')
      return Date.now()
    } catch (fault) {
      if (Date.now() > deadline)
        throw new Error(`PostgreSQL did not come back within ${backMaxMs} ms`, { cause: fault })
      await delay(lookPauseMs)
    } finally {
      await client.end().catch(() => undefined)
    }
  }
}
