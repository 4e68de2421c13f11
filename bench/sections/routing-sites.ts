/** The servers of the routing section, the load on them, and what they hold afterwards. */
import { setTimeout as delay } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { type JetStreamManager, jetstreamManager } from '@nats-io/jetstream'
import { connect, type NatsConnection } from '@nats-io/transport-node'
import type { Children } from '../children.js'
import { findWrk } from '../load/wrk.js'
import type { BenchNats } from '../nats.js'
import { usageOf } from '../process-usage.js'
import {
  decidePath,
  providerFigures,
  providers,
  requestPrefix,
  routerStream,
  taskBody,
  tenants,
} from '../programs/routing-body.js'
import type { BenchContext, BenchProcess } from '../section.js'
import { query } from './petitions-sites.js'

/** A way to decide: where it is asked, and the processes that it takes. */
export interface Way {
  readonly origin: string
  readonly pids: readonly number[]
  readonly nats: BenchNats
}

/** One that keeps what it decides. */
export interface OwnWay extends Way {
  readonly databaseUrl: string
}

/** Higher than any load of the section: what is measured is the way through the gate, not its refusing. */
const unreached = { GATEWAY_RATE_LIMIT_ROUTES_DECIDE_LIMIT: '10000000' }
export const watchSeconds = 1
export const watchTimeoutMs = 1_000

export async function startTogether(context: BenchContext, nats: BenchNats): Promise<OwnWay> {
  const databaseUrl = await context.postgres.createDatabase('routing_together')
  const { origin, pid } = await context.serve({ DATABASE_URL: databaseUrl, NATS_URL: nats.url, ...unreached })
  return { origin, pids: [pid], nats, databaseUrl }
}

export interface Apart {
  /** Its router answers who asks for its metrics. */
  readonly answering: OwnWay
  /** The same router, but what this one asks for its metrics never answers. */
  readonly hung: OwnWay
}

export async function startApart(context: BenchContext, nats: BenchNats, hungUrl: string): Promise<Apart> {
  const databaseUrl = await context.postgres.createDatabase('routing_apart')
  const shared = { DATABASE_URL: databaseUrl, NATS_URL: nats.url, ...unreached }
  const router = await context.serve({ ...shared, SPILLWAY_ROLES: 'router' })
  const gateway = async (metricsUrl: string): Promise<OwnWay> => {
    const { origin, pid } = await context.serve({
      ...shared,
      SPILLWAY_ROLES: 'gateway',
      GATEWAY_ROUTER_METRICS_URL: metricsUrl,
      GATEWAY_BACKPRESSURE_CHECK_INTERVAL_SECONDS: String(watchSeconds),
      GATEWAY_BACKPRESSURE_TIMEOUT_MS: String(watchTimeoutMs),
    })
    return { origin, pids: [pid, router.pid], nats, databaseUrl }
  }
  return { answering: await gateway(`${router.origin}/metrics`), hung: await gateway(hungUrl) }
}

const bare = 'programs/routing-bare.ts'

export async function startBareTogether(context: BenchContext, nats: BenchNats): Promise<Way> {
  const both = context.start(bare, { env: { NATS_URL: nats.url, PART: 'both' } })
  return { origin: await listening(both), pids: [both.pid], nats }
}

export async function startBareApart(context: BenchContext, nats: BenchNats): Promise<Way> {
  const router = context.start(bare, { env: { NATS_URL: nats.url, PART: 'router' } })
  await router.line(/^TAKES$/)
  const gateway = context.start(bare, { env: { NATS_URL: nats.url, PART: 'gateway' } })
  return { origin: await listening(gateway), pids: [gateway.pid, router.pid], nats }
}

async function listening(child: BenchProcess): Promise<string> {
  const [, origin = ''] = await child.line(/^LISTENS (\S+)$/)
  return origin
}

const stateTimeoutMs = 20_000
const statePollMs = 50

