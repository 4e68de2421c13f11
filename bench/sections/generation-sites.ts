/** The servers of the generation section, and the process that reads from them. */
import { setTimeout as delay } from 'node:timers/promises'
import type { Flow, Flowed } from '../programs/stream-flow.js'
import type { Held } from '../programs/stream-holding.js'
import type { StreamSite } from '../programs/stream-reader.js'
import type { BenchRedis } from '../redis.js'
import type { BenchContext } from '../section.js'
import { type Site, startProgram } from './petitions-sites.js'

/** A way from the model to the reader: where it is asked, and the processes that it takes. */
export interface Way extends StreamSite {
  readonly name: string
  readonly pids: readonly number[]
  /** Ends what goes on although nobody reads it. */
  stop?(): Promise<void>
}

export const chatPath = '/v1/chat/completions'
export const nativePath = '/api/v1/stream'

export const names = {
  straight: 'straight from the model',
  pipe: 'Fastify that pipes',
  number: 'Fastify that numbers the chunks',
  direct: 'Spillway, direct',
  directRedis: 'Spillway, direct, log in Redis',
  relay: 'Spillway, gateway and worker apart',
  relayRedis: 'Spillway, gateway and worker apart, log in Redis',
  resumable: 'resumable-stream, gateway and producer apart',
} as const

/** Higher than any load of the section: what is measured is the way of the tokens, not the waiting for a place. */
const roomForAll = { GENERATION_CONCURRENCY: '2000' }
/** One place for all, and who has it says nothing and never ends: every other stream has to go by the queue. */
const onePlace = {
  CONNECTION_POOL_MAX_GLOBAL: '1',
  QUEUE_FAILOVER_TIMEOUT_SECONDS: '3600',
  STREAM_FIRST_TOKEN_SECONDS: '3600',
  STREAM_IDLE_SECONDS: '3600',
  STREAM_TOTAL_SECONDS: '86400',
}

export interface Sites {
  readonly upstream: Site
  readonly clients: Site
  /** Streams that the model has all the time: those that hold the only place. */
  readonly held: number
  readonly straight: Way
  readonly pipe: Way
  readonly number: Way
  readonly direct: Way
  readonly relay: Way
  /** With the log in Redis, and the peer that needs one; null where there is none. */
  readonly redis: { readonly direct: Way; readonly relay: Way; readonly resumable: Way } | null
}

export async function startSites(context: BenchContext, redis: BenchRedis | null): Promise<Sites> {
  const upstream = await startProgram(context, 'programs/stream-upstream.ts')
  const clients = await startProgram(context, 'programs/stream-clients.ts')
  const proxy = async (name: string, mode: string): Promise<Way> => {
    const { origin, pid } = await startProgram(context, 'programs/stream-proxy.ts', {
      MODE: mode,
      UPSTREAM: upstream.origin,
    })
    return { name, origin, path: chatPath, pids: [pid] }
  }
  const own = { GENERATION_UPSTREAM_URL: `${upstream.origin}/v1`, ...roomForAll }
  const log = redis === null ? {} : { REDIS_URL: redis.url }
  return {
    ...{ upstream, clients, held: redis === null ? 1 : 2 },
    straight: { name: names.straight, origin: upstream.origin, path: chatPath, pids: [upstream.pid] },
    pipe: await proxy(names.pipe, 'pipe'),
    number: await proxy(names.number, 'number'),
    direct: await startDirect(context, names.direct, 'generation_direct', own),
    relay: await startRelay({ context, clients }, names.relay, 'generation_relay', own),
    redis:
      redis === null
        ? null
        : {
            direct: await startDirect(context, names.directRedis, 'generation_direct_redis', { ...own, ...log }),
            // In a database of its own, hence by a name of its own in the same Redis.
            relay: await startRelay({ context, clients }, names.relayRedis, 'generation_relay_redis', {
              ...{ ...own, ...log, SPILLWAY_DB_SCHEMA: 'relayed' },
            }),
            resumable: await startResumable(context, upstream, redis),
          },
  }
}

