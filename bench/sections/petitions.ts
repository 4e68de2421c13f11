/** Petitions: what exact gates and the ledger leave of the bare echo, and what refusing, overload and verifying cost. */
import { setTimeout as delay } from 'node:timers/promises'
import { Children } from '../children.js'
import { figure, verdict } from '../figures.js'
import { usageOf } from '../process-usage.js'
import type { Offered } from '../programs/petition-offer.js'
import { countQueries, type QueryCounter } from '../query-counter.js'
import { interleave, of, type Variant } from '../rounds.js'
import type { BenchContext, Figure, Section, SectionResult, Verdict } from '../section.js'
import { median, pairedRatio } from '../statistics.js'
import { fillLedger, type Verified, verifyLedger } from './petitions-ledger.js'
import { type Kind, kindNames, kinds, measureRates, type Rates } from './petitions-rates.js'
import {
  allLimits,
  atMostMs,
  checkStored,
  compareAnswers,
  connections,
  gateBuckets,
  offer,
  type Site,
  type SubmitLoad,
  startProgram,
  startServer,
  submitLoad,
  submitOne,
} from './petitions-sites.js'

interface Pace {
  readonly rounds: number
  readonly seconds: number
  readonly warmUpSeconds: number
  /** Submissions one at a time, of each kind. */
  readonly alone: number
  readonly refuseSeconds: number
  readonly overloadRounds: number
  readonly overloadSeconds: number
  readonly ledgerRows: number
  readonly verifyRounds: number
}

const paces: Readonly<Record<'full' | 'quick', Pace>> = {
  full: {
    ...{ rounds: 5, seconds: 4, warmUpSeconds: 10, alone: 2_000, refuseSeconds: 15 },
    ...{ overloadRounds: 3, overloadSeconds: 10, ledgerRows: 1_000_000, verifyRounds: 3 },
  },
  quick: {
    ...{ rounds: 3, seconds: 2, warmUpSeconds: 6, alone: 400, refuseSeconds: 5 },
    ...{ overloadRounds: 1, overloadSeconds: 5, ledgerRows: 200_000, verifyRounds: 2 },
  },
}

const names = {
  echo: 'bare echo',
  spillway: "Spillway, the submitter's limit",
  tiers: 'Spillway, all limits',
  keyed: "Spillway, the submitter's limit, idempotency key",
} as const
const variantNames = Object.values(names)

/** Held at capacity by the server that refuses. */
const threshold = 100
const refusePerSecond = 10_000
const overloadFactor = 2
/** More than are under way at once while the server keeps up: with fewer it would be the clients that shed. */
const manyClients = { connections: 1_000, connectionsMax: 4_000 }
/** So few that what is measured is refusing, not connecting. */
const fewClients = { connections, connectionsMax: 512 }

export const petitions: Section = {
  name: 'petitions',
  title: 'Petitions: exact capacity and rate, witnessed',
  estimateSeconds(quick) {
    const pace = paces[quick ? 'quick' : 'full']
    const submitting = variantNames.length * (pace.rounds * pace.seconds + pace.warmUpSeconds)
    const alone = (pace.alone * 6) / 200
    const overload = pace.refuseSeconds + pace.overloadRounds * (pace.overloadSeconds + 2)
    return submitting + alone + overload + (pace.ledgerRows / 20_000) * (1 + pace.verifyRounds / 4) + 25
  },
  run: measure,
}

async function measure(context: BenchContext): Promise<SectionResult> {
  const pace = paces[context.quick ? 'quick' : 'full']
  const children = new Children()
  const counters: QueryCounter[] = []
  const counted = async (name: string): Promise<QueryCounter> => {
    const counter = await countQueries(await context.postgres.createDatabase(name))
    counters.push(counter)
    return counter
  }
  try {
    context.say('starting the servers')
    const clients = await startProgram(context, 'programs/petition-clients.ts')
    const sites = {
      echo: await startProgram(context, 'programs/petition-echo.ts'),
      spillway: await startServer(context, 'petitions'),
      tiers: await startServer(context, 'petitions_tiers', allLimits),
    }
    await compareAnswers(sites.spillway, sites.echo)
    const load = await submitLoad(context, children, clients)
    const submitted = await measureSubmitting(context, pace, sites, load)
    const overloaded = await measureOverload(context, pace, sites.spillway, clients, submitted.perSecond)
    const alone = await measureRates(context, pace.alone, await counted('petitions_rates'))
    const refusing = await measureRefusing(context, pace, clients, await counted('petitions_full'))
    const verified = await measureVerifying(context, pace)
    return conclude(context, pace, { submitted, overloaded, alone, refusing, verified })
  } finally {
    await children.close()
    for (const counter of counters) await counter.close()
  }
}

