/** The servers of the petitions' section, the load on them, and their metrics. */
import { fileURLToPath } from 'node:url'
import pg from 'pg'
import type { Children } from '../children.js'
import { findWrk } from '../load/wrk.js'
import { petitionBody, petitionsPath, submitterPrefix } from '../programs/petition-body.js'
import type { Offer, Offered } from '../programs/petition-offer.js'
import type { BenchContext } from '../section.js'

export interface Site {
  readonly origin: string
  readonly pid: number
  /** Of a server that keeps what it answers. */
  readonly databaseUrl?: string
}

/** Higher than any load of the section: what is measured is the way through the gates, not their refusing. */
const unreached = '10000000'
const roomForAll = { PETITION_QUEUE_THRESHOLD: '100000000' }
export const allLimits = {
  ...roomForAll,
  PETITION_RATE_LIMIT_REALM_PER_HOUR: unreached,
  PETITION_RATE_LIMIT_GLOBAL_PER_HOUR: unreached,
  PETITION_RATE_LIMIT_GENERAL_PER_HOUR: unreached,
}

export async function startServer(
  context: BenchContext,
  name: string,
  env: Record<string, string> = roomForAll,
): Promise<Site> {
  const databaseUrl = await context.postgres.createDatabase(name)
  const { origin, pid } = await context.serve({ DATABASE_URL: databaseUrl, ...env })
  return { origin, pid, databaseUrl }
}

export async function startProgram(
  context: BenchContext,
  program: string,
  env: Record<string, string> = {},
): Promise<Site> {
  const child = context.start(program, { env })
  const [, origin = ''] = await child.line(/^LISTENS (\S+)$/)
  return { origin, pid: child.pid }
}

/** Asks the clients' process for a load. */
export async function offer(clients: Site, to: Site, load: Omit<Offer, 'host' | 'port'>): Promise<Offered> {
  const { hostname, port } = new URL(to.origin)
  const body: Offer = { host: hostname, port: Number(port), ...load }
  const answer = await fetch(clients.origin, { method: 'POST', body: JSON.stringify(body) })
  if (!answer.ok) throw new Error(`the load could not be offered: ${answer.status} ${await answer.text()}`)
  return (await answer.json()) as Offered
}

export const connections = 64
const script = fileURLToPath(new URL('../programs/petitions.lua', import.meta.url))

/** What became of a closed loop of 64 connections. */
interface Closed {
  readonly answered: number
  /** Of them, those that were not 2xx: 503, as nobody's limit is reached. */
  readonly refused: number
  readonly seconds: number
  readonly p99Ms: number
}

/** Rejects when a connection failed or nothing was accepted. */
export type SubmitLoad = (to: Site, seconds: number, keyed: boolean) => Promise<Closed>

/** By wrk, which leaves the machine to what is measured; where there is none by our own clients. */
export async function submitLoad(context: BenchContext, children: Children, clients: Site): Promise<SubmitLoad> {
  const wrk = await findWrk((text) => context.say(text))
  const checked = (to: Site, failed: number, closed: Closed): Closed => {
    if (failed === 0 && closed.answered > closed.refused) return closed
    throw new Error(
      `of ${closed.answered} submissions to ${to.origin} ${closed.refused} were refused and ${failed} failed`,
    )
  }
  if (wrk === null) {
    return async (to, seconds, keyed) => {
      const offered = await offer(clients, to, {
        ...{ connections, connectionsMax: connections, seconds, ratePerSecond: null, keyed },
      })
      const answered = offered.due - offered.unanswered
      const closed = {
        answered,
        refused: answered - offered.accepted,
        seconds: offered.seconds,
        p99Ms: offered.acceptedMs.p99,
      }
      return checked(to, offered.unanswered, closed)
    }
  }
  return async (to, seconds, keyed) => {
    const child = children.start({
      command: wrk.command,
      args: [
        ...['-t', '1', '-c', String(connections), '-d', `${seconds}s`, '--timeout', '10s', '-s', script],
        ...[`${to.origin}${petitionsPath}`, '--', new URL(to.origin).host, petitionsPath, submitterPrefix()],
        ...(keyed ? ['keyed'] : []),
      ],
      env: wrk.env,
      cwd: fileURLToPath(new URL('.', import.meta.url)),
      name: 'wrk',
    })
    const [, json = ''] = await child.line(/^RESULT (.*)$/, (seconds + 30) * 1_000)
    await child.ended
    const { failed, ...closed } = JSON.parse(json) as Closed & { failed: number }
    return checked(to, failed, closed)
  }
}

