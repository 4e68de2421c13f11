/** The report of the generation section: figures, verdicts, and how they were measured. */
import { figure, verdict } from '../figures.js'
import type { Flowed } from '../programs/stream-flow.js'
import type { Resumed } from '../programs/stream-resuming.js'
import type { BurstOutcome, FirstByted } from '../programs/stream-waiting.js'
import { of } from '../rounds.js'
import type { Figure, SectionResult, Verdict } from '../section.js'
import { median, pairedRatio, percentile } from '../statistics.js'
import { type Idle, warmUp } from './generation-idle.js'
import { burstOf, fullLoad, resuming, resumingLate, type StreamLoad } from './generation-loads.js'
import { names } from './generation-sites.js'

export interface Loads {
  readonly loads: ReadonlyMap<string, readonly Flowed[]>
  readonly load: StreamLoad
  /** Of the model itself, over all rounds. */
  readonly lateP99Ms: number
}

export interface Resumes {
  readonly streams: number
  readonly found: readonly { readonly way: string; readonly running: Resumed; readonly late: Resumed }[]
}

/** Of one server without a queue behind its pool, and one with. */
export interface Bursts {
  readonly bare: readonly BurstOutcome[]
  readonly queued: readonly BurstOutcome[]
}

export interface Found {
  readonly calm: Loads
  readonly flowing: Loads
  readonly full: Loads
  readonly resumed: Resumes
  readonly bursts: Bursts
  readonly firstByte: FirstByted
  readonly idle: Idle
  /** Why there is no Redis; null where there is one, of this version. */
  readonly absent: string | null
  readonly redis: string | null
}

export function conclude(found: Found): SectionResult {
  return { figures: figuresOf(found), verdicts: verdictsOf(found), plots: [], notes: notesOf(found) }
}

const perSecondOf = ({ streams, every }: StreamLoad): string =>
  `${((streams * 1_000) / every).toLocaleString('en-US')} tokens/s over ${streams} streams`

/** CPU time of its processes for each token, in microseconds. */
export function cpuUs({ cpuSeconds, tokens }: Flowed): number {
  return (cpuSeconds.reduce((sum, seconds) => sum + seconds, 0) / tokens) * 1e6
}

export interface BurstSummary {
  readonly successPercent: number
  readonly timeoutPercent: number
  /** Of those that succeeded; NaN where none did. */
  readonly firstTokenMs: { readonly p50: number; readonly p99: number }
  readonly totalMs: { readonly p50: number; readonly p99: number }
}

export function summaryOf(outcomes: readonly BurstOutcome[]): BurstSummary {
  const done = outcomes.filter(({ isDone }) => isDone)
  const spread = (values: readonly number[]): { p50: number; p99: number } =>
    values.length === 0
      ? { p50: Number.NaN, p99: Number.NaN }
      : { p50: percentile(values, 0.5), p99: percentile(values, 0.99) }
  return {
    successPercent: (done.length / outcomes.length) * 100,
    timeoutPercent: (outcomes.filter(({ isTimeout }) => isTimeout).length / outcomes.length) * 100,
    firstTokenMs: spread(done.flatMap(({ firstTokenMs }) => firstTokenMs ?? [])),
    totalMs: spread(done.map(({ totalMs }) => totalMs)),
  }
}

function flowFigures({ loads, load: offered }: Loads): Figure[] {
  const load = perSecondOf(offered)
  const each = (what: string, unit: string, pick: (flowed: Flowed) => number): Figure[] =>
    [...loads].map(([variant, runs]) => figure({ what: `${what}, ${load}`, variant, unit, runs: runs.map(pick) }))
  return [
    ...each('a token from the model to the reader, p50', 'ms', ({ p50Ms }) => p50Ms),
    ...each('a token from the model to the reader, p99', 'ms', ({ p99Ms }) => p99Ms),
    ...each('CPU time of its Node.js processes for each token', 'µs', cpuUs),
  ]
}

function fullFigures({ loads }: Loads): Figure[] {
  const load = `${fullLoad.streams} streams as fast as they are taken`
  const each = (what: string, unit: string, pick: (flowed: Flowed) => number): Figure[] =>
    [...loads].map(([variant, runs]) => figure({ what: `${what}, ${load}`, variant, unit, runs: runs.map(pick) }))
  return [
    ...each('tokens', '/s', ({ perSecond }) => perSecond),
    ...each('CPU time of its Node.js processes for each token', 'µs', cpuUs),
  ]
}

