/** One user asks for a great deal, then many ask for one thing each: who waits for how long. */

import { monotonicMs } from '../../spillway/test/setup/scripted-upstream.js'
import type { GenerationFleet } from './generation-faults-fleet.js'
import { Reader, type Transcript } from './generation-faults-reader.js'
import { judge } from './generation-faults-verdict.js'
import { until } from './server-process.js'

export interface Contention {
  greedy: number
  modest: number
  /** How long each takes once it runs. */
  serviceMs: number
}

interface Spread {
  p50: number
  max: number
}

export interface Contended {
  findings: string[]
  /** From the request to the first token, of those with one request each. */
  waitMs: Spread
  greedyWaitMs: Spread
  /** How many of the greedy user's the upstream was asked for after each of the others had come and before its turn. */
  greedyBefore: Spread
  /** Jain's index over the users: how often each had its turn from when all had come until all had had one. */
  jain: number
}

export async function contend(fleet: GenerationFleet, o: Contention): Promise<Contended> {
  fleet.upstream.forget()
  const tokens = 5
  const ask = (user: string, n: number) =>
    new Reader(
      fleet.origins,
      {
        ...{ format: n % 2 === 0 ? 'native' : 'openai', marker: `${user}-${n}`, user, tokens },
        everyMs: o.serviceMs / tokens,
      },
      { turn: n, patienceMs: 300_000 },
    )
  const many = Array.from({ length: o.greedy }, (_, n) => ask('greedy', n))
  await Promise.all(many.map(({ promised }) => promised))
  const fromMs = monotonicMs()
  const few = Array.from({ length: o.modest }, (_, n) => ask(`modest${n}`, n))
  const [others, greedy] = await Promise.all([settledOf(few), settledOf(many)])
  await until('nothing is left', async () => (await fleet.leftovers()).length === 0)
  const began = new Map(fleet.upstream.requests.map(({ marker, beganMs }) => [marker, beganMs]))
  const beganOf = ({ ask: { marker } }: Transcript): number => began.get(marker) ?? Number.POSITIVE_INFINITY
  const turns = greedy.map(beganOf)
  const lastMs = Math.max(...others.map(beganOf))
  const greedyTurns = turns.filter((ms) => ms >= fromMs && ms <= lastMs).length
  return {
    findings: judge([...others, ...greedy], fleet.upstream.requests).findings,
    waitMs: spread(others.map(waitOf)),
    greedyWaitMs: spread(greedy.map(waitOf)),
    greedyBefore: spread(
      others.map((transcript) => turns.filter((ms) => ms >= transcript.askedMs && ms < beganOf(transcript)).length),
    ),
    jain: jainOf([greedyTurns, ...others.map(() => 1)]),
  }
}

const settledOf = (readers: readonly Reader[]): Promise<Transcript[]> => Promise.all(readers.map(({ over }) => over))

const waitOf = ({ askedMs, firstTokenMs }: Transcript): number => (firstTokenMs ?? Number.POSITIVE_INFINITY) - askedMs

function spread(values: readonly number[]): Spread {
  const sorted = [...values].sort((a, b) => a - b)
  return { p50: Math.round(sorted[sorted.length >> 1] ?? 0), max: Math.round(sorted.at(-1) ?? 0) }
}

/** 1: all the same; 1/n: one has everything. */
export function jainOf(values: readonly number[]): number {
  const sum = values.reduce((total, value) => total + value, 0)
  const squares = values.reduce((total, value) => total + value * value, 0)
  return sum ** 2 / (values.length * squares)
}
