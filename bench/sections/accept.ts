/** Durable accept over HTTP: the bare echo, one commit per request, Spillway, and the peers behind the same handler. */
import { figure, verdict } from '../figures.js'
import type { Load, LoadResult } from '../load/index.js'
import { ask } from '../measurement.js'
import { usageOf } from '../process-usage.js'
import { interleave, of, type Variant } from '../rounds.js'
import type { BenchContext, Figure, Section, SectionResult, Verdict } from '../section.js'
import { pairedRatio } from '../statistics.js'
import {
  checkStored,
  compareAnswers,
  connections,
  lanes,
  type PoolSearch,
  path,
  type Site,
  type Sites,
  startSites,
} from './accept-sites.js'

const manyLanes = 100_000

const over = 'accept over HTTP, 64 connections'
const inProcess = 'accept in process'

interface Pace extends PoolSearch {
  readonly rounds: number
  readonly seconds: number
  readonly warmUpSeconds: number
  readonly inProcessRounds: number
  readonly inProcessSeconds: number
}

const paces: Readonly<Record<'full' | 'quick', Pace>> = {
  full: {
    rounds: 5,
    seconds: 4,
    warmUpSeconds: 5,
    searchSeconds: 2,
    poolSizes: [4, 8, 16, 32],
    inProcessRounds: 3,
    inProcessSeconds: 3,
  },
  quick: {
    rounds: 3,
    seconds: 2,
    warmUpSeconds: 3,
    searchSeconds: 1,
    poolSizes: [16],
    inProcessRounds: 1,
    inProcessSeconds: 2,
  },
}

export const accept: Section = {
  name: 'accept',
  title: 'Accepting',
  estimateSeconds(quick) {
    const pace = paces[quick ? 'quick' : 'full']
    const http = variantNames.length * (pace.rounds * pace.seconds + pace.warmUpSeconds)
    const search = pace.poolSizes.length > 1 ? 3 * pace.poolSizes.length * (2 * pace.searchSeconds + 1) : 0
    return http + search + inProcessNames.length * pace.inProcessRounds * pace.inProcessSeconds + 25
  },
  run: measure,
}

const names = {
  echo: 'bare echo',
  newerEcho: "bare echo on the peers' Node.js",
  commit: 'one commit per request',
  spillway: 'Spillway, 200 lanes',
  oneLane: 'Spillway, 1 lane',
  manyLanes: 'Spillway, 100,000 lanes',
  keyed: 'Spillway, 200 lanes, idempotency key',
  gated: 'Spillway, idempotency, capacity and rate',
  boss: 'pg-boss send',
  graphile: 'graphile-worker addJob',
} as const
const variantNames = Object.values(names)

const rows = {
  unnest: 'raw unnest of 100, 2 connections',
  submit64: 'Spillway submit, 64 waiting',
  submit256: 'Spillway submit, 256 waiting',
  boss: 'pg-boss insert of 100, 2 at once',
  graphile: 'graphile-worker addJobs of 100, 2 at once',
} as const
const inProcessNames = Object.values(rows)

async function measure(context: BenchContext): Promise<SectionResult> {
  const pace = paces[context.quick ? 'quick' : 'full']
  const sites = await startSites(context, pace)
  await compareAnswers(sites)
  const answered = new Map<Site, number>()
  const variants = httpVariants(context, sites, pace.seconds, answered)
  context.say('warming up')
  for (const variant of httpVariants(context, sites, pace.warmUpSeconds, answered)) await variant.run()
  // Now already: a variant that stores nothing need not be measured for minutes.
  await checkStored(answered)
  const loads = await interleave(variants, pace.rounds, (round) => context.say(`round ${round + 1} of ${pace.rounds}`))
  await checkStored(answered)
  context.say('accepting in process')
  const bulk = await interleave(inProcessVariants(sites, pace.inProcessSeconds), pace.inProcessRounds, () => undefined)

  const perSecond = new Map([...loads].map(([name, results]) => [name, results.map((result) => result.perSecond)]))
  const figures: Figure[] = [
    ...variantNames.map((variant) =>
      figure({ what: over, variant, unit: '/s', runs: of(perSecond, variant), ...noteOf(variant, sites, pace) }),
    ),
    ...variantNames.map((variant) =>
      figure({
        what: 'p99 of the answer at that load',
        variant,
        unit: 'ms',
        runs: of(loads, variant).map((result) => result.p99Ms),
      }),
    ),
    ...variantNames.map((variant) =>
      figure({
        what: 'CPU time of the process for each request',
        variant,
        unit: 'µs',
        runs: of(loads, variant).map((result) => result.cpuUs),
      }),
    ),
    ...inProcessNames.map((variant) => figure({ what: inProcess, variant, unit: 'rows/s', runs: of(bulk, variant) })),
  ]
  return {
    figures,
    verdicts: verdictsOf(perSecond),
    plots: [
      {
        name: 'accept',
        title: 'Durable accept over HTTP: 64 connections, one process each',
        xLabel: '',
        yLabel: 'requests per second',
        kind: 'bars',
        series: variantNames.map((name) => ({
          name,
          points: [[0, figures.find((one) => one.what === over && one.variant === name)?.value ?? 0]],
        })),
      },
    ],
    notes: notes(context),
  }
}