async function startDirect(
  context: BenchContext,
  name: string,
  database: string,
  env: Record<string, string>,
): Promise<Way> {
  const databaseUrl = await context.postgres.createDatabase(database)
  const { origin, pid } = await context.serve({ DATABASE_URL: databaseUrl, ...env })
  return { name, origin, path: chatPath, pids: [pid] }
}

/** Takes the only place. */
export function holdPlace(clients: Site, to: StreamSite): Promise<Held> {
  return sendCommand<Held>(clients, 'hold', { to, count: 1, users: 'holder' })
}

async function startRelay(
  { context, clients }: { context: BenchContext; clients: Site },
  name: string,
  database: string,
  env: Record<string, string>,
): Promise<Way> {
  const shared = { DATABASE_URL: await context.postgres.createDatabase(database), ...env, ...onePlace }
  const worker = await context.serve({ ...shared, SPILLWAY_ROLES: 'worker' })
  // One slot, taken by the holder of the place: the gateway would run itself what it could begin at once.
  const { origin, pid } = await context.serve({ ...shared, SPILLWAY_ROLES: 'gateway', GENERATION_CONCURRENCY: '1' })
  await holdPlace(clients, { origin, path: chatPath })
  return { name, origin, path: chatPath, pids: [pid, worker.pid] }
}

async function startResumable(context: BenchContext, upstream: Site, redis: BenchRedis): Promise<Way> {
  const part = (name: string, next: Site): Promise<Site> =>
    startProgram(context, 'programs/stream-resumable.ts', { PART: name, NEXT: next.origin, REDIS: redis.url })
  const producer = await part('producer', upstream)
  const { origin, pid } = await part('gateway', producer)
  return {
    ...{ name: names.resumable, origin, path: chatPath, pids: [pid, producer.pid] },
    // It goes on to its end, and these have none.
    stop: async () => void (await fetch(`${producer.origin}/stop`, { method: 'POST' })),
  }
}

/** Sends a command to the readers' process, and waits for its result. */
export async function sendCommand<T>(clients: Site, what: string, asked: object): Promise<T> {
  const answer = await fetch(`${clients.origin}/${what}`, { method: 'POST', body: JSON.stringify(asked) })
  if (!answer.ok) throw new Error(`${what} could not be measured: ${answer.status} ${await answer.text()}`)
  return (await answer.json()) as T
}

export interface UpstreamState {
  /** Streams under way. */
  readonly open: number
  /** By how much it sent tokens late, since the last reset. */
  readonly lateP99Ms: number
}

export async function stateOf(upstream: Site, forget = false): Promise<UpstreamState> {
  return (await (await fetch(`${upstream.origin}/state${forget ? '?forget' : ''}`)).json()) as UpstreamState
}

const emptyTimeoutMs = 30_000
const emptyPollMs = 50

/** Waits until the model has no open streams: those left over by a run would add to the cost of the next one. */
export async function untilEmpty(upstream: Site, besides = 0): Promise<void> {
  for (const end = performance.now() + emptyTimeoutMs; performance.now() < end; await delay(emptyPollMs)) {
    if ((await stateOf(upstream)).open <= besides) return
  }
  throw new Error(`streams went on for ${emptyTimeoutMs} ms after their readers had left`)
}

export async function flowThrough(
  { upstream, clients, held }: Pick<Sites, 'upstream' | 'clients' | 'held'>,
  way: Way,
  load: Pick<Flow, 'streams' | 'every' | 'seconds' | 'settleSeconds'>,
): Promise<Flowed> {
  const { origin, path, pids } = way
  const flowed = await sendCommand<Flowed>(clients, 'flow', { to: { origin, path }, pids, ...load })
  await way.stop?.()
  await untilEmpty(upstream, held)
  if (flowed.gaps > 0) throw new Error(`${way.name}: ${flowed.gaps} tokens were lost, repeated or out of order`)
  return flowed
}
