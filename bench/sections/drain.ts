import pg from 'pg'
import { figure, verdict } from '../figures.js'
import type { Drained } from '../programs/drain-count.js'
import { type DrainSetup, drainWith, preloadWith, ratePerSecond, settleDown } from '../programs/drain-runs.js'
import { startRedis } from '../redis.js'
import { interleave, of, type Variant } from '../rounds.js'
import type { BenchContext, Figure, Section, SectionResult, Verdict } from '../section.js'
import { median, pairedRatio } from '../statistics.js'

interface Named extends DrainSetup {
  readonly name: string
  readonly count: number
}

const names = {
  lanes: 'spillway, 200 lanes',
  single: 'spillway, one operation per lane',
  hot: 'spillway, one hot lane',
  hotBatch: 'spillway, one hot lane, batch handler',
  graphile: 'graphile-worker',
  pgBoss: 'pg-boss',
  bullmq: 'BullMQ, Redis with appendfsync always',
} as const

const lanes = 200
const searchRounds = 2

export const drain: Section = {
  name: 'drain',
  title: 'Drain rates with a no-op handler',
  estimateSeconds: (quick) => (quick ? 150 : 720),
  run: runDrain,
}

async function runDrain(context: BenchContext): Promise<SectionResult> {
  const { quick } = context
  const redis = await startRedis((text) => context.say(text))
  if ('absent' in redis) context.say(`BullMQ is left out: ${redis.absent}`)
  try {
    const setups = await setupsFor(context)
    const measured = setups.flatMap((setup): Variant<Drained>[] => {
      if (setup.name !== names.bullmq) return [{ name: setup.name, run: () => drainOnce(context, setup) }]
      if ('absent' in redis) return []
      return [{ name: setup.name, run: () => drainOnRedis(context, setup, redis.url) }]
    })
    const results = await interleave(measured, quick ? 3 : 5, (round) => context.say(`round ${round + 1}`))
    return {
      figures: setups.filter(({ name }) => results.has(name)).map((setup) => figureOf(setup, of(results, setup.name))),
      verdicts: verdictsOf(results),
      plots: [
        {
          name: 'drain-rates',
          title: 'Drained with a no-op handler',
          xLabel: '',
          yLabel: 'operations per second',
          kind: 'bars',
          series: [...results].map(([name, runs]) => ({ name, points: [[0, median(runs.map(ratePerSecond))]] })),
        },
      ],
      notes: notesOf(setups, 'absent' in redis ? `It is missing here: ${redis.absent}.` : `Redis ${redis.version}.`),
    }
  } finally {
    if (!('absent' in redis)) await redis.stop()
  }
}

interface Peer {
  readonly name: string
  readonly program: string
  /** What their documentation recommends for throughput, and neighbours of it. A quick run takes the first. */
  readonly candidates: readonly Readonly<Record<string, number | boolean>>[]
}

/** Completions in batches and without delay, as its page on performance has it; the sizes differ. */
const graphile: Peer = {
  name: names.graphile,
  program: 'drain-graphile.ts',
  candidates: [
    { concurrentJobs: 10, localQueueSize: 5_000 },
    { concurrentJobs: 24, localQueueSize: 500 },
    { concurrentJobs: 24, localQueueSize: 5_000 },
    { concurrentJobs: 100, localQueueSize: 2_000 },
  ].map((sizes) => ({
    ...sizes,
    maxPoolSize: 25,
    refetchDelayMs: -1,
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
  })),
}

/** Always with burstWhenBatchFull: without it a worker pauses for half a second after each portion. */
const pgBoss: Peer = {
  name: names.pgBoss,
  program: 'drain-pg-boss.ts',
  candidates: [
    { batchSize: 5_000, localConcurrency: 2, partition: true },
    { batchSize: 5_000, localConcurrency: 2, partition: false },
    { batchSize: 5_000, localConcurrency: 3, partition: true },
    { batchSize: 2_000, localConcurrency: 2, partition: true },
  ].map((sizes) => ({ ...sizes, pool: 10 })),
}

/** A portion beyond the first tenth would be handed out before the clock starts. */
function setupOf(peer: Peer, candidate: Peer['candidates'][number], count: number): Named {
  const settings = Object.fromEntries(
    Object.entries(candidate).map(([key, value]) =>
      key === 'localQueueSize' || key === 'batchSize' ? [key, Math.min(Number(value), count * 0.1)] : [key, value],
    ),
  )
  return { name: peer.name, program: peer.program, count, lanes, isOrdered: false, settings }
}