/** One submission, not measured. */
export function submitOne(to: Site): Promise<Response> {
  const body = JSON.stringify(petitionBody(submitterPrefix(), 0))
  return fetch(`${to.origin}${petitionsPath}`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body,
  })
}

/** The echo is a fair measure only while it answers what Spillway answers: status, names of headers, length of body. */
export async function compareAnswers(own: Site, echo: Site): Promise<void> {
  const weigh = async (site: Site): Promise<string> => {
    const answer = await submitOne(site)
    const { length } = await answer.text()
    return `${answer.status}, ${length} bytes, ${[...answer.headers.keys()].sort().join(' ')}`
  }
  const [is, wanted] = [await weigh(echo), await weigh(own)]
  if (is !== wanted) {
    throw new Error(`programs/petition-echo.ts must answer as Spillway does.\nSpillway: ${wanted}\nit:       ${is}`)
  }
}

export async function query<Row extends pg.QueryResultRow>(url: string, sql: string, values: unknown[] = []) {
  const client = new pg.Client({ connectionString: url })
  await client.connect()
  try {
    return (await client.query<Row>(sql, values)).rows
  } finally {
    await client.end()
  }
}

/** Every 201 has its row, and every row its event: else a server would be as fast as the echo. */
export async function checkStored(site: Site, answered: number): Promise<void> {
  const [found] = await query<{ petitions: number; witnessed: number }>(
    site.databaseUrl ?? '',
    `SELECT (SELECT count(*)::int FROM spillway.petitions) AS petitions,
       (SELECT count(*)::int FROM spillway.ledger WHERE type = 'petition.submission.received') AS witnessed`,
  )
  const { petitions = 0, witnessed = 0 } = found ?? {}
  if (petitions < answered) throw new Error(`${site.origin} answered ${answered} submissions and stored ${petitions}`)
  if (petitions !== witnessed) throw new Error(`${petitions} petitions are stored and ${witnessed} witnessed`)
}

/** By upper bound in seconds, how often a gate decided within it: the cumulative buckets of a scrape. */
export type Buckets = ReadonlyMap<number, number>

export async function gateBuckets(site: Site, gate: string): Promise<Buckets> {
  const text = await (await fetch(`${site.origin}/metrics`)).text()
  const buckets = new Map<number, number>()
  for (const line of text.split('\n')) {
    const found = /^spillway_admission_duration_seconds_bucket\{(.*)\} (\d+)/.exec(line)
    const [, labels = '', count = ''] = found ?? []
    if (!labels.includes(`gate="${gate}"`)) continue
    buckets.set(Number(/le="([^"]+)"/.exec(labels)?.[1]?.replace('+Inf', 'Infinity')), Number(count))
  }
  if (buckets.size === 0) throw new Error(`/metrics has no buckets of the gate ${gate}`)
  return buckets
}

/** The bucket that the share falls into, by its upper end: the time is at most that, in milliseconds. */
export function atMostMs(before: Buckets, after: Buckets, share: number): number {
  const counts = [...after].map(([le, count]) => [le, count - (before.get(le) ?? 0)] as const).sort(([a], [b]) => a - b)
  const total = counts.at(-1)?.[1] ?? 0
  if (total === 0) throw new Error('the gate decided nothing meanwhile')
  const found = counts.find(([, count]) => count >= share * total)
  return (found?.[0] ?? Number.POSITIVE_INFINITY) * 1_000
}
