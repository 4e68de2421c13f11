/** The servers whose accepting is measured: alive all at once, loaded one at a time, and held to their word. */
import pg from 'pg'
import type { Load } from '../load/index.js'
import { requestMaker } from '../load/requests.js'
import type { BenchContext } from '../section.js'

export const path = '/api/v1/operations'
export const connections = 64
export const lanes = 200

/** One process that is alive during the whole section. */
export interface Site {
  readonly origin: string
  readonly pid: number
  /** Counts what is stored, to be held against what was answered. */
  readonly stored?: { readonly url: string; readonly sql: string }
}

/** How the best size of a pool is looked for. A single one is taken as it is. */
export interface PoolSearch {
  readonly poolSizes: readonly number[]
  readonly searchSeconds: number
}

const spillwayCount = 'SELECT count(*)::int AS stored FROM spillway.ops'

export type Sites = Awaited<ReturnType<typeof startSites>>

export async function startSites(context: BenchContext, pace: PoolSearch) {
  const { postgres } = context
  context.say('starting the servers')
  const spillway = async (name: string): Promise<Site> => {
    const url = await postgres.createDatabase(name)
    // Without the role worker it accepts, and runs nothing: draining is another section.
    const { origin, pid } = await context.serve({ DATABASE_URL: url, SPILLWAY_ROLES: 'gateway' })
    return { origin, pid, stored: { url, sql: spillwayCount } }
  }
  const program = async (file: string, env: Record<string, string>, peer = false): Promise<Site> => {
    const child = context.start(file, { env, peer })
    const [, origin = ''] = await child.line(/^LISTENS (\S+)$/)
    return { origin, pid: child.pid }
  }
  const gated = async (): Promise<Site> => {
    const url = await postgres.createDatabase('accept_gated')
    const site = await program('programs/gated.ts', { DATABASE_URL: url })
    return { ...site, stored: { url, sql: spillwayCount } }
  }
  const [echo, newerEcho, ...spillways] = await Promise.all([
    program('programs/echo.ts', {}),
    program('programs/echo.ts', {}, true),
    spillway('accept_spillway'),
    spillway('accept_one_lane'),
    spillway('accept_many_lanes'),
    spillway('accept_keyed'),
    gated(),
  ])
  const [ordinary, oneLane, manyLanesSite, keyed, gatedSite] = spillways
  return {
    echo,
    newerEcho,
    spillway: ordinary,
    oneLane,
    manyLanes: manyLanesSite,
    keyed,
    gated: gatedSite,
    commit: await bestPool(context, pace, {
      program: 'programs/one-commit.ts',
      database: 'accept_commit',
      sql: 'SELECT count(*)::int AS stored FROM operations',
    }),
    boss: await bestPool(context, pace, {
      program: 'programs/pg-boss-send.ts',
      database: 'accept_boss',
      peer: true,
      sql: "SELECT count(*)::int AS stored FROM pgboss.job WHERE name = 'bench'",
    }),
    graphile: await bestPool(context, pace, {
      program: 'programs/graphile-add-job.ts',
      database: 'accept_graphile',
      peer: true,
      sql: "SELECT count(*)::int AS stored FROM graphile_worker.jobs WHERE task_identifier = 'bench'",
    }),
  } satisfies Record<string, Site>
}

interface Pooled extends Site {
  readonly poolSize: number
}

/** The pool size with which a variant is fastest here; the others get no more than a try. */
async function bestPool(
  context: BenchContext,
  pace: PoolSearch,
  peer: { program: string; database: string; peer?: boolean; sql: string },
): Promise<Pooled> {
  let best: { poolSize: number; perSecond: number } | undefined
  const start = async (poolSize: number, database: string) => {
    const url = await context.postgres.createDatabase(database)
    const env = { DATABASE_URL: url, POOL_MAX: String(poolSize) }
    const child = context.start(peer.program, { env, peer: peer.peer ?? false })
    const [, origin = ''] = await child.line(/^LISTENS (\S+)$/)
    return { url, child, origin }
  }
  // A single candidate needs no try.
  for (const poolSize of pace.poolSizes.length > 1 ? pace.poolSizes : []) {
    const { child, origin } = await start(poolSize, `${peer.database}_try`)
    const load: Load = { origin, path, connections, lanes, seconds: pace.searchSeconds }
    await context.load.run(load)
    const { perSecond } = await context.load.run(load)
    await child.stop()
    if (best === undefined || perSecond > best.perSecond) best = { poolSize, perSecond }
  }
  await context.postgres.dropDatabase(`${peer.database}_try`)
  const poolSize = best?.poolSize ?? pace.poolSizes[0] ?? 10
  if (best !== undefined) context.say(`${peer.program} is fastest with ${poolSize} connections`)
  const { url, origin, child } = await start(poolSize, peer.database)
  return { origin, pid: child.pid, poolSize, stored: { url, sql: peer.sql } }
}

/** What an answer weighs: its status, the names of its headers, and the length of its body. */
async function weigh(site: Site): Promise<string> {
  const {
    path: url,
    method,
    headers,
    body,
  } = requestMaker({
    origin: site.origin,
    path,
    connections,
    seconds: 0,
    lanes,
    async: true,
  })()
  const answer = await fetch(`${site.origin}${url}`, { method, headers, body })
  const { length } = await answer.text()
  return `${answer.status}, ${length} bytes, ${[...answer.headers.keys()].sort().join(' ')}`
}

/** The echo is a fair measure only while it answers what Spillway answers. */
export async function compareAnswers(sites: Sites): Promise<void> {
  const own = await weigh(sites.spillway)
  for (const site of [sites.echo, sites.newerEcho, sites.commit, sites.boss, sites.graphile]) {
    const other = await weigh(site)
    if (other === own) continue
    throw new Error(`programs/handler-app.ts must answer as Spillway does.\nSpillway: ${own}\nit:       ${other}`)
  }
}

/** An answer that was not stored would make a variant as fast as the echo. */
export async function checkStored(answered: ReadonlyMap<Site, number>): Promise<void> {
  for (const [{ origin, stored }, requests] of answered) {
    if (stored === undefined) continue
    const client = new pg.Client({ connectionString: stored.url })
    await client.connect()
    try {
      const { rows: found } = await client.query<{ stored: number }>(stored.sql)
      const count = found[0]?.stored ?? 0
      if (count < requests) throw new Error(`${origin} answered ${requests} requests and stored ${count}`)
    } finally {
      await client.end()
    }
  }
}
