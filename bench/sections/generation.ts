/** Generation: what the way from a model to a reader costs, direct, through the queue, and when it is lost on the way. */

import type { Flowed } from '../programs/stream-flow.js'
import type { Resumed, Resuming } from '../programs/stream-resuming.js'
import type { Burst, BurstOutcome, FirstByted } from '../programs/stream-waiting.js'
import { type BenchRedis, startRedis } from '../redis.js'
import { interleave, type Variant } from '../rounds.js'
import type { BenchContext, Section, SectionResult } from '../section.js'
import { measureIdle } from './generation-idle.js'
import { burstOf, flowLoads, fullLoad, resuming, resumingLate, type StreamLoad } from './generation-loads.js'
import { type Bursts, conclude, type Loads, type Resumes } from './generation-report.js'
import {
  chatPath,
  flowThrough,
  holdPlace,
  nativePath,
  type Sites,
  sendCommand,
  startSites,
  stateOf,
  untilEmpty,
  type Way,
} from './generation-sites.js'

interface Pace {
  readonly rounds: number
  readonly calmRounds: number
  readonly seconds: number
  readonly settleSeconds: number
  readonly idleStreams: number
  readonly idleSeconds: number
  readonly firstBytes: number
  readonly bursts: number
  readonly resumes: number
}

const paces: Readonly<Record<'full' | 'quick', Pace>> = {
  full: {
    ...{ rounds: 3, calmRounds: 2, seconds: 6, settleSeconds: 1, idleStreams: 10_000, idleSeconds: 36 },
    ...{ firstBytes: 500, bursts: 5, resumes: 100 },
  },
  quick: {
    ...{ rounds: 1, calmRounds: 1, seconds: 3, settleSeconds: 1, idleStreams: 2_000, idleSeconds: 12 },
    ...{ firstBytes: 100, bursts: 2, resumes: 30 },
  },
}

const waysMax = 8
const waysAtSaturation = 4
const startSeconds = 30
const openingSeconds = 3

export const generation: Section = {
  name: 'generation',
  title: 'Generation: streams, direct and through the queue',
  estimateSeconds(quick) {
    const pace = paces[quick ? 'quick' : 'full']
    const one = pace.seconds + pace.settleSeconds + openingSeconds
    const flowing = (waysMax * (1 + pace.calmRounds + pace.rounds) + waysAtSaturation * pace.rounds) * one
    const idle = pace.idleStreams / 400 + pace.idleSeconds + 25
    return startSeconds + flowing + idle + pace.firstBytes / 20 + pace.bursts * 8 + 4 * 12
  },
  run: measure,
}

async function measure(context: BenchContext): Promise<SectionResult> {
  const pace = paces[context.quick ? 'quick' : 'full']
  const redis = await startRedis((text) => context.say(text))
  try {
    const absent = 'absent' in redis ? redis.absent : null
    context.say('starting the servers')
    const sites = await startSites(context, 'absent' in redis ? null : redis)
    const loads = flowLoads[context.quick ? 'quick' : 'full']
    const flow = (name: string, rounds: number, ways: readonly Way[], load: StreamLoad): Promise<Loads> =>
      measureFlow(context, sites, {
        name,
        rounds,
        ways,
        load,
        seconds: pace.seconds,
        settleSeconds: pace.settleSeconds,
      })
    await flow('warming up', 1, waysOf(sites), loads.flow)
    const calm = await flow('calm', pace.calmRounds, waysOf(sites), loads.calm)
    const flowing = await flow('flowing', pace.rounds, waysOf(sites), loads.flow)
    const ends = [sites.straight, sites.pipe, sites.number, sites.direct]
    const full = await flow('at saturation', pace.rounds, ends, fullLoad)
    const resumed = await measureResumes(context, pace, sites)
    const bursts = await measureBursts(context, pace, sites)
    const firstByte = await measureFirstBytes(context, pace, sites)
    context.say(`opening ${pace.idleStreams} streams that wait`)
    const idle = await measureIdle(context, sites, { streams: pace.idleStreams, seconds: pace.idleSeconds })
    return conclude({ calm, flowing, full, resumed, bursts, firstByte, idle, absent, redis: versionOf(redis) })
  } finally {
    if (!('absent' in redis)) await redis.stop()
  }
}

const versionOf = (redis: BenchRedis | { readonly absent: string }): string | null =>
  'absent' in redis ? null : redis.version

function waysOf({ straight, pipe, number, direct, relay, redis }: Sites): Way[] {
  return [
    ...[straight, pipe, number, direct, relay],
    ...(redis === null ? [] : [redis.direct, redis.relay, redis.resumable]),
  ]
}

