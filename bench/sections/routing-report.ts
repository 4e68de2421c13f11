/** The report of the routing section: figures, verdicts, and how they were measured. */
import { figure, verdict } from '../figures.js'
import { tenants } from '../programs/routing-body.js'
import { of } from '../rounds.js'
import type { BenchContext, Figure, SectionResult, Verdict } from '../section.js'
import { median, pairedRatio, range } from '../statistics.js'
import { flood } from './routing-overload.js'
import { connections, type Loaded, watchSeconds, watchTimeoutMs } from './routing-sites.js'

export const names = {
  bareTogether: 'bare, in one process',
  together: 'Spillway, in one process',
  bareApart: 'bare, gateway and router apart',
  apart: 'Spillway, gateway and router apart',
} as const
const variantNames = Object.values(names)

export const hangNames = { answering: 'the router answers', hung: 'the router hangs' } as const

/** A usual policy, and the longest that is taken. */
export const providersOf = [8, 100] as const

export interface Alone {
  readonly p50Ms: number
  readonly p99Ms: number
}

export interface Deciding {
  readonly loads: ReadonlyMap<string, readonly Loaded[]>
  /** By Spillway, warming up included. */
  readonly decided: { readonly together: number; readonly apart: number }
  readonly pressureP99Ms: number
}

export interface Watched {
  readonly loads: ReadonlyMap<string, readonly Loaded[]>
  readonly decided: number
  /** How often the one that hangs was asked meanwhile. */
  readonly asked: number
}

export interface Found {
  /** By the number of providers of a policy. */
  readonly alone: ReadonlyMap<number, readonly Alone[]>
  readonly deciding: Deciding
  readonly watched: Watched
  readonly detectedMs: readonly number[]
}

export function conclude(context: BenchContext, found: Found): SectionResult {
  return { figures: figuresOf(found), verdicts: verdictsOf(found), plots: [], notes: notesOf(context, found) }
}

function figuresOf({ alone, deciding, watched, detectedMs }: Found): Figure[] {
  const ofLoads = (what: string, unit: string, pick: (loaded: Loaded) => number): Figure[] =>
    variantNames.map((variant) => figure({ what, variant, unit, runs: of(deciding.loads, variant).map(pick) }))
  const ofWatched = (what: string, unit: string, pick: (loaded: Loaded) => number): Figure[] =>
    Object.values(hangNames).map((variant) =>
      figure({ what, variant, unit, runs: of(watched.loads, variant).map(pick) }),
    )
  const ofAlone = (what: string, pick: (one: Alone) => number): Figure[] =>
    [...alone].map(([providers, runs]) =>
      figure({
        what,
        variant: `${providers} providers in each`,
        unit: 'µs',
        runs: runs.map((one) => pick(one) * 1_000),
      }),
    )
  return [
    ...ofLoads(`decide over HTTP through JetStream, ${connections} connections`, '/s', (one) => one.perSecond),
    ...ofLoads('p50 of the answer at that load, refusals among them', 'ms', (one) => one.p50Ms),
    ...ofLoads('p99 of the answer at that load, refusals among them', 'ms', (one) => one.p99Ms),
    ...ofLoads('refused at that load', '%', (one) => one.refusedPercent),
    ...ofLoads('CPU time of its Node.js processes for each request, refused ones among them', 'µs', (one) => one.cpuUs),
    ...ofLoads('CPU time of nats-server for each request, refused ones among them', 'µs', (one) => one.natsCpuUs),
    ...ofWatched("decide over HTTP while the router's metrics are polled", '/s', (one) => one.perSecond),
    ...ofWatched('refused meanwhile', '%', (one) => one.refusedPercent),
    ...ofWatched('p99 of the answer meanwhile, refusals among them', 'ms', (one) => one.p99Ms),
    ...ofAlone('one decision in process among 1,000 policies, median', (one) => one.p50Ms),
    ...ofAlone('one decision in process among 1,000 policies, p99', (one) => one.p99Ms),
    figure({
      what: 'the pressure check in the server, p99 at most',
      variant: names.together,
      unit: 'µs',
      runs: [deciding.pressureP99Ms * 1_000],
    }),
    figure({
      what: `from a backlog of ${flood.threshold} to backpressure in the metrics`,
      variant: 'Spillway',
      unit: 'ms',
      runs: detectedMs,
    }),
  ]
}