interface Loaded {
  /** Answered 201. */
  readonly perSecond: number
  /** Answered 503: on a machine that others use, writes may take so long that some are shed. */
  readonly refusedPercent: number
  readonly p99Ms: number
  /** CPU time of the server's process for each request. */
  readonly cpuUs: number
}

interface Submitted {
  readonly loads: ReadonlyMap<string, readonly Loaded[]>
  /** What Spillway accepted with the submitter's limit: the median. */
  readonly perSecond: number
  /** The capacity gate's own time at that load. */
  readonly capacityP99Ms: number
}

async function measureSubmitting(
  context: BenchContext,
  pace: Pace,
  sites: { readonly echo: Site; readonly spillway: Site; readonly tiers: Site },
  load: SubmitLoad,
): Promise<Submitted> {
  const accepted = new Map<Site, number>()
  const variant = (name: string, site: Site, seconds: number, keyed = false): Variant<Loaded> => ({
    name,
    async run() {
      const before = usageOf(site.pid).cpuSeconds
      const { answered, refused, seconds: took, p99Ms } = await load(site, seconds, keyed)
      const done = answered - refused
      accepted.set(site, (accepted.get(site) ?? 0) + done)
      const cpuUs = ((usageOf(site.pid).cpuSeconds - before) / answered) * 1e6
      return { perSecond: done / took, refusedPercent: (refused / answered) * 100, p99Ms, cpuUs }
    },
  })
  const variants = (seconds: number): Variant<Loaded>[] => [
    variant(names.echo, sites.echo, seconds),
    variant(names.spillway, sites.spillway, seconds),
    variant(names.tiers, sites.tiers, seconds),
    variant(names.keyed, sites.spillway, seconds, true),
  ]
  context.say('warming up')
  for (const one of variants(pace.warmUpSeconds)) await one.run()
  const before = await gateBuckets(sites.spillway, 'capacity')
  const loads = await interleave(variants(pace.seconds), pace.rounds, (round) =>
    context.say(`submitting: round ${round + 1} of ${pace.rounds}`),
  )
  const after = await gateBuckets(sites.spillway, 'capacity')
  for (const site of [sites.spillway, sites.tiers]) await checkStored(site, accepted.get(site) ?? 0)
  return {
    loads,
    perSecond: median(of(loads, names.spillway).map((one) => one.perSecond)),
    capacityP99Ms: atMostMs(before, after, 0.99),
  }
}

/** An open loop, so that what is not accepted is not waited for either. */
async function measureOverload(
  context: BenchContext,
  pace: Pace,
  site: Site,
  clients: Site,
  perSecond: number,
): Promise<readonly Offered[]> {
  const results: Offered[] = []
  const ratePerSecond = Math.round(perSecond * overloadFactor)
  for (let round = 0; round < pace.overloadRounds; round++) {
    context.say(`offering ${ratePerSecond}/s, twice what was accepted, for ${pace.overloadSeconds} s`)
    const { overloadSeconds: seconds } = pace
    const offered = await offer(clients, site, { ...manyClients, seconds, ratePerSecond, keyed: false })
    results.push(offered)
    context.say(`  ${summary(offered)}`)
  }
  return results
}

function summary({ accepted, acceptedMs, refused, unanswered, seconds, lagMs, cores }: Offered): string {
  const perSecond = (count: number): string => `${Math.round(count / seconds)}/s`
  return [
    `accepted ${perSecond(accepted)}, p50 ${acceptedMs.p50.toFixed(0)} ms, p99 ${acceptedMs.p99.toFixed(0)} ms`,
    ...Object.entries(refused).map(([code, count]) => `${code} ${perSecond(count)}`),
    `unanswered ${unanswered}`,
    `clients ${cores.toFixed(2)} cores, lag p99 ${lagMs.p99.toFixed(1)} ms`,
  ].join(' · ')
}

interface Refusing {
  readonly offered: Offered
  /** CPU time of the server's process while it refused, as cores at the rate that was wanted. */
  readonly cores: number
  readonly perSecond: number
  /** Refused by pressure: the process was kept waiting for the CPU. */
  readonly otherPercent: number
  readonly statementsEach: number
  readonly statementsPerSecond: number
  readonly capacityP99Ms: number
}