interface Flowing {
  readonly name: string
  readonly rounds: number
  readonly ways: readonly Way[]
  readonly load: StreamLoad
  readonly seconds: number
  readonly settleSeconds: number
}

async function measureFlow(context: BenchContext, sites: Sites, flowing: Flowing): Promise<Loads> {
  const { name, rounds, ways, load, seconds, settleSeconds } = flowing
  const variants = ways.map(
    (way): Variant<Flowed> => ({
      name: way.name,
      run: () => flowThrough(sites, way, { ...load, seconds, settleSeconds }),
    }),
  )
  await stateOf(sites.upstream, true)
  const loads = await interleave(variants, rounds, (round) => context.say(`${name}: round ${round + 1} of ${rounds}`))
  return { loads, load, lateP99Ms: (await stateOf(sites.upstream)).lateP99Ms }
}

/** Spillway's relays, over both logs, and the peer: while it streams, and when it is over. */
async function measureResumes(context: BenchContext, pace: Pace, sites: Sites): Promise<Resumes> {
  const ways = [sites.relay, ...(sites.redis === null ? [] : [sites.redis.relay, sites.redis.resumable])]
  const found: { way: string; running: Resumed; late: Resumed }[] = []
  for (const way of ways) {
    context.say(`resuming: ${way.name}`)
    const isPeer = way === sites.redis?.resumable
    const to = { origin: way.origin, path: isPeer ? chatPath : nativePath }
    const one = async (how: Pick<Resuming, 'script' | 'readFirst' | 'awayMs'>): Promise<Resumed> => {
      const by = isPeer ? 'characters' : 'id'
      const resumed = await sendCommand<Resumed>(sites.clients, 'resume', { to, by, streams: pace.resumes, ...how })
      await way.stop?.()
      await untilEmpty(sites.upstream, sites.held)
      return resumed
    }
    found.push({ way: way.name, running: await one(resuming), late: await one(resumingLate) })
  }
  return { streams: pace.resumes, found }
}

/** The same server twice, once without the queue behind its pool. */
async function measureBursts(context: BenchContext, pace: Pace, sites: Sites): Promise<Bursts> {
  const serve = async (database: string, failover: boolean): Promise<string> => {
    const { origin } = await context.serve({
      DATABASE_URL: await context.postgres.createDatabase(database),
      GENERATION_UPSTREAM_URL: `${sites.upstream.origin}/v1`,
      CONNECTION_POOL_MAX_PER_USER: String(burstOf.places),
      QUEUE_FAILOVER_ENABLED: String(failover),
    })
    return origin
  }
  const origins = { bare: await serve('generation_bare', false), queued: await serve('generation_queued', true) }
  const found = { bare: [] as BurstOutcome[], queued: [] as BurstOutcome[] }
  for (let round = 0; round < pace.bursts; round++) {
    context.say(`ten at once of one user: round ${round + 1} of ${pace.bursts}`)
    for (const kind of ['bare', 'queued'] as const) {
      const { requests, script } = burstOf
      const asked: Burst = { to: { origin: origins[kind], path: chatPath }, user: `user-${round}`, requests, script }
      const { outcomes } = await sendCommand<{ outcomes: BurstOutcome[] }>(sites.clients, 'burst', asked)
      found[kind].push(...outcomes)
    }
  }
  return found
}

/** With the only place taken, so that every one of them is queued. */
async function measureFirstBytes(context: BenchContext, pace: Pace, sites: Sites): Promise<FirstByted> {
  context.say('the first byte while queued')
  const { origin } = await context.serve({
    DATABASE_URL: await context.postgres.createDatabase('generation_waiting'),
    GENERATION_UPSTREAM_URL: `${sites.upstream.origin}/v1`,
    ...{ CONNECTION_POOL_MAX_PER_USER: '1', QUEUE_FAILOVER_TIMEOUT_SECONDS: '600' },
    ...{ STREAM_FIRST_TOKEN_SECONDS: '600', STREAM_IDLE_SECONDS: '600' },
  })
  await holdPlace(sites.clients, { origin, path: chatPath })
  // A user's queued ones wait for its lane, which the one that runs does not have: a second one keeps that busy.
  await holdPlace(sites.clients, { origin, path: chatPath })
  const asked = { to: { origin, path: chatPath }, user: 'holder-0' }
  const warm = await sendCommand<FirstByted>(sites.clients, 'first-bytes', {
    ...asked,
    count: Math.ceil(pace.firstBytes / 4),
  })
  const found = await sendCommand<FirstByted>(sites.clients, 'first-bytes', { ...asked, count: pace.firstBytes })
  if (found.queued < pace.firstBytes || warm.queued === 0) {
    throw new Error(`of ${pace.firstBytes} streams only ${found.queued} were queued`)
  }
  return found
}
