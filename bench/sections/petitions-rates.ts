/** What the rate limits add to the insert of a petition: time, and statements. */
import { ask } from '../measurement.js'
import type { QueryCounter } from '../query-counter.js'
import type { BenchContext } from '../section.js'
import { startProgram } from './petitions-sites.js'

interface Alone {
  readonly p50Ms: number
  readonly p99Ms: number
}

export const kinds = {
  insert: 'insert alone',
  submitter: "with the submitter's limit",
  all: 'with all limits',
} as const
export type Kind = keyof typeof kinds
export const kindNames = Object.keys(kinds) as Kind[]

export interface Rates {
  readonly alone: Readonly<Record<Kind, Alone>>
  readonly statements: Readonly<Record<Kind, number>>
}

/** `count` of each kind. */
export async function measureRates(context: BenchContext, count: number, counter: QueryCounter): Promise<Rates> {
  context.say('submitting one by one in process, with and without the limits')
  const databaseUrl = await context.postgres.createDatabase('petitions_alone')
  const timed = await startProgram(context, 'programs/petition-rates.ts', { DATABASE_URL: databaseUrl })
  // Counting costs time: this one is counted and never timed.
  const counted = await startProgram(context, 'programs/petition-rates.ts', { DATABASE_URL: counter.url })
  await ask(timed.origin, 'alone', { count: 100 })
  const alone = await ask<Record<Kind, Alone>>(timed.origin, 'alone', { count })
  const statements = { insert: 0, submitter: 0, all: 0 }
  for (const kind of kindNames) statements[kind] = await statementsOf(counted.origin, kind, counter)
  return { alone, statements }
}

/** Executed for each submission, on its way: what runs now and then in the background is not among them. */
async function statementsOf(origin: string, kind: Kind, counter: QueryCounter): Promise<number> {
  const count = 200
  // Once before: the first executions prepare their statements.
  await ask(origin, `only-${kind}`, { count: 50 })
  counter.reset()
  await ask(origin, `only-${kind}`, { count })
  const onTheWay = [...counter.counts().values()].filter((executed) => executed >= count / 2)
  return Math.round((onTheWay.reduce((sum, n) => sum + n, 0) / count) * 100) / 100
}
