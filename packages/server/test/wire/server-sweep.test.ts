/** What has expired is removed, however much of it there is, while work is accepted. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { calm, type MessageTables, openMessageTables } from '../message-calls.js'
import { endAll, get, post, type ServerProcess, sample, startServer, until } from '../server-process.js'

const expired = 30_000
const kept = 1_000

let database: TestDatabase
let tables: MessageTables
let servers: ServerProcess[]
let startedAt: number

beforeAll(async () => {
  database = await freshDatabase()
  tables = openMessageTables(database.url)
  const ages = (kind: string): string =>
    `SELECT gen_random_uuid() AS id, n, clock() + CASE WHEN n <= ${expired} THEN - interval '2 hours' + n * interval '1 ms' ELSE interval '1 hour' END AS at FROM generate_series(1, ${expired + kept}) n /* ${kind} */`
  await tables.query(
    `INSERT INTO idempotency (key, request, op, answer, expires_at) SELECT x.id, x.id, x.id, '{}', x.at FROM (${ages('keys')}) x`,
  )
  // Some were used again since: they are looked at, and stay.
  await tables.query(
    `INSERT INTO rates (key, ends, sums, span_ms, expires_at, sweep_at)
     SELECT x.id, '{0,1}', '{0,1}', 3600000, CASE WHEN x.n % 100 = 0 THEN clock() + interval '1 hour' ELSE x.at END, x.at FROM (${ages('rates')}) x`,
  )
  await tables.query(
    `INSERT INTO lanes (id, queue, partition, moved_at, sweep_at)
     SELECT x.id, 'q', x.n::text, CASE WHEN x.n % 100 = 0 THEN clock() ELSE x.at END, x.at + interval '1 hour' FROM (${ages('lanes')}) x`,
  )
  await tables.query('ANALYZE idempotency, rates, lanes')
  startedAt = performance.now()
  servers = [
    await startServer({ DATABASE_URL: database.url, ...calm }),
    await startServer({ DATABASE_URL: database.url, ...calm }),
  ]
}, 60_000)
afterAll(async () => {
  await tables.close()
  await endAll()
  await database.drop()
})

const left = async () =>
  (
    await tables.query<{ keys: number; rates: number; lanes: number }>(
      `SELECT (SELECT count(*)::int FROM idempotency WHERE expires_at < clock()) AS keys, (SELECT count(*)::int FROM rates WHERE expires_at < clock()) AS rates,
         (SELECT count(*)::int FROM lanes WHERE moved_at < clock() - interval '1 hour' AND depth = 0) AS lanes`,
    )
  )[0]

const sums = async (name: string, labels: Record<string, string> = {}): Promise<number> => {
  const scrapes = await Promise.all(servers.map((server) => get(server, '/metrics')))
  return scrapes.reduce((sum, { text }) => sum + (sample(text, name, labels) ?? 0), 0)
}

it('continues until all expired rows are removed, counts them, and takes a tenth of the time', async () => {
  // Work is accepted meanwhile.
  const accepted: number[] = []
  await until(
    'nothing that has expired is left',
    async () => {
      const body = { items: [{ queue: 'meanwhile', payload: 1 }] }
      accepted.push(
        (await post(servers[0] as ServerProcess, '/api/v1/push', body, { 'idempotency-key': randomUUID() })).status,
      )
      const now = await left()
      return now?.keys === 0 && now.rates === 0 && now.lanes === 0
    },
    60_000,
  )
  expect(new Set(accepted)).toEqual(new Set([201]))
  const seconds = (performance.now() - startedAt) / 1_000
  const inUse = expired / 100
  // The first batch of each process is its start's, and counted nowhere.
  const counted = async (table: string) => await sums('spillway_sweep_rows_total', { table })
  for (const [table, most] of [
    ['idempotency', expired],
    ['rates', expired - inUse],
    ['lanes', expired - inUse],
  ] as const) {
    expect(await counted(table), table).toBeLessThanOrEqual(most)
    expect(await counted(table), table).toBeGreaterThan(most - 4_001)
  }
  const spent = await sums('spillway_sweep_seconds_total')
  expect(spent).toBeGreaterThan(0)
  expect(spent / seconds).toBeLessThan(0.11)
  expect(await sums('spillway_sweep_behind', { task: 'queue' })).toBe(0)
  const [rows] = await tables.query<{ keys: number; rates: number }>(
    `SELECT (SELECT count(*)::int FROM idempotency WHERE expires_at > clock() + interval '50 minutes' AND expires_at < clock() + interval '65 minutes') AS keys, (SELECT count(*)::int FROM rates) AS rates`,
  )
  expect(rows).toEqual({ keys: kept, rates: kept + inUse })
}, 90_000)

it('follows its indexes: a batch never reads a table through', async () => {
  await Promise.all(servers.map((server) => server.stop()))
  // Where a table is small, reading it through is the better plan.
  await tables.query(
    `INSERT INTO idempotency (key, request, op, answer, expires_at) SELECT gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), '{}', clock() + interval '2 hours' FROM generate_series(1, 20000)`,
  )
  await tables.query(
    `INSERT INTO rates (key, ends, sums, span_ms, expires_at, sweep_at) SELECT gen_random_uuid(), '{0,1}', '{0,1}', 3600000, clock() + interval '2 hours', clock() + interval '2 hours' FROM generate_series(1, 20000)`,
  )
  await tables.query(
    `INSERT INTO lanes (id, queue, partition, moved_at, sweep_at) SELECT gen_random_uuid(), 'r', n::text, clock(), clock() + interval '2 hours' FROM generate_series(1, 20000) n`,
  )
  await tables.query('ANALYZE idempotency, rates, lanes')
  // A session of its own: what a session has done is counted with its next transactions until it is reported, a second later.
  const session = openMessageTables(database.url)
  const batch = await session.begin()
  await batch.query('SELECT sweep_rows(2000)')
  const { rows: scans } = await batch.query(
    `SELECT relname, seq_scan::int AS seq, idx_scan > 0 AS follows FROM pg_stat_xact_user_tables WHERE schemaname = 'spillway' AND relname IN ('idempotency', 'rates', 'lanes') ORDER BY relname`,
  )
  await batch.rollback()
  await session.close()
  expect(scans).toEqual(['idempotency', 'lanes', 'rates'].map((relname) => ({ relname, seq: 0, follows: true })))
}, 60_000)