async function measureRefusing(
  context: BenchContext,
  pace: Pace,
  clients: Site,
  counter: QueryCounter,
): Promise<Refusing> {
  const env = { DATABASE_URL: counter.url, PETITION_QUEUE_THRESHOLD: String(threshold) }
  const { origin, pid } = await context.serve(env)
  const site: Site = { origin, pid }
  await fill(site)
  const load = (seconds: number): Promise<Offered> =>
    offer(clients, site, { ...fewClients, seconds, ratePerSecond: refusePerSecond, keyed: false })
  context.say(`refusing ${refusePerSecond}/s at capacity`)
  await load(2)
  const bucketsBefore = await gateBuckets(site, 'capacity')
  counter.reset()
  const before = usageOf(pid).cpuSeconds
  const offered = await load(pace.refuseSeconds)
  const cpuSeconds = usageOf(pid).cpuSeconds - before
  const statements = [...counter.counts().values()].reduce((sum, n) => sum + n, 0)
  context.say(`  ${summary(offered)}`)
  const refused = sum(offered.refused)
  if (refused === 0 || offered.accepted > 0) throw new Error(`a full server accepted ${offered.accepted} submissions`)
  return {
    offered,
    cores: (cpuSeconds / refused) * refusePerSecond,
    perSecond: refused / offered.seconds,
    otherPercent: (1 - (offered.refused.capacity_exceeded ?? 0) / refused) * 100,
    statementsEach: statements / refused,
    statementsPerSecond: statements / offered.seconds,
    capacityP99Ms: atMostMs(bucketsBefore, await gateBuckets(site, 'capacity'), 0.99),
  }
}

/** Up to the threshold, and until the server says so. */
async function fill(site: Site): Promise<void> {
  for (let n = 0; n <= threshold; n++) {
    const answer = await submitOne(site)
    await answer.body?.cancel()
    const wanted = n < threshold ? 201 : 503
    if (answer.status !== wanted) throw new Error(`submission ${n + 1} of ${threshold} was answered ${answer.status}`)
  }
}

async function measureVerifying(context: BenchContext, pace: Pace): Promise<readonly Verified[]> {
  const site = await startServer(context, 'petitions_ledger')
  context.say(`a ledger of ${pace.ledgerRows} rows is made`)
  await fillLedger(site, pace.ledgerRows)
  const verified: Verified[] = []
  for (let round = 0; round < pace.verifyRounds; round++) {
    context.say(`verifying it: ${round + 1} of ${pace.verifyRounds}`)
    verified.push(await verifyLedger(site, pace.ledgerRows))
    // Garbage of one walk is not the next one's.
    await delay(1_000)
  }
  return verified
}

interface Found {
  readonly submitted: Submitted
  readonly overloaded: readonly Offered[]
  readonly alone: Rates
  readonly refusing: Refusing
  readonly verified: readonly Verified[]
}

function conclude(context: BenchContext, pace: Pace, found: Found): SectionResult {
  return {
    figures: figuresOf(pace, found),
    verdicts: verdictsOf(found),
    plots: [],
    notes: notesOf(context, pace, found),
  }
}

function figuresOf(pace: Pace, { submitted, overloaded, alone, refusing, verified }: Found): Figure[] {
  const ofLoads = (what: string, unit: string, pick: (loaded: Loaded) => number): Figure[] =>
    variantNames.map((variant) => figure({ what, variant, unit, runs: of(submitted.loads, variant).map(pick) }))
  const single = (what: string, variant: string, unit: string, value: number): Figure =>
    figure({ what, variant, unit, runs: [value] })
  const overload = `${overloadFactor} × that rate offered`
  const ofOverload = (variant: string, unit: string, pick: (offered: Offered) => number): Figure =>
    figure({ what: overload, variant, unit, runs: overloaded.map(pick) })
  const full = `${refusePerSecond}/s offered at capacity`
  const ledger = `verifying a ledger of ${pace.ledgerRows} rows`
  const ofVerified = (variant: string, unit: string, pick: (one: Verified) => number): Figure =>
    figure({ what: ledger, variant, unit, runs: verified.map(pick) })
  return [
    ...ofLoads(`submissions over HTTP, ${connections} connections`, '/s', (one) => one.perSecond),
    ...ofLoads('refused at that load', '%', (one) => one.refusedPercent),
    ...ofLoads('p99 of the answer at that load', 'ms', (one) => one.p99Ms),
    ...ofLoads('CPU time of the process for each request', 'µs', (one) => one.cpuUs),
    ofOverload('accepted', '/s', (one) => one.accepted / one.seconds),
    ofOverload('refused', '/s', (one) => sum(one.refused) / one.seconds),
    ofOverload('p50 of those accepted', 'ms', (one) => one.acceptedMs.p50),
    ofOverload('p99 of those accepted', 'ms', (one) => one.acceptedMs.p99),
    ofOverload('not answered, or never sent', '', (one) => one.unanswered),
    ...kindNames.map((kind) => single('one at a time in process, median', kinds[kind], 'ms', alone.alone[kind].p50Ms)),
    ...kindNames.map((kind) => single('one at a time in process, p99', kinds[kind], 'ms', alone.alone[kind].p99Ms)),
    ...kindNames.map((kind) => single('statements for each submission', kinds[kind], '', alone.statements[kind])),
    single('the capacity check in the server, p99 at most', 'while it accepts', 'ms', submitted.capacityP99Ms),
    single('the capacity check in the server, p99 at most', 'while it refuses', 'ms', refusing.capacityP99Ms),
    single(full, 'refused', '/s', refusing.perSecond),
    single(full, 'of them by another gate than capacity', '%', refusing.otherPercent),
    single(full, 'not answered, or never sent', '', refusing.offered.unanswered),
    single(full, 'CPU of the Node.js process for 10,000 of them', 'cores', refusing.cores),
    single(full, 'statements to PostgreSQL', '/s', refusing.statementsPerSecond),
    single(full, 'p99 of the refusal', 'ms', refusing.offered.refusedMs.p99),
    ofVerified('rows', '/s', (one) => one.rowsPerSecond),
    ofVerified('largest resident memory of the server', 'MB', (one) => one.rssMb),
    ofVerified('growth of it meanwhile', 'MB', (one) => one.rssGrowthMb),
  ]
}

