/** Real processes that serve generations from a scripted upstream, to be killed, paused and started again. */
import pg from 'pg'
import { type ScriptedUpstream, startScriptedUpstream } from '../../spillway/test/setup/scripted-upstream.js'
import { type Env, endAll, get, runProgram, type ServerProcess, sample, startServer } from './server-process.js'

export type Role = 'gateway' | 'worker' | 'all'

/** Until what a dead process held is another's. */
export const leaseSeconds = 5
/** Beside the lease: the rounds of those who look for the dead, and a machine that is short of CPU. */
export const marginMs = 12_000

/** Four at once, on a machine that is short of CPU. */
const startMaxMs = 60_000
/** A machine that is short of CPU must not read as a busy store, which is refused with 503. */
const patient: Env = {
  SPILLWAY_LEASE_SECONDS: String(leaseSeconds),
  SPILLWAY_STORE_TIMEOUT_MS: '10000',
  SPILLWAY_ACCEPT_WAIT_BUDGET_MS: '60000',
  QUEUE_FAILOVER_TIMEOUT_SECONDS: '60',
  STREAM_FIRST_TOKEN_SECONDS: '60',
}

export interface FleetMember {
  readonly role: Role
  readonly env: Env
  process: ServerProcess
}

export interface GenerationFleetOptions {
  /** Of a database that is there; the fleet migrates it. */
  url: string
  roles: readonly Role[]
  env?: Env
}

/** They run what they take themselves as far as they have slots: with one each, nearly all is the workers'. */
const ofRole: Readonly<Record<Role, Env>> = {
  gateway: { SPILLWAY_ROLES: 'gateway', GENERATION_CONCURRENCY: '1' },
  worker: { SPILLWAY_ROLES: 'worker' },
  all: {},
}

export interface GenerationFleet {
  readonly url: string
  readonly upstream: ScriptedUpstream
  readonly members: readonly FleetMember[]
  of(role: Role): FleetMember
  /** The one of that role that runs most at this moment: first of what has begun, then of all. */
  busiest(role: Role): Promise<FleetMember>
  /** The streams that a process runs or is about to, and which of them have begun. */
  heldBy(member: FleetMember): Promise<{ id: string; begun: boolean }[]>
  /** Where clients may ask: of everyone that takes requests. */
  origins(): string[]
  /** A dead one's successor, with its settings. */
  restart(member: FleetMember, env?: Env): Promise<void>
  sql<Row extends Record<string, unknown>>(text: string, values?: unknown[]): Promise<Row[]>
  /** The sum of a metric over all that live. */
  sum(metric: string): Promise<number>
  /** What is left that should not be, once nothing is open. */
  leftovers(): Promise<string[]>
  /** The database is the caller's. */
  close(): Promise<void>
}

export async function startGenerationFleet(options: GenerationFleetOptions): Promise<GenerationFleet> {
  const { url } = options
  const upstream = await startScriptedUpstream()
  const pool = new pg.Pool({ connectionString: url, max: 2 })
  // The loss of an idle connection is what some tests bring about.
  pool.on('error', () => undefined)
  const migrated = await runProgram({ DATABASE_URL: url }, { args: ['migrate'] })
  if (migrated.code !== 0) throw new Error(`the database was not migrated: ${migrated.stderr}`)
  const start = (role: Role, env: Env): Promise<ServerProcess> =>
    startServer(
      { DATABASE_URL: url, GENERATION_UPSTREAM_URL: upstream.url, ...patient, ...env, ...ofRole[role] },
      { timeoutMs: startMaxMs },
    )
  const members = await Promise.all(
    options.roles.map(async (role): Promise<FleetMember> => {
      const env = options.env ?? {}
      return { role, env, process: await start(role, env) }
    }),
  )
  const sql = async <Row extends Record<string, unknown>>(text: string, values: unknown[] = []) =>
    (await pool.query<Row>(text, values)).rows
  return {
    ...{ url, upstream, members, sql },
    of: (role) => {
      const found = members.find((member) => member.role === role)
      if (found === undefined) throw new Error(`there is no ${role}`)
      return found
    },
    origins: () => members.filter(({ role }) => role !== 'worker').map(({ process }) => process.origin),
    busiest: async (role) => {
      const held = await sql<{ name: string }>(busiestSql)
      const ofRole = members.filter((member) => member.role === role)
      for (const { name } of held) {
        const found = ofRole.find(({ process }) => name.endsWith(`:${process.pid}`))
        if (found !== undefined) return found
      }
      throw new Error(`no ${role} runs anything`)
    },
    heldBy: ({ process }) => sql<{ id: string; begun: boolean }>(heldBySql, [`%:${process.pid}`]),
    restart: async (member, env = {}) => {
      member.process = await start(member.role, { ...member.env, ...env })
    },
    sum: async (metric) => {
      const texts = await Promise.all(members.map(async ({ process }) => (await get(process, '/metrics')).text))
      return texts.reduce((total, text) => total + (sample(text, metric) ?? 0), 0)
    },
    leftovers: async () => (await sql<{ fault: string }>(leftoversSql)).map(({ fault }) => fault),
    close: async () => {
      await endAll()
      await pool.end()
      await upstream.close()
    },
  }
}

const heldSql = `SELECT w.name, o.id, EXISTS (SELECT FROM spillway.stream_chunks c WHERE c.stream = o.id) AS begun
  FROM spillway.workers w JOIN spillway.leases l ON l.worker = w.id, unnest(l.lanes, l.uptos) z(lane, upto)
  JOIN spillway.ops o ON o.lane = z.lane AND o.seq <= z.upto`

const busiestSql = `SELECT name FROM (${heldSql}) h GROUP BY name ORDER BY count(*) FILTER (WHERE begun) DESC, count(*) DESC`

const heldBySql = `SELECT id, begun FROM (${heldSql}) h WHERE name LIKE $1`

const leftoversSql = `
  SELECT 'the queue: ' || fault AS fault FROM spillway.audit()
  UNION ALL SELECT pool || ': ' || identity || ' holds ' || sum(held) FROM spillway.connections GROUP BY pool, identity
  UNION ALL SELECT 'an operation that is not over: ' || id FROM spillway.ops
  UNION ALL SELECT 'a stream without an end: ' || id FROM spillway.streams WHERE ended IS NULL`
