/** From the steps' results to figures, verdicts and plots. */
import { figure, verdict } from './figures.js'
import type { StepResult } from './overload-run.js'
import { downstreamPerSecond } from './overload-wire.js'
import type { Figure, Plot, Verdict } from './section.js'
import { median, percentile } from './statistics.js'

const goodputPerSecond = ({ clients, seconds }: StepResult): number => clients.goodDuring / seconds
const healthP99 = ({ health }: StepResult): number => percentile(health.tookMs, 0.99)
const refused = ({ clients }: StepResult): number =>
  Object.entries(clients.byStatus).reduce((sum, [status, count]) => sum + (Number(status) >= 400 ? count : 0), 0)
const failedClients = ({ clients }: StepResult): number =>
  clients.timedOut + clients.connectionLost + clients.noConnection

export function figuresOf(results: readonly StepResult[]): Figure[] {
  return results.flatMap((result) => {
    const { clients, seconds, ratePerSecond, health } = result
    const at = `${ratePerSecond}/s offered`
    const one = (what: string, unit: string, value: number, note?: string): Figure =>
      figure({
        what: `${at}: ${what}`,
        variant: result.door,
        unit,
        runs: [value],
        ...(note !== undefined && { note }),
      })
    const queued = clients.byStatus['202'] ?? 0
    return [
      one('goodput', '/s', goodputPerSecond(result)),
      // Without good answers there is no latency to report.
      ...(clients.good > 0
        ? [one('good answers, p50', 'ms', clients.goodMs.p50), one('good answers, p99', 'ms', clients.goodMs.p99)]
        : []),
      ...(queued > 0 ? [one('queued with a ticket (202)', '/s', queued / seconds)] : []),
      one('refused', '/s', refused(result) / seconds, statusNote(result)),
      one('clients that got no answer in time', '/s', failedClients(result) / seconds, failureNote(result)),
      one('health, p99', 'ms', healthP99(result), healthNote(result)),
      one('RSS of the door, median of the last seconds', 'MB', steadyRssMb(health.rssMb)),
      one('requests that went out', '/s', clients.sent / seconds, offeredNote(result)),
    ]
  })
}

/** Only what is worth a sentence: the generator kept its schedule unless it was later than an answer takes. */
function offeredNote({ clients, ratePerSecond, restarted, health }: StepResult): string | undefined {
  const notes = [
    ...(clients.lagMs.p99 > generatorLateMs
      ? [
          `the generator was ${clients.lagMs.p99.toFixed(0)} ms late (p99) on ${clients.cores.toFixed(2)} cores, the door used ${health.cores.toFixed(2)}: this machine cannot offer ${ratePerSecond}/s evenly`,
        ]
      : []),
    ...(clients.noConnection > 0 ? ['the rest found no connection'] : []),
    ...(restarted ? ['the door had died and was started again'] : []),
  ]
  return notes.length > 0 ? notes.join('; ') : undefined
}

const generatorLateMs = 20

function statusNote({ clients, seconds }: StepResult): string | undefined {
  const statuses = Object.entries(clients.byStatus).filter(([status]) => Number(status) >= 400)
  if (statuses.length === 0) return undefined
  return [
    statuses.map(([status, count]) => `${status}: ${(count / seconds).toFixed(1)}/s`).join(', '),
    `without Retry-After: ${clients.withoutRetryAfter}`,
    `Retry-After p50 ${clients.retryAfterSeconds.p50} s, max ${clients.retryAfterSeconds.max} s`,
    `answered within ${clients.refusedMs.p99.toFixed(0)} ms (p99)`,
  ].join('; ')
}

function failureNote(result: StepResult): string | undefined {
  if (failedClients(result) === 0) return undefined
  const { clients, effects } = result
  return `gave up ${clients.timedOut}, connection lost ${clients.connectionLost}, no connection ${clients.noConnection}; done for nobody: ${effects.wasted}`
}

const healthNote = ({ health }: StepResult): string | undefined =>
  health.unanswered === 0 ? undefined : `${health.unanswered} of ${health.tookMs.length} were not answered`

/** The last third of a step: by then what the load needs has been allocated. */
function steadyRssMb(rssMb: readonly number[]): number {
  const last = rssMb.slice(-Math.max(1, Math.floor(rssMb.length / 3)))
  return last.length === 0 ? Number.NaN : median(last)
}

const windowSeconds = 5

/** The highest median of five seconds in a row: one garbage collection that is late is not growth. */
function highestRssMb(steps: readonly StepResult[]): number {
  const windows = steps.flatMap(({ health: { rssMb } }) => {
    const width = Math.min(windowSeconds, rssMb.length)
    return Array.from({ length: rssMb.length - width + 1 }, (_, at) => median(rssMb.slice(at, at + width)))
  })
  return Math.max(...windows)
}

