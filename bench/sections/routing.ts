/** Routing: what gates, policies and records leave of the bare way through JetStream, and how soon overload is seen. */
import { Children } from '../children.js'
import { ask } from '../measurement.js'
import { type BenchNats, startBenchNats } from '../nats.js'
import { interleave, type Variant } from '../rounds.js'
import type { BenchContext, Section, SectionResult } from '../section.js'
import { atMostMs, gateBuckets, startProgram } from './petitions-sites.js'
import { type Hung, measureDetection, startHung } from './routing-overload.js'
import { type Alone, conclude, type Deciding, hangNames, names, providersOf, type Watched } from './routing-report.js'
import {
  type Apart,
  checkDecided,
  compareAnswers,
  type DecideLoad,
  decideLoad,
  gauge,
  type Loaded,
  type OwnWay,
  putPolicy,
  startApart,
  startBareApart,
  startBareTogether,
  startTogether,
  until,
  type Way,
  watchSeconds,
} from './routing-sites.js'

interface Pace {
  readonly rounds: number
  readonly seconds: number
  /** Decisions of each way before anything counts: by number, so that a slow machine measures compiled code too. */
  readonly warmUp: number
  readonly watchRounds: number
  readonly detections: number
  /** Decisions in process, of each size of policy. */
  readonly alone: number
  readonly aloneRounds: number
}

const paces: Readonly<Record<'full' | 'quick', Pace>> = {
  full: {
    ...{ rounds: 5, seconds: 4, warmUp: 20_000, watchRounds: 9 },
    ...{ detections: 5, alone: 200_000, aloneRounds: 5 },
  },
  quick: {
    ...{ rounds: 3, seconds: 2, warmUp: 8_000, watchRounds: 5 },
    ...{ detections: 2, alone: 50_000, aloneRounds: 3 },
  },
}

const warmUpStepSeconds = 2
/** Of a machine that is busy with other things; then it is as warm as it gets. */
const warmUpStepsMax = 8
/** What the slowest way does on a small machine. */
const warmUpPerSecond = 2_000

/** Of one flood: until it is seen, and until the router has forgotten it. */
const detectionSeconds = 13

export const routing: Section = {
  name: 'routing',
  title: 'Routing: decisions through JetStream, with backpressure',
  estimateSeconds(quick) {
    const { rounds, seconds, warmUp, watchRounds, detections, aloneRounds } = paces[quick ? 'quick' : 'full']
    const warming = 5 * (warmUp / warmUpPerSecond)
    const deciding = 4 * rounds * (seconds + 0.3)
    const watching = 2 * watchRounds * (seconds + 0.3)
    return warming + deciding + watching + detections * detectionSeconds + aloneRounds * 2 + 30
  },
  run: measure,
}

async function measure(context: BenchContext): Promise<SectionResult> {
  const pace = paces[context.quick ? 'quick' : 'full']
  const children = new Children()
  const brokers: BenchNats[] = []
  const broker = async (): Promise<BenchNats> => {
    const nats = await startBenchNats()
    brokers.push(nats)
    return nats
  }
  let hung: Hung | undefined
  try {
    const alone = await measureAlone(context, pace)
    context.say('starting the brokers and servers')
    hung = await startHung()
    const sites = await startSites(context, hung, await broker(), await broker())
    const load = await decideLoad(context, children)
    const deciding = await measureDeciding(context, pace, sites, load)
    const watched = await measureWatching(context, pace, { apart: sites.apart, hung, load })
    await checkDecided(sites.together, deciding.decided.together)
    await checkDecided(sites.apart.answering, deciding.decided.apart + watched.decided)
    const detectedMs = await measureDetection(context, await broker(), pace.detections)
    return conclude(context, { alone, deciding, watched, detectedMs })
  } finally {
    await children.close()
    await hung?.close()
    for (const nats of brokers) await nats.stop()
  }
}

interface Sites {
  readonly together: OwnWay
  readonly bareTogether: Way
  readonly apart: Apart
  readonly bareApart: Way
}

