/**
 * Short runs, each with the faults that expose one kind of breakage: with it the checker must find it, without it nothing.
 */
import type { Breakage } from './breakage.js'
import { check, type Verdict } from './checker/check.js'
import type { Rule } from './checker/finding.js'
import type { PlannedFault } from './plan.js'
import { type RunResult, run } from './run.js'
import { lanesOf, type Route, type Temper } from './workload.js'

interface Scenario {
  /** What the checker has to find. */
  rule: Rule
  routes: readonly Route[]
  temper: Temper
  rate: number
  faults: readonly Pick<PlannedFault, 'kind' | 'atMs' | 'victim' | 'forMs'>[]
}

const leaseMs = 2_000
const apps = 2
const lanes = 12
/** Longer than the lease and the heartbeat after which others take over. */
const pauseMs = 3_600
/** However few faults there are. */
const forMsMin = 4_000
/** When the last pause is over. */
const wholeKillsAtMs = 9_000

export const scenarios: Readonly<Record<Breakage, Scenario>> = {
  // Zombies: what they had begun is done by others meanwhile, and then they come back and end it, too.
  fence: {
    rule: 'doubled',
    routes: ['tx'],
    temper: { slowMs: [100, 300], slowShare: 0.8 },
    rate: 60,
    faults: [
      { kind: 'pause', atMs: 500, victim: 0, forMs: pauseMs },
      { kind: 'pause', atMs: 5_000, victim: 1, forMs: pauseMs },
    ],
  },
  // No fault is needed: a slow operation is overtaken by the quick one behind it.
  lane: { rule: 'reordered', routes: ['tx'], temper: { slowMs: [40, 120], slowShare: 0.4 }, rate: 100, faults: [] },
  // Kills, between the answer and its commit.
  ack: {
    rule: 'lost',
    routes: ['tx'],
    temper: { slowMs: [20, 60], slowShare: 0.2 },
    rate: 100,
    faults: [0, 1, 0, 1].map((victim, i) => ({ kind: 'kill', atMs: 500 + i * 1_500, victim, forMs: 0 })),
  },
  // No fault is needed: consumers fail, and forget what they were given.
  batch: { rule: 'lost', routes: ['push'], temper: { slowMs: [0, 0], slowShare: 0 }, rate: 60, faults: [] },
}

/** Nothing broken, and all that the others meet, one after the other: what they find is not of the faults, but of the breakage. */
const whole: Omit<Scenario, 'rule'> = {
  routes: ['tx', 'push'],
  temper: { slowMs: [40, 200], slowShare: 0.5 },
  rate: 80,
  faults: [
    ...scenarios.fence.faults,
    ...scenarios.ack.faults.map((fault) => ({ ...fault, atMs: fault.atMs + wholeKillsAtMs })),
  ],
}

export async function runDirected(o: {
  /** `whole`: of none of them. */
  scenario: Breakage | 'whole'
  /** False: the same run with nothing broken. */
  broken: boolean
  seed: number
  say(line: string): void
  signal?: AbortSignal
}): Promise<RunResult & { verdict: Verdict }> {
  const { scenario } = o
  const { routes, temper, rate, faults } = scenario === 'whole' ? whole : scenarios[scenario]
  const result = await run({
    seed: o.seed,
    lanes: lanesOf(lanes, routes),
    temper,
    servers: apps,
    workers: 0,
    rate,
    leaseMs,
    breakage: o.broken && scenario !== 'whole' ? scenario : null,
    forMsMin,
    plan: () => faults.map((fault) => ({ aimed: true, pick: 0, ...fault })),
    say: o.say,
    ...(o.signal && { signal: o.signal }),
  })
  return { ...result, verdict: check(result.evidence) }
}