/** The targets, for one door. */
export function verdictsOf(results: readonly StepResult[], door: string): Verdict[] {
  const steps = results.filter((result) => result.door === door)
  const [lowest, ...later] = steps
  const full = steps.filter(({ ratePerSecond }) => ratePerSecond >= downstreamPerSecond)
  if (lowest === undefined || full.length === 0) throw new Error(`${door} was not measured at and below its capacity`)
  const peak = Math.max(...steps.map(goodputPerSecond))
  const worstGoodput = worst(full, (step) => -goodputPerSecond(step))
  const worstP99 = worst(later, (step) => step.clients.goodMs.p99)
  const worstHealth = worst(steps, healthP99)
  const sum = (count: (step: StepResult) => number): number => steps.reduce((total, step) => total + count(step), 0)
  return [
    verdict({
      what: `overload, ${door}: goodput at every step from 1 × on, of its peak`,
      value: goodputPerSecond(worstGoodput) / peak,
      unit: '×',
      rule: 'at-least',
      target: 0.9,
      note: `peak ${Math.round(peak)}/s; lowest ${Math.round(goodputPerSecond(worstGoodput))}/s, at ${worstGoodput.ratePerSecond}/s offered`,
    }),
    verdict({
      what: `overload, ${door}: p99 of good answers, of that at 0.5 ×`,
      value: worstP99.clients.goodMs.p99 / lowest.clients.goodMs.p99,
      unit: '×',
      rule: 'at-most',
      target: 2,
      note: `${lowest.clients.goodMs.p99.toFixed(0)} ms at ${lowest.ratePerSecond}/s; highest ${worstP99.clients.goodMs.p99.toFixed(0)} ms, at ${worstP99.ratePerSecond}/s offered`,
    }),
    verdict({
      what: `overload, ${door}: health p99 at every step`,
      value: healthP99(worstHealth),
      unit: 'ms',
      rule: 'at-most',
      target: 50,
      note: `highest at ${worstHealth.ratePerSecond}/s offered`,
    }),
    verdict({
      what: `overload, ${door}: refusals without Retry-After`,
      value: sum(({ clients }) => clients.withoutRetryAfter),
      unit: 'answers',
      rule: 'at-most',
      target: 0,
      note: `of ${sum(refused)} refusals`,
    }),
    rssVerdict(door, lowest, later),
    verdict({
      what: `overload, ${door}: answered done or queued, and not done`,
      value: sum(({ effects }) => effects.lostDone + effects.queuedUndone),
      unit: 'orders',
      rule: 'at-most',
      target: 0,
      note: `of ${sum(({ clients, effects }) => clients.good + effects.queued)}; done twice: ${sum(({ effects }) => effects.doneTwice)}`,
    }),
  ]
}

function rssVerdict(door: string, first: StepResult, later: readonly StepResult[]): Verdict {
  const before = steadyRssMb(first.health.rssMb)
  const highest = highestRssMb(later)
  return verdict({
    what: `overload, ${door}: growth of RSS after the first step`,
    value: (highest / before - 1) * 100,
    unit: '%',
    rule: 'at-most',
    target: 10,
    note: `from ${before.toFixed(0)} MB (median of the last third of the first step) to ${highest.toFixed(0)} MB (highest median of ${windowSeconds} s in a later one)`,
  })
}

function worst(steps: readonly StepResult[], measure: (step: StepResult) => number): StepResult {
  const [first, ...others] = steps
  if (first === undefined) throw new Error('no steps to compare')
  return others.reduce((found, step) => (measure(step) > measure(found) ? step : found), first)
}

export function plotsOf(results: readonly StepResult[]): Plot[] {
  const names = [...new Set(results.filter(({ clients }) => clients.good > 0).map(({ door }) => door))]
  const series = (steps: readonly StepResult[], y: (step: StepResult) => number) =>
    names.map((name) => ({
      name,
      points: steps.filter(({ door }) => door === name).map((step) => [step.ratePerSecond, y(step)] as const),
    }))
  // Where nothing good was answered there is no latency.
  const withLatency = results.filter(({ clients }) => clients.good > 0)
  const shared = { xLabel: 'offered per second', kind: 'lines', logX: true } as const
  return [
    {
      ...shared,
      name: 'overload-goodput',
      title: `Goodput over offered load: the downstream can do ${downstreamPerSecond}/s`,
      yLabel: 'good answers per second',
      series: series(results, goodputPerSecond),
    },
    {
      ...shared,
      name: 'overload-latency',
      title: 'Latency of good answers over offered load',
      yLabel: 'p99, ms',
      logY: true,
      series: series(withLatency, ({ clients }) => clients.goodMs.p99),
    },
  ]
}