/** Spillway and the bare way that it is compared with have the same nats-server, each with a stream of its own. */
async function startSites(context: BenchContext, hung: Hung, one: BenchNats, two: BenchNats): Promise<Sites> {
  const sites = {
    together: await startTogether(context, one),
    bareTogether: await startBareTogether(context, one),
    apart: await startApart(context, two, hung.url),
    bareApart: await startBareApart(context, two),
  }
  for (const own of [sites.together, sites.apart.answering]) await putPolicy(own)
  await compareAnswers(sites.together, sites.bareTogether)
  await compareAnswers(sites.apart.answering, sites.bareApart)
  return sites
}

async function measureAlone(context: BenchContext, pace: Pace): Promise<ReadonlyMap<number, readonly Alone[]>> {
  context.say('deciding in process')
  const { origin } = await startProgram(context, 'programs/routing-decisions.ts')
  const decide = (providers: number): Promise<Alone> =>
    ask<Alone>(origin, 'decide', { count: pace.alone, key: providers })
  for (const providers of providersOf) await decide(providers)
  const found = new Map<number, Alone[]>(providersOf.map((providers) => [providers, []]))
  for (let round = 0; round < pace.aloneRounds; round++) {
    for (const providers of providersOf) found.get(providers)?.push(await decide(providers))
  }
  return found
}

async function warm(way: Variant<Loaded>, pace: Pace): Promise<void> {
  let decided = 0
  for (let step = 0; step < warmUpStepsMax && decided < pace.warmUp; step++) decided += (await way.run()).decided
}

async function measureDeciding(context: BenchContext, pace: Pace, sites: Sites, load: DecideLoad): Promise<Deciding> {
  const decided = { together: 0, apart: 0 }
  const counting = (name: string, way: Way, seconds: number, count: (n: number) => void): Variant<Loaded> => ({
    name,
    async run() {
      const loaded = await load(way, seconds)
      count(loaded.decided)
      return loaded
    },
  })
  const nobody = (): undefined => undefined
  const variants = (seconds: number): Variant<Loaded>[] => [
    counting(names.bareTogether, sites.bareTogether, seconds, nobody),
    counting(names.together, sites.together, seconds, (n) => {
      decided.together += n
    }),
    counting(names.bareApart, sites.bareApart, seconds, nobody),
    counting(names.apart, sites.apart.answering, seconds, (n) => {
      decided.apart += n
    }),
  ]
  context.say('warming up')
  for (const one of variants(warmUpStepSeconds)) await warm(one, pace)
  const site = { origin: sites.together.origin, pid: 0 }
  const before = await gateBuckets(site, 'pressure')
  const loads = await interleave(variants(pace.seconds), pace.rounds, (round) =>
    context.say(`deciding: round ${round + 1} of ${pace.rounds}`),
  )
  const pressureP99Ms = atMostMs(before, await gateBuckets(site, 'pressure'), 0.99)
  return { loads, decided, pressureP99Ms }
}

async function measureWatching(
  context: BenchContext,
  pace: Pace,
  { apart, hung, load }: { apart: Apart; hung: Hung; load: DecideLoad },
): Promise<Watched> {
  const knows = (way: OwnWay, status: string): Promise<void> =>
    until(`the gateway takes the router for ${status}`, async () => {
      return (await gauge(way, 'gateway_backpressure_status', `status="${status}"`)) === 1
    })
  let decided = 0
  const variant = (name: string, way: OwnWay, seconds: number): Variant<Loaded> => ({
    name,
    async run() {
      const loaded = await load(way, seconds)
      decided += loaded.decided
      return loaded
    },
  })
  await warm(variant(hangNames.hung, apart.hung, warmUpStepSeconds), pace)
  await knows(apart.hung, 'unknown')
  await knows(apart.answering, 'inactive')
  const askedBefore = hung.asked()
  const loads = await interleave(
    [variant(hangNames.answering, apart.answering, pace.seconds), variant(hangNames.hung, apart.hung, pace.seconds)],
    pace.watchRounds,
    (round) => context.say(`deciding while the router hangs: round ${round + 1} of ${pace.watchRounds}`),
  )
  const asked = hung.asked() - askedBefore
  if (asked < (pace.watchRounds * pace.seconds) / (4 * watchSeconds)) {
    throw new Error(`the router that hangs was asked ${asked} times only: nothing was proven`)
  }
  await knows(apart.answering, 'inactive')
  return { loads, decided, asked }
}
