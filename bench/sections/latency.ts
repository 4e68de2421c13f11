import { figure, verdict } from '../figures.js'
import type { LatencyReport, Spread } from '../programs/latency-load.js'
import { type LatencyRun, type LatencySetup, type Load, measureLatency } from '../programs/latency-runs.js'
import { growth, peaks, type TablePoint } from '../programs/latency-tables.js'
import { prepareWal } from '../programs/latency-wal.js'
import { interleave, of } from '../rounds.js'
import type { BenchContext, Figure, Plot, Section, SectionResult, Verdict } from '../section.js'
import { median } from '../statistics.js'

const queued: LatencySetup = { name: 'spillway', program: 'latency-spillway.ts', settings: { path: 'queued' } }
/** More jobs at once than arrive within a job's time; batching is off, as it is by default: it trades latency away. */
const graphile: LatencySetup = {
  name: 'graphile-worker',
  program: 'latency-graphile.ts',
  settings: { concurrentJobs: 10, maxPoolSize: 12 },
}
/** Measured once, for reference: none of them is part of a target. */
const beside: readonly LatencySetup[] = [
  { name: 'spillway, caller waits', program: 'latency-spillway.ts', settings: { path: 'waited' } },
  { name: 'spillway, run at once', program: 'latency-spillway.ts', settings: { path: 'direct' } },
  { name: 'spillway serve, http.request', program: 'latency-http.ts', settings: {}, overHttp: true },
  { name: 'pg-boss, notified', program: 'latency-pg-boss.ts', settings: { notify: true, localConcurrency: 2 } },
  { name: 'pg-boss, polling', program: 'latency-pg-boss.ts', settings: { notify: false, localConcurrency: 2 } },
]

interface Plan {
  readonly rounds: number
  readonly slow: Load
  readonly middle: Load
  readonly fast: Load
}

const planFor = (quick: boolean): Plan => {
  const load = (ratePerSecond: number, seconds: number, pointSeconds: number): Load => ({
    ratePerSecond,
    seconds,
    pointSeconds,
    warmUpSeconds: quick ? 3 : 5,
  })
  return quick
    ? { rounds: 2, slow: load(100, 8, 2), middle: load(1_000, 8, 2), fast: load(6_000, 15, 1) }
    : { rounds: 3, slow: load(100, 30, 10), middle: load(1_000, 30, 10), fast: load(6_000, 300, 10) }
}

export const latency: Section = {
  name: 'latency',
  title: 'Accept → completed',
  estimateSeconds: (quick) => (quick ? 180 : 980),
  run: runLatency,
}

async function runLatency(context: BenchContext): Promise<SectionResult> {
  const plan = planFor(context.quick)
  const measure = (setup: LatencySetup, load: Load, watches = false): Promise<LatencyRun> => {
    context.say(`${setup.name}, ${load.ratePerSecond}/s for ${load.seconds} s`)
    return measureLatency(context, setup, load, watches)
  }
  const reportOf = async (setup: LatencySetup, load: Load): Promise<LatencyReport> =>
    (await measure(setup, load)).report
  const slow = await interleave(
    [queued, graphile].map((setup) => ({ name: setup.name, run: () => reportOf(setup, plan.slow) })),
    plan.rounds,
    (round) => context.say(`round ${round + 1}`),
  )
  const others = new Map<string, LatencyReport[]>()
  for (const setup of beside) others.set(setup.name, [await reportOf(setup, plan.slow)])
  const middle = await interleave(
    [{ name: queued.name, run: () => reportOf(queued, plan.middle) }],
    plan.rounds,
    () => undefined,
  )
  context.say('making the segments of the write-ahead log')
  await prepareWal(context.postgres.url)
  const fast = await measure(queued, plan.fast, true)
  const byRate: [Load, readonly LatencyReport[]][] = [
    [plan.slow, of(slow, queued.name)],
    [plan.middle, of(middle, queued.name)],
    [plan.fast, [fast.report]],
  ]
  return {
    figures: [
      ...byRate.flatMap(([load, reports]) => figuresOf(load, queued.name, reports)),
      ...figuresOf(plan.slow, graphile.name, of(slow, graphile.name)),
      ...[...others].flatMap(([name, reports]) => figuresOf(plan.slow, name, reports, ['p50', 'p99'])),
      ...tableFigures(plan.fast, fast.tables),
    ],
    verdicts: verdictsOf(byRate, of(slow, graphile.name), fast.tables),
    plots: plotsOf(byRate, plan.fast, fast),
    notes: notes(plan),
  }
}

const all: readonly (keyof Spread)[] = ['p50', 'p95', 'p99', 'max']

function figuresOf(load: Load, variant: string, reports: readonly LatencyReport[], shown = all): Figure[] {
  const lateness = median(reports.map((report) => report.lateness.p99))
  const refused = reports.reduce((sum, report) => sum + report.refused, 0)
  const note = [
    `submitted late by ${lateness.toFixed(1)} ms (p99), which is included`,
    ...(refused > 0 ? [`${refused} were refused and have no latency`] : []),
  ].join('; ')
  return shown.map((share) =>
    figure({
      what: `accept → completed, ${load.ratePerSecond.toLocaleString('en')}/s, ${share}`,
      variant,
      unit: 'ms',
      runs: reports.map((report) => report.completed[share]),
      ...(share === 'p99' && { note }),
    }),
  )
}