const sum = (counts: Readonly<Record<string, number>>): number => Object.values(counts).reduce((all, n) => all + n, 0)

function verdictsOf({ submitted, overloaded, alone, refusing }: Found): Verdict[] {
  const perSecond = (name: string): number[] => of(submitted.loads, name).map((one) => one.perSecond)
  const atMost = (what: string, value: number, unit: string, target: number, note?: string): Verdict =>
    verdict({ what, value, unit, rule: 'at-most', target, ...(note !== undefined && { note }) })
  const added = (kind: Kind): number => alone.alone[kind].p99Ms - alone.alone.insert.p99Ms
  return [
    verdict({
      what: 'petitions: submissions with all gates and the ledger over the bare echo',
      value: pairedRatio(perSecond(names.spillway), perSecond(names.echo)),
      unit: '×',
      rule: 'at-least',
      target: 0.6,
    }),
    atMost(
      'petitions: capacity check, p99',
      Math.max(submitted.capacityP99Ms, refusing.capacityP99Ms),
      'ms',
      1,
      'the upper end of the bucket it falls into',
    ),
    atMost(
      'petitions: statements that the rate limits add to a submission',
      Math.max(0, alone.statements.all - alone.statements.insert),
      '',
      0,
    ),
    atMost("petitions: p99 that the submitter's limit adds to the insert", added('submitter'), 'ms', 2),
    atMost('petitions: p99 that all limits add to the insert', added('all'), 'ms', 2),
    atMost(
      `petitions: CPU at ${refusePerSecond} refusals a second`,
      refusing.cores,
      'cores',
      1,
      `scaled from the ${Math.round(refusing.perSecond)}/s that were refused`,
    ),
    atMost(
      'petitions: statements for each refusal at capacity',
      refusing.statementsEach,
      '',
      0.01,
      'what runs in the background among them',
    ),
    atMost(
      `petitions: p99 of accepted submissions at ${overloadFactor} × overload`,
      median(overloaded.map((one) => one.acceptedMs.p99)),
      'ms',
      200,
    ),
  ]
}

function notesOf({ load }: BenchContext, pace: Pace, { submitted, overloaded, refusing }: Found): string[] {
  const [last] = overloaded.slice(-1)
  const lag = last === undefined ? '' : ` It was ${last.lagMs.p99.toFixed(1)} ms late itself (p99).`
  return [
    `Submissions: ${load.name} on the same machine, ${connections} connections, one request under way on each, a body of about 230 bytes, and a submitter of its own for each petition, so that every one makes a rate bucket and nobody is refused. Spillway is the real \`spillway serve\` with default settings but for the threshold; every petition is inserted, counted and witnessed in the ledger before its 201 leaves, and afterwards as many rows and events were found as were answered 201. What was refused (503, where the machine was too busy to write in time) does not count as a submission.`,
    'The echo parses and validates the same body by the same schema, and its answer has the same status, headers and size.',
    'The capacity check is timed by the server itself, for every request (`spillway_admission_duration_seconds`); the exact check is part of the statement that accepts, so its cost is in the submissions per second.',
    'What the rate limits add is measured in process, one submission at a time, in turns with the insert alone: the same SQL function of the workload, which also writes the ledger. Statements are counted in the wire protocol.',
    `Overload: an open loop (a Poisson process) of ${overloadFactor} × ${Math.round(submitted.perSecond)}/s from a process of its own, which takes CPU from the server on a machine of few cores; times count from when a submission was due.${lag}`,
    `Refusals: an open loop of ${refusePerSecond}/s to a server that holds ${threshold} of ${threshold}; the clients used ${refusing.offered.cores.toFixed(2)} cores of their own. CPU is what the process used for each refusal, times ${refusePerSecond}: that many were reached only if the figure says so.`,
    `The ledger's ${pace.ledgerRows} rows were appended by its own SQL function. Its server verified them a bounded number at a time; resident memory was looked at every 20 ms.`,
  ]
}