function resumeFigures({ found, streams }: Resumes): Figure[] {
  const each = (what: string, unit: string, pick: (one: (typeof found)[number]) => number): Figure[] =>
    found.flatMap((one) => {
      const value = pick(one)
      return !Number.isFinite(value) ? [] : [figure({ what, variant: one.way, unit, runs: [value] })]
    })
  const of = `of ${streams} streams`
  return [
    ...each('resumed while it streams: until the first token, p50', 'ms', ({ running }) => running.p50Ms),
    ...each('resumed while it streams: until the first token, p99', 'ms', ({ running }) => running.p99Ms),
    ...each(`resumed while it streams: whole in the end, ${of}`, '', ({ running }) => running.whole),
    ...each(`resumed when it is over: whole in the end, ${of}`, '', ({ late }) => late.whole),
    ...each('resumed when it is over: until the first token, p50', 'ms', ({ late }) => late.p50Ms),
  ]
}

function burstFigures({ bare, queued }: Bursts): Figure[] {
  const variants = { 'bare pool': summaryOf(bare), 'with failover': summaryOf(queued) }
  const what = `${burstOf.requests} at once of one user, ${burstOf.places} places`
  const each = (name: string, unit: string, pick: (summary: BurstSummary) => number): Figure[] =>
    Object.entries(variants).flatMap(([variant, summary]) => {
      const value = pick(summary)
      return Number.isNaN(value) ? [] : [figure({ what: `${what}: ${name}`, variant, unit, runs: [value] })]
    })
  return [
    ...each('success rate', '%', ({ successPercent }) => successPercent),
    ...each('queue timeout rate', '%', ({ timeoutPercent }) => timeoutPercent),
    ...each('until the first token, p50', 'ms', ({ firstTokenMs }) => firstTokenMs.p50),
    ...each('until the first token, p99', 'ms', ({ firstTokenMs }) => firstTokenMs.p99),
    ...each('until its end, p50', 'ms', ({ totalMs }) => totalMs.p50),
    ...each('until its end, p99', 'ms', ({ totalMs }) => totalMs.p99),
  ]
}

function figuresOf({ calm, flowing, full, resumed, bursts, firstByte, idle }: Found): Figure[] {
  const own = (what: string, unit: string, value: number): Figure =>
    figure({ what, variant: 'Spillway', unit, runs: [value] })
  const waiting = `${idle.streams.toLocaleString('en-US')} streams that wait for their turn, one process`
  return [
    ...flowFigures(calm),
    ...flowFigures(flowing),
    ...fullFigures(full),
    ...resumeFigures(resumed),
    ...burstFigures(bursts),
    own('the first byte of a stream that is queued, p50', 'ms', firstByte.p50Ms),
    own('the first byte of a stream that is queued, p99', 'ms', firstByte.p99Ms),
    own(`${waiting}: memory of each`, 'kB', idle.kbEach),
    own(`${waiting}: share of a core`, '%', idle.cpuPercent),
    own(`${waiting}: opened`, '/s', idle.openedPerSecond),
  ]
}

/** What the relay adds to the direct way, round by round; the median of the rounds. */
export function added(loads: Loads['loads'], relay: string, direct: string, pick: (flowed: Flowed) => number): number {
  const under = of(loads, direct).map(pick)
  return median(of(loads, relay).map((flowed, round) => pick(flowed) - (under[round] ?? Number.NaN)))
}

function relayVerdicts({ flowing, absent }: Found): Verdict[] {
  const logs = [
    { log: 'PostgreSQL', relay: names.relay, direct: names.direct },
    ...(absent === null ? [{ log: 'Redis', relay: names.relayRedis, direct: names.directRedis }] : []),
  ]
  return logs.flatMap(({ log, relay, direct }) => [
    verdict({
      what: `generation: added by the relay at 10,000 tokens/s, log in ${log}, p50`,
      ...{ value: added(flowing.loads, relay, direct, ({ p50Ms }) => p50Ms), unit: 'ms', rule: 'at-most', target: 5 },
    }),
    verdict({
      what: `generation: added by the relay at 10,000 tokens/s, log in ${log}, p99`,
      ...{ value: added(flowing.loads, relay, direct, ({ p99Ms }) => p99Ms), unit: 'ms', rule: 'at-most', target: 25 },
    }),
  ])
}