/** Asks again and again until it is so. */
export async function until(what: string, isSo: () => Promise<boolean>): Promise<void> {
  for (const end = performance.now() + stateTimeoutMs; performance.now() < end; await delay(statePollMs)) {
    if (await isSo()) return
  }
  throw new Error(`not within ${stateTimeoutMs} ms: ${what}`)
}

const post = (url: string, body: string): Promise<Response> =>
  fetch(url, { method: 'POST', headers: { 'content-type': 'application/json' }, body })

/** Stores the default policy, and waits until the router decides by it. */
export async function putPolicy(way: OwnWay): Promise<void> {
  const { priority, ...figures } = providerFigures
  const policy = {
    policy_id: 'default',
    strategy: 'weighted',
    providers: providers.map((provider_id) => ({ provider_id, priority, ...figures })),
  }
  const put = await post(`${way.origin}/api/v1/policies`, JSON.stringify(policy))
  if (!put.ok) throw new Error(`the policy was not taken: ${put.status} ${await put.text()}`)
  await put.body?.cancel()
  await until('the router decides by the policy', async () => {
    const answer = await post(way.origin + decidePath, taskBody(requestPrefix(), 0))
    const { decision } = (await answer.json()) as { decision?: { provider_id: string } }
    return decision !== undefined && (providers as readonly string[]).includes(decision.provider_id)
  })
}

/** The bare way is a fair measure only while it answers what Spillway answers: status, names of headers, length of body. */
export async function compareAnswers(own: Way, bareWay: Way): Promise<void> {
  const weigh = async ({ origin }: Way): Promise<string> => {
    const answer = await post(origin + decidePath, taskBody(requestPrefix(), 0))
    const { length } = await answer.text()
    return `${answer.status}, ${length} bytes, ${[...answer.headers.keys()].sort().join(' ')}`
  }
  const [is, wanted] = [await weigh(bareWay), await weigh(own)]
  if (is !== wanted) throw new Error(`${bare} must answer as Spillway does.\nSpillway: ${wanted}\nit:       ${is}`)
}

export const connections = 64

export interface Loaded {
  /** Answered 200. */
  readonly decided: number
  readonly perSecond: number
  readonly refusedPercent: number
  readonly p50Ms: number
  readonly p99Ms: number
  /** CPU time for each request: of all Node.js processes of the way, and of its nats-server. */
  readonly cpuUs: number
  readonly natsCpuUs: number
}

/** What became of a closed loop. */
interface Closed {
  readonly answered: number
  /** Of them, those that were not 2xx. */
  readonly refused: number
  /** Connections that failed, and requests without an answer. */
  readonly failed: number
  readonly seconds: number
  readonly p50Ms: number
  readonly p99Ms: number
}

/** Rejects when a connection failed or nothing was decided. */
export type DecideLoad = (to: Way, seconds: number) => Promise<Loaded>

export async function decideLoad(context: BenchContext, children: Children): Promise<DecideLoad> {
  const run = await closedLoop(context, children)
  const cpuOf = (pids: readonly number[]): number => pids.reduce((sum, pid) => sum + usageOf(pid).cpuSeconds, 0)
  return async (to, seconds) => {
    const before = { own: cpuOf(to.pids), nats: cpuOf([to.nats.pid]) }
    const { answered, refused, failed, seconds: took, p50Ms, p99Ms } = await run(to, seconds)
    const decided = answered - refused
    if (failed > 0 || decided === 0) {
      throw new Error(`of ${answered} requests to ${to.origin} ${refused} were refused and ${failed} failed`)
    }
    const each = (cpuSeconds: number): number => (cpuSeconds / answered) * 1e6
    return {
      ...{ decided, perSecond: decided / took, refusedPercent: (refused / answered) * 100, p50Ms, p99Ms },
      cpuUs: each(cpuOf(to.pids) - before.own),
      natsCpuUs: each(cpuOf([to.nats.pid]) - before.nats),
    }
  }
}

