/** Real servers on one database, the database's clock in the test's hand, and what petitions tests ask and count. */
import { randomUUID } from 'node:crypto'
import pg from 'pg'
import { freshDatabase } from '../../spillway/test/setup/database.js'
import {
  type Answer,
  call,
  type Env,
  endAll,
  get,
  post,
  runProgram,
  type ServerProcess,
  startServer,
} from './server-process.js'

export const petitionsPath = '/api/v1/petition-submissions'

/** A machine that is short of CPU must not read as a busy store, which is refused with 503. */
const patient: Env = { SPILLWAY_STORE_TIMEOUT_MS: '20000', SPILLWAY_ACCEPT_WAIT_BUDGET_MS: '60000' }

export interface Fleet {
  readonly url: string
  readonly servers: readonly ServerProcess[]
  /** Any of them, in turn. */
  next(): ServerProcess
  /** One more. */
  start(env?: Env): Promise<ServerProcess>
  sql<Row extends Record<string, unknown>>(text: string, values?: unknown[]): Promise<Row[]>
  /** A session of its own, for transactions that the test holds open. */
  session(): Promise<pg.Client>
  /** What time it is, for all SQL, from here on. */
  setClock(at: string): Promise<void>
  /** What does not hold of the tables' invariants. */
  audit(): Promise<string[]>
  close(): Promise<void>
}

export interface FleetOptions {
  instances?: number
  env?: Env
  /** Default: a new one on the run's server, dropped at the end. */
  url?: string
}

export async function startFleet({ instances = 1, env = {}, url: given }: FleetOptions = {}): Promise<Fleet> {
  const database = given === undefined ? await freshDatabase() : { url: given, drop: async () => undefined }
  const { url } = database
  const pool = new pg.Pool({ connectionString: url, max: 2 })
  // The loss of an idle connection is what some tests bring about.
  pool.on('error', () => undefined)
  const sessions: pg.Client[] = []
  // Before the first of them starts: they would all want to do it.
  const migrated = await runProgram({ DATABASE_URL: url }, { args: ['migrate'] })
  if (migrated.code !== 0) throw new Error(`the database was not migrated: ${migrated.stderr}`)
  const start = (other: Env = {}) => startServer({ DATABASE_URL: url, ...patient, ...env, ...other })
  const servers = await Promise.all(Array.from({ length: instances }, () => start()))
  const sql = async <Row extends Record<string, unknown>>(text: string, values: unknown[] = []) =>
    (await pool.query<Row>(text, values)).rows
  let turn = 0
  return {
    url,
    servers,
    start,
    sql,
    next: () => at(servers, turn++ % servers.length),
    session: async () => {
      const client = new pg.Client({ connectionString: url })
      await client.connect()
      sessions.push(client)
      return client
    },
    setClock: async (time) => {
      await sql(
        `CREATE OR REPLACE FUNCTION spillway.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$ SELECT timestamptz '${time}' $$`,
      )
    },
    audit: async () =>
      (
        await sql<{ fault: string }>(
          'SELECT fault FROM spillway.audit() UNION ALL SELECT fault FROM spillway.petitions_audit()',
        )
      ).map(({ fault }) => fault),
    close: async () => {
      await endAll()
      for (const session of sessions) await session.end()
      await pool.end()
      await database.drop()
    },
  }
}

export function at<T>(list: readonly T[], index: number): T {
  const found = list[index]
  if (found === undefined) throw new Error(`there is no element ${index}`)
  return found
}

/** One that nobody has sent before, by a submitter of its own. */
export const petition = (members: Record<string, unknown> = {}) => ({
  type: 'GENERAL',
  text: 'Let there be a bench under the old tree.',
  submitter_id: randomUUID(),
  ...members,
})

/** Thousands at once take their time on a small machine, which is not what is tested. */
const timeoutMs = 60_000

export const submitPetition = (
  server: { origin: string },
  members: Record<string, unknown> = {},
  headers: Record<string, string> = {},
) => call(server, 'POST', petitionsPath, { body: petition(members), headers, timeoutMs })

export const move = (server: { origin: string }, id: unknown, to: string, reason?: string, headers = {}) =>
  post(server, `${petitionsPath}/${id}/transitions`, { to, ...(reason !== undefined && { reason }) }, headers)

export const halt = (server: { origin: string }, reason: string) => post(server, '/api/v1/admin/halt', { reason })
export const resume = (server: { origin: string }) => call(server, 'DELETE', '/api/v1/admin/halt')

export const verify = async (server: { origin: string }, headers: Record<string, string> = {}) =>
  (await call(server, 'GET', '/api/v1/ledger/verify', { headers, timeoutMs })).body

/** A row of the ledger, as it is exported. */
export interface Entry extends Record<string, unknown> {
  seq: number
  at: string
  type: string
  actor: string
  payload: Record<string, unknown>
  prev_hash: string
  hash: string
}

/** The whole ledger, page by page. */
export async function exportLedger(server: { origin: string }, headers: Record<string, string> = {}): Promise<Entry[]> {
  const entries: Entry[] = []
  for (let after: string | null = '0'; after !== null; ) {
    const page: Answer = await get(server, `/api/v1/ledger?limit=200&after=${after}`, headers)
    if (page.status !== 200) throw new Error(`the ledger answers ${page.status}: ${page.text}`)
    entries.push(...(page.body.items as unknown as Entry[]))
    after = page.body.next_cursor
  }
  return entries
}

export const times = <T>(n: number, make: (i: number) => Promise<T>): Promise<T[]> =>
  Promise.all(Array.from({ length: n }, (_, i) => make(i)))

/** How many were answered with which status. */
export function statuses(answers: readonly Answer[]): Record<number, number> {
  const counts: Record<number, number> = {}
  for (const { status } of answers) counts[status] = (counts[status] ?? 0) + 1
  return counts
}