function verdictsOf(found: Found): Verdict[] {
  const { flowing, firstByte, idle, bursts } = found
  const cpuOver = (name: string): number =>
    pairedRatio(of(flowing.loads, names.direct).map(cpuUs), of(flowing.loads, name).map(cpuUs))
  const [bare, queued] = [summaryOf(bursts.bare), summaryOf(bursts.queued)]
  const atMost = (what: string, value: number, unit: string, target: number, note?: string): Verdict =>
    verdict({ what: `generation: ${what}`, value, unit, rule: 'at-most', target, ...(note !== undefined && { note }) })
  return [
    atMost('memory of a stream that waits for its turn', idle.kbEach, 'kB', 25),
    atMost(`share of a core of ${idle.streams} streams that wait`, idle.cpuPercent, '%', 10),
    ...relayVerdicts(found),
    atMost('the first byte of a stream that is queued, p99', firstByte.p99Ms, 'ms', 20),
    atMost(
      ...([
        'CPU time for each token on the direct way over a Fastify that pipes',
        cpuOver(names.pipe),
        '×',
        1.15,
      ] as const),
      'Spillway keeps each token in a log before it is sent',
    ),
    verdict({
      what: 'generation: success rate of ten at once of one user with three places',
      ...{ value: queued.successPercent, unit: '%', rule: 'at-least', target: 95 },
      note: `without the queue ${Math.round(bare.successPercent)}%`,
    }),
    atMost('queue timeout rate of ten at once of one user', queued.timeoutPercent, '%', 5),
  ]
}

function notesOf({ calm, flowing, full, absent, redis, idle, resumed }: Found): string[] {
  const straight = of(full.loads, names.straight).map(({ perSecond }) => perSecond)
  return [
    `The model is a program that writes each token by itself, about 190 bytes of OpenAI's form with the time in it; the streams are spread evenly over its pace. The readers are one process of hand-written HTTP/1.1. Neither is what is measured: by itself the model makes ${Math.round(median(straight)).toLocaleString('en-US')} tokens/s, and it was late by ${flowing.lateP99Ms.toFixed(1)} ms at p99 (at the calm pace ${calm.lateP99Ms.toFixed(1)} ms); a token's time counts from when it was sent. Every token was checked: none of a stream that went on was lost, repeated or out of order. All processes, PostgreSQL and Redis share one machine.`,
    'Fastify that pipes hands the bytes of the model on; the one that numbers parses each block and writes it with an id, as Spillway does. Neither keeps anything. Spillway sends a token after its log has it for certain: a commit of PostgreSQL, or a write of Redis with `appendfsync always`. Apart: the only place of the pool is taken, so that every stream is queued and run by the worker, and comes to the gateway through the log. What the relay adds is its time less that of the direct way with the same log in the same round.',
    'CPU time is that of the Node.js processes of the way, user and system; PostgreSQL and Redis are not in it.',
    `resumable-stream keeps what a model said in the memory of the process that called it, and relays by Redis's publish and subscribe; a reader that comes back is sent all of it behind what it has. When the stream is over there is nothing to be had from it, as documented. Resumed while it streams: ${resumed.streams} readers leave after ${resuming.readFirst} of ${resuming.script.tokens} tokens and come back ${resuming.awayMs} ms later; when it is over: ${resumingLate.awayMs} ms later.${lostOf(resumed)}`,
    `Ten at once: streams of ${burstOf.script.tokens} tokens, one every ${burstOf.script.every} ms. A success has all of them and a proper end. The bare pool is the same server with QUEUE_FAILOVER_ENABLED=false: what has no place is refused with 429.`,
    `Streams that wait: accepted and in the queue, the head and the position sent, heartbeats on; ${Math.round(idle.beatShare * 100)}% of the heartbeats came. Their memory is the growth of the process's RSS from ${warmUp} streams on, which have warmed it up; the kernel's part of a connection is not in it. The share of a core is over all that goes on for them, the looks at the queue for their positions included.`,
    ...brokenOf([calm, flowing, full]),
    ...(redis === null ? [`There was no Redis: ${absent}.`] : [`Redis ${redis}.`]),
  ]
}

/** A stream that ends with an error is no gap, but the notes mention it. */
export function brokenOf(all: readonly Loads[]): string[] {
  const broken = new Map<string, number>()
  for (const { loads } of all) {
    for (const [name, runs] of loads) {
      const failed = runs.reduce((sum, run) => sum + run.failed, 0)
      if (failed > 0) broken.set(name, (broken.get(name) ?? 0) + failed)
    }
  }
  if (broken.size === 0) return []
  return [`Streams that broke off: ${[...broken].map(([name, failed]) => `${failed} of ${name}`).join(', ')}.`]
}

function lostOf({ found }: Resumes): string {
  const lost = found.flatMap(({ way, running }) =>
    running.lost + running.gaps === 0 ? [] : [` ${way}: ${running.lost} got nothing, ${running.gaps} gaps.`],
  )
  return lost.join('')
}