const script = fileURLToPath(new URL('../programs/routing.lua', import.meta.url))

/** By wrk, which leaves the machine to what is measured; where there is none by autocannon. */
async function closedLoop(
  context: BenchContext,
  children: Children,
): Promise<(to: Way, seconds: number) => Promise<Closed>> {
  const wrk = await findWrk((text) => context.say(text))
  if (wrk === null) return byAutocannon
  return async ({ origin }, seconds) => {
    const child = children.start({
      command: wrk.command,
      args: [
        ...['-t', '1', '-c', String(connections), '-d', `${seconds}s`, '--timeout', '10s', '-s', script],
        ...[origin + decidePath, '--', new URL(origin).host, decidePath, requestPrefix(), String(tenants)],
      ],
      env: wrk.env,
      cwd: fileURLToPath(new URL('.', import.meta.url)),
      name: 'wrk',
    })
    const [, json = ''] = await child.line(/^RESULT (.*)$/, (seconds + 30) * 1_000)
    await child.ended
    return JSON.parse(json) as Closed
  }
}

async function byAutocannon({ origin }: Way, seconds: number): Promise<Closed> {
  const prefix = requestPrefix()
  let n = 0
  const setupRequest = (): object => {
    n += 1
    const headers = { 'content-type': 'application/json' }
    return { method: 'POST', path: decidePath, headers, body: taskBody(prefix, n) }
  }
  // Here: the tests of this file run without what only the bench installs.
  const { default: autocannon } = await import('autocannon')
  const result = await autocannon({
    ...{ url: origin, connections, duration: seconds, pipelining: 1, timeout: 10, requests: [{ setupRequest }] },
  })
  const { requests, non2xx, errors, timeouts, duration, latency } = result
  return {
    ...{ answered: requests.total, refused: non2xx, failed: errors + timeouts, seconds: duration },
    ...{ p50Ms: latency.p50, p99Ms: latency.p99 },
  }
}

/** A look at a broker from outside. */
export async function withBroker<T>(
  nats: BenchNats,
  look: (nc: NatsConnection, jsm: JetStreamManager) => Promise<T>,
): Promise<T> {
  const nc = await connect({ servers: new URL(nats.url).host, reconnect: false })
  try {
    return await look(nc, await jetstreamManager(nc))
  } finally {
    await nc.close()
  }
}

/** Every answer went through the broker, was acked there, and is kept: else a server would be as fast as it likes. */
export async function checkDecided(way: OwnWay, decided: number): Promise<void> {
  await withBroker(way.nats, async (_, jsm) => {
    await until(`all messages of ${way.origin} are acked`, async () => {
      const { state } = await jsm.streams.info(routerStream)
      if (state.last_seq < decided) throw new Error(`${decided} were decided, ${state.last_seq} went by the broker`)
      return state.messages === 0
    })
  })
  await until(`all ${decided} decisions of ${way.origin} are kept`, async () => {
    const [found] = await query<{ n: number }>(way.databaseUrl, 'SELECT count(*)::int AS n FROM spillway.rt_decisions')
    return (found?.n ?? 0) >= decided
  })
}

/** The value of a gauge, with these labels if any are given. */
export async function gauge({ origin }: Pick<Way, 'origin'>, name: string, labels = ''): Promise<number> {
  const value = gaugeIn(await (await fetch(`${origin}/metrics`)).text(), name, labels)
  if (value === null) throw new Error(`the metrics of ${origin} do not have ${name} ${labels}`)
  return value
}

export function gaugeIn(metrics: string, name: string, labels = ''): number | null {
  for (const line of metrics.split('\n')) {
    if (!line.startsWith(name) || !/^[ {]/.test(line.slice(name.length)) || !line.includes(labels)) continue
    return Number(line.slice(line.lastIndexOf(' ')))
  }
  return null
}