function verdictsOf({ alone, deciding, watched, detectedMs }: Found): Verdict[] {
  const ratio = (what: string, target: number, loads: Deciding['loads'], over: string, under: string): Verdict => {
    const perSecond = (name: string): number[] => of(loads, name).map((one) => one.perSecond)
    const refused = Math.max(...[over, under].map((name) => median(of(loads, name).map((one) => one.refusedPercent))))
    return verdict({
      ...{ what, value: pairedRatio(perSecond(over), perSecond(under)), unit: '×', rule: 'at-least', target },
      ...(refused >= 1 && { note: `says little: ${Math.round(refused)}% were refused` }),
    })
  }
  const p99Ms = Math.max(...[...alone.values()].map((runs) => median(runs.map((one) => one.p99Ms))))
  return [
    ratio(
      'routing: decisions in one process over the bare way through JetStream',
      0.7,
      deciding.loads,
      names.together,
      names.bareTogether,
    ),
    ratio(
      'routing: decisions with gateway and router apart over the bare way',
      0.7,
      deciding.loads,
      names.apart,
      names.bareApart,
    ),
    verdict({
      ...{ what: 'routing: one decision among 1,000 policies, p99', value: p99Ms, unit: 'ms' },
      ...{ rule: 'at-most', target: 0.2, note: 'of the longest policies' },
    }),
    verdict({
      ...{ what: 'routing: overload is detected within', value: range(detectedMs).max, unit: 'ms' },
      ...{ rule: 'at-most', target: 1_500, note: 'the slowest round' },
    }),
    verdict({
      ...{ what: 'routing: pressure check, p99', value: deciding.pressureP99Ms * 1_000, unit: 'µs' },
      ...{ rule: 'at-most', target: 50, note: 'the upper end of the bucket it falls into' },
    }),
    ratio(
      'routing: decisions while polling a router that hangs over one that answers',
      0.95,
      watched.loads,
      hangNames.hung,
      hangNames.answering,
    ),
  ]
}

function notesOf({ load }: BenchContext, { deciding, watched }: Found): string[] {
  const kept = deciding.decided.together + deciding.decided.apart + watched.decided
  return [
    `Decide: ${load.name} on the same machine, ${connections} connections, one request under way on each, tasks of about 270 bytes from ${tenants} tenants, each with a request id of its own. Spillway is the real \`spillway serve\` with default settings except for the limit of the tenants, which is checked exactly for each request and never reached. Every task goes over a file-backed work-queue stream and is acked, and every decision is kept in PostgreSQL for later reads: afterwards the streams were empty, and all ${kept} decisions were found. Refused requests (503, when the machine was too busy to admit in time) do not count as decided, but its quick answers are among the times and the CPU time for each request.`,
    'The bare way: the same Fastify with the same schema, one connection with the official client, a publish with the inbox in a header whose ack is awaited, a pull consumer that parses the task and answers a constant, the same status, headers and size. It has no limits, policies, deadlines, duplicates, metrics or records. Each pair shares a nats-server, with a stream for each; the rounds take turns, and the ratio is the median of the ratios of the rounds. With gateway and router apart the CPU time is that of both processes.',
    'The decision is timed one by one, in process, as the router calls it: 1,000 policies by weight, by score, sticky, and by fallback in turn, with task types and constraints that leave out some providers.',
    `Detection: ${flood.messages} messages are published straight to the subject of a router that works on ${flood.concurrency} at a time and takes ${flood.simulateDelayMs} ms for each. The time counts from the broker's ack of message ${flood.threshold} (no earlier can the backlog be at its threshold) to the answer of the first scrape, one every ${flood.scrapeMs} ms, that says so. The router samples once a second; the rounds begin at different places of that second.`,
    'The pressure check is timed by the server itself, for every request and each of its two pressure gates (`spillway_admission_duration_seconds`).',
    `The router that hangs takes connections and never answers; it was asked ${watched.asked} times meanwhile (every ${watchSeconds} s, timeout ${watchTimeoutMs} ms). Both gateways share one router, which is well; the one that cannot know takes it for warning, and its limits, though halved, are not reached.`,
  ]
}