function tableFigures(load: Load, tables: readonly TablePoint[]): Figure[] {
  const what = `${load.ratePerSecond.toLocaleString('en')}/s for ${load.seconds} s`
  const runs = (pick: (point: TablePoint) => number): number[] =>
    peaks(tables, load.pointSeconds, pick).map(([, value]) => value)
  const note = `peak of each ${load.pointSeconds} s`
  return [
    figure({ what: `hot tables, ${what}`, variant: 'spillway', unit: 'MB', runs: runs((p) => p.megabytes), note }),
    figure({ what: `dead rows, ${what}`, variant: 'spillway', unit: 'rows', runs: runs((p) => p.deadRows), note }),
  ]
}

function verdictsOf(
  byRate: readonly [Load, readonly LatencyReport[]][],
  graphileReports: readonly LatencyReport[],
  tables: readonly TablePoint[],
): Verdict[] {
  const [slow, middle, fast] = byRate
  const atMost = (what: string, value: number, target: number, unit = 'ms'): Verdict =>
    verdict({ what, value, unit, rule: 'at-most', target })
  const of = (at: readonly [Load, readonly LatencyReport[]] | undefined, share: keyof Spread): number =>
    median((at?.[1] ?? []).map((report) => report.completed[share]))
  const peer = (share: keyof Spread): number => median(graphileReports.map((report) => report.completed[share]))
  return [
    atMost('accept → completed at 100/s, p50', of(slow, 'p50'), 5),
    atMost('accept → completed at 100/s, p99', of(slow, 'p99'), 12),
    atMost('accept → completed at 100/s, p50, against graphile-worker’s', of(slow, 'p50'), peer('p50')),
    atMost('accept → completed at 100/s, p99, against graphile-worker’s', of(slow, 'p99'), peer('p99')),
    atMost('accept → completed at 1,000/s, p99', of(middle, 'p99'), 20),
    atMost('accept → completed at 6,000/s, p99', of(fast, 'p99'), 50),
    atMost(
      'refused at 6,000/s',
      (fast?.[1] ?? []).reduce((sum, report) => sum + report.refused, 0),
      0,
      '',
    ),
    atMost(
      'hot tables at 6,000/s: last third ÷ middle third',
      growth(tables, (p) => p.megabytes),
      1.2,
      '×',
    ),
    atMost(
      'dead rows at 6,000/s: last third ÷ middle third',
      growth(tables, (p) => p.deadRows),
      1.5,
      '×',
    ),
  ]
}

function plotsOf(byRate: readonly [Load, readonly LatencyReport[]][], load: Load, fast: LatencyRun): Plot[] {
  const { series } = fast.report
  const over = (pick: (point: LatencyReport['series'][number]) => number): (readonly [number, number])[] =>
    series.map((point) => [point.second, pick(point)] as const)
  const name = `${load.ratePerSecond.toLocaleString('en')}/s`
  return [
    {
      name: 'latency-over-time',
      title: `Accept → completed at ${name}`,
      xLabel: 'seconds',
      yLabel: 'milliseconds',
      kind: 'lines',
      series: [
        { name: 'p50', points: over((point) => point.p50) },
        { name: 'p99', points: over((point) => point.p99) },
        { name: 'max', points: over((point) => point.max) },
      ],
      logY: true,
    },
    {
      name: 'latency-by-rate',
      title: 'Accept → completed by rate',
      xLabel: 'operations per second',
      yLabel: 'milliseconds',
      kind: 'lines',
      series: (['p50', 'p95', 'p99'] as const).map((share) => ({
        name: share,
        points: byRate.map(
          ([at, reports]) => [at.ratePerSecond, median(reports.map((report) => report.completed[share]))] as const,
        ),
      })),
      logX: true,
      logY: true,
    },
    {
      name: 'latency-tables',
      title: `Hot tables at ${name}`,
      xLabel: 'seconds',
      yLabel: 'megabytes; thousands of dead rows',
      kind: 'lines',
      series: [
        { name: 'size, MB', points: peaks(fast.tables, load.pointSeconds, (p) => p.megabytes) },
        { name: 'dead rows, thousands', points: peaks(fast.tables, load.pointSeconds, (p) => p.deadRows / 1_000) },
      ],
    },
  ]
}

const notes = (plan: Plan): string[] => [
  `Open loop: submissions at a constant rate over 200 lanes, whatever becomes of those before, and latency from the intended instant. Warm-up ${plan.slow.warmUpSeconds} s at the same rate. Accepting and working are one process, all on the same Node.js.`,
  'spillway: through the queue (`respondAsync`) with a no-op `run`, completed when the process learns that the settling transaction has committed. graphile-worker: addJob → the statement that removes the job has returned (batching off, LISTEN/NOTIFY). pg-boss: send → the end of the handler.',
  '`caller waits` is `submit` with `waitMs`, `run at once` is `submit` as it comes; both until `submit` answers with the result. `spillway serve` is a client’s view: POST with `Prefer: respond-async, wait=10` until 201, with an HTTP call to /demo/echo as the work.',
  `At 6,000/s the tables that every operation passes through were looked at once a second (lanes, ops, ready, parked, leases, tallies, workers; not history, which is partitioned by time and dropped). Before it, as many segments of the write-ahead log are made as \`min_wal_size\` keeps: a server that has been running has them.`,
]