/** The fastest of a peer's candidates on this machine: no setting is the best one everywhere. */
async function best(context: BenchContext, peer: Peer, count: number): Promise<Named> {
  const setups = peer.candidates.map((candidate) => setupOf(peer, candidate, count))
  const [first] = setups
  if (first === undefined) throw new Error(`${peer.name} has no settings`)
  if (context.quick) return first
  context.say(`looking for the best settings of ${peer.name}`)
  const variants = setups.map((setup) => ({
    name: JSON.stringify(setup.settings),
    run: () => drainOnce(context, setup),
  }))
  const results = await interleave(variants, searchRounds, () => undefined)
  const rate = (setup: Named): number => median(of(results, JSON.stringify(setup.settings)).map(ratePerSecond))
  return setups.reduce((fastest, setup) => (rate(setup) > rate(fastest) ? setup : fastest), first)
}

async function setupsFor(context: BenchContext): Promise<Named[]> {
  const count = context.quick ? 20_000 : 100_000
  const spillway = { program: 'drain-spillway.ts', count, settings: {}, isOrdered: true }
  return [
    { ...spillway, name: names.lanes, lanes },
    { ...spillway, name: names.single, lanes: count },
    { ...spillway, name: names.hot, lanes: 1 },
    { ...spillway, name: names.hotBatch, lanes: 1, settings: { handler: 'apply' } },
    await best(context, graphile, count),
    await best(context, pgBoss, count),
    { name: names.bullmq, program: 'drain-bullmq.ts', count, lanes, isOrdered: false, settings: { concurrency: 100 } },
  ]
}

async function drainOnRedis(context: BenchContext, setup: Named, url: string): Promise<Drained> {
  context.say(setup.name)
  await preloadWith(context, setup, { url, count: setup.count })
  return drainWith(context, setup, { url, count: setup.count })
}

async function drainOnce(context: BenchContext, setup: Named): Promise<Drained> {
  const { count } = setup
  const database = 'drain'
  context.say(setup.name)
  const url = await context.postgres.createDatabase(database)
  await checkpoint(context)
  await preloadWith(context, setup, { url, count })
  await settleDown(url)
  const drained = await drainWith(context, setup, { url, count })
  await context.postgres.dropDatabase(database)
  return drained
}

/** So that one that is due by chance does not fall into one variant's time. */
async function checkpoint(context: BenchContext): Promise<void> {
  const client = new pg.Client({ connectionString: context.postgres.url })
  await client.connect()
  try {
    await client.query('CHECKPOINT')
  } finally {
    await client.end()
  }
}

function figureOf(setup: Named, runs: readonly Drained[]): Figure {
  const wall = median(runs.map((run) => run.count / run.wallSeconds))
  const busy = median(runs.map((run) => run.cpuSeconds / run.steadySeconds))
  const late = runs.filter((run) => !run.isComplete)
  return figure({
    what: 'drain, no-op handler',
    variant: setup.name,
    unit: '/s',
    runs: runs.map(ratePerSecond),
    note: [
      `${Math.round(wall)}/s from the worker's start`,
      `worker's CPU ${Math.round(busy * 100)}%`,
      ...(late.length > 0 ? [`time was up at ${late[0]?.count} of ${setup.count}`] : []),
    ].join(', '),
  })
}

function verdictsOf(results: ReadonlyMap<string, readonly Drained[]>): Verdict[] {
  const rates = (name: string): number[] => of(results, name).map(ratePerSecond)
  const atLeast = (name: string, peer: string, target: number): Verdict =>
    verdict({
      what: `drain: ${name} ÷ ${peer}`,
      value: pairedRatio(rates(name), rates(peer)),
      unit: '×',
      rule: 'at-least',
      target,
    })
  return [
    atLeast(names.lanes, names.graphile, 2.5),
    atLeast(names.lanes, names.pgBoss, 1.3),
    atLeast(names.single, names.graphile, 1.4),
    atLeast(names.single, names.pgBoss, 0.9),
    atLeast(names.hotBatch, names.graphile, 1.5),
  ]
}

function notesOf(setups: readonly Named[], redis: string): string[] {
  const settings = (name: string): string => JSON.stringify(setups.find((setup) => setup.name === name)?.settings)
  return [
    'Everything is pending before the worker starts; each variant has a process and a database of its own on the same PostgreSQL, all on the same Node.js. The variants take turns; a ratio is the median of the rounds’ ratios.',
    'The rate is that of the last nine tenths: from the first tenth’s end until the store holds nothing unfinished. Every job must have run exactly once, and with Spillway in the order of its lane, or the section fails.',
    'Spillway runs with its default settings and keeps history, pg-boss keeps completed jobs (both their default), graphile-worker deletes them.',
    `The peers keep no order. Their settings are the fastest of those recommended for throughput, tried on this machine first (a quick run takes one without trying): graphile-worker ${settings(names.graphile)}, pg-boss ${settings(names.pgBoss)} with burstWhenBatchFull.`,
    'The batch handler is `apply`: one call per portion of the lane, in one transaction with its completion.',
    `BullMQ is on another store and for reference only. ${redis}`,
  ]
}