function verdictsOf(perSecond: ReadonlyMap<string, readonly number[]>): Verdict[] {
  const ratio = (what: string, target: number, own: string, other: string, note?: string): Verdict =>
    verdict({
      what,
      value: pairedRatio(of(perSecond, own), of(perSecond, other)),
      unit: '×',
      rule: 'at-least',
      target,
      ...(note !== undefined && { note }),
    })
  return [
    ratio('durable accept over the bare echo', 0.8, names.spillway, names.echo),
    ratio(
      'durable accept with all gates over the bare echo',
      0.6,
      names.gated,
      names.echo,
      'without the ledger, which the petitions have',
    ),
    ratio('durable accept over one commit per request', 2.5, names.spillway, names.commit),
    ratio('durable accept over pg-boss send', 5, names.spillway, names.boss),
    ratio('durable accept over graphile-worker addJob', 5, names.spillway, names.graphile),
  ]
}

interface Loaded extends LoadResult {
  /** CPU time of the server's process for each request. */
  readonly cpuUs: number
}

function httpVariants(
  context: BenchContext,
  sites: Sites,
  seconds: number,
  answered: Map<Site, number>,
): Variant<Loaded>[] {
  const variant = (name: string, site: Site, more: Partial<Load> = {}): Variant<Loaded> => ({
    name,
    async run() {
      const before = usageOf(site.pid).cpuSeconds
      const result = await context.load.run({ origin: site.origin, path, connections, seconds, lanes, ...more })
      answered.set(site, (answered.get(site) ?? 0) + result.requests)
      return { ...result, cpuUs: ((usageOf(site.pid).cpuSeconds - before) / result.requests) * 1e6 }
    },
  })
  return [
    variant(names.echo, sites.echo, { async: true }),
    variant(names.newerEcho, sites.newerEcho, { async: true }),
    variant(names.commit, sites.commit, { async: true }),
    variant(names.spillway, sites.spillway, { async: true }),
    variant(names.oneLane, sites.oneLane, { async: true, lanes: 1 }),
    variant(names.manyLanes, sites.manyLanes, { async: true, lanes: manyLanes }),
    variant(names.keyed, sites.keyed, { async: true, keyed: true }),
    variant(names.gated, sites.gated, { async: true, keyed: true, identified: true }),
    variant(names.boss, sites.boss, { async: true }),
    variant(names.graphile, sites.graphile, { async: true }),
  ]
}

function inProcessVariants(sites: Sites, seconds: number): Variant<number>[] {
  const variant = (name: string, { origin }: Site, measurement: string): Variant<number> => ({
    name,
    async run() {
      const measured = await ask<{ rows: number; seconds: number }>(origin, measurement, { seconds })
      return measured.rows / measured.seconds
    },
  })
  return [
    variant(rows.unnest, sites.commit, 'unnest'),
    variant(rows.submit64, sites.gated, 'submit-64'),
    variant(rows.submit256, sites.gated, 'submit-256'),
    variant(rows.boss, sites.boss, 'insert'),
    variant(rows.graphile, sites.graphile, 'add-jobs'),
  ]
}

function noteOf(variant: string, sites: Sites, pace: Pace): { note?: string } {
  const pools: Record<string, number> = {
    [names.commit]: sites.commit.poolSize,
    [names.boss]: sites.boss.poolSize,
    [names.graphile]: sites.graphile.poolSize,
  }
  const poolSize = pools[variant]
  if (poolSize !== undefined) {
    const why = pace.poolSizes.length > 1 ? `, the best of ${pace.poolSizes.join(', ')}` : ''
    return { note: `${poolSize} connections to PostgreSQL${why}` }
  }
  if (variant === names.gated)
    return { note: 'the library in a Fastify application, 200 users; without the ledger, which the petitions have' }
  return {}
}

function notes({ load }: BenchContext): string[] {
  return [
    `Load: ${load.name} on the same machine, which it shares with what is measured; one request under way per connection, no pipelining, a body of about 150 bytes that never repeats.`,
    'Spillway is the real `spillway serve` with default logging and metrics, answering 202; it has no worker, and the peers have none either, so that accepting alone is measured.',
    'The echo parses and validates the same body by the same schema, and its answer has the same status, headers and size.',
    'Every answer was 2xx, and as many rows were found stored as were answered; anything else fails the section.',
    "Ratios of targets are the median of the rounds' own ratios.",
  ]
}
