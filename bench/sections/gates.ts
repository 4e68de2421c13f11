/** What the gates cost, beside rate-limiter-flexible on the same PostgreSQL, and whether either lets one too many pass. */
import { figure, verdict } from '../figures.js'
import { ask } from '../measurement.js'
import { countQueries, type QueryCounter } from '../query-counter.js'
import { interleave, of, type Variant } from '../rounds.js'
import type { BenchContext, Figure, Section, SectionResult } from '../section.js'

const pace = (quick: boolean) =>
  quick ? { rounds: 2, seconds: 1.5, lone: 200 } : { rounds: 5, seconds: 3, lone: 1_000 }
const limit = 1_000
const processes = 2
const poolSizes = [8, 16, 32]

export const gates: Section = {
  name: 'gates',
  title: 'Gates: capacity and rate',
  estimateSeconds(quick) {
    const { rounds, seconds, lone } = pace(quick)
    return rounds * seconds * (3 + poolSizes.length) + (lone * 6) / 250 + 20
  },
  run: measure,
}

interface Timed {
  readonly rows: number
  readonly seconds: number
  readonly p50Ms: number
  readonly p99Ms: number
}

interface Admitted {
  readonly count: number
  readonly p50Ms: number
  readonly p99Ms: number
}

const names = {
  plain: 'Spillway accept without gates',
  gated: 'Spillway accept with capacity and rate',
  consume: (size: number) => `rate-limiter-flexible consume, ${size} connections`,
} as const

async function measure(context: BenchContext): Promise<SectionResult> {
  const { rounds, seconds, lone } = pace(context.quick)
  const url = await context.postgres.createDatabase('gates')
  const counter = await countQueries(url)
  try {
    context.say('starting two processes of each')
    const limiterUrl = await context.postgres.createDatabase('gates_limiter')
    const origins = await startAll(context, 'programs/gates.ts', url, processes)
    const limiters = await startAll(context, 'programs/rate-limiter.ts', limiterUrl, processes)
    // Counting costs time: this one is counted and never timed.
    const [counted = ''] = await startAll(context, 'programs/gates.ts', counter.url, 1)
    const [own = ''] = origins
    const [limiter = ''] = limiters

    context.say('accepting one by one, counting statements')
    const statements = await statementsOf(counted, lone, counter)
    const alone = {
      plain: await ask<Alone>(own, 'alone-plain', { count: lone }),
      gated: await ask<Alone>(own, 'alone-gated', { count: lone }),
    }
    context.say('accepting 64 at a time, beside rate-limiter-flexible')
    const variant = (name: string, origin: string, measurement: string): Variant<Timed> => ({
      name,
      run: () => ask<Timed>(origin, measurement, { seconds }),
    })
    const together = await interleave(
      [
        variant(names.plain, own, 'together-plain'),
        variant(names.gated, own, 'together-gated'),
        ...poolSizes.map((size) => variant(names.consume(size), limiter, `consume-${size}`)),
      ],
      rounds,
      (round) => context.say(`round ${round + 1} of ${rounds}`),
    )
    const admitted: Admitted[] = []
    for (let round = 0; round < rounds; round++) admitted.push(await ask<Admitted>(own, 'admit', { seconds }))
    context.say(`a limit of ${limit}, ${processes} processes, 64 at once in each`)
    const exact = {
      spillway: await takenInAll(origins),
      limiter: await takenInAll(limiters),
    }
    return conclude({ alone, statements, together, admitted, exact })
  } finally {
    await counter.close()
  }
}

async function startAll(context: BenchContext, program: string, databaseUrl: string, count: number): Promise<string[]> {
  const origins: string[] = []
  // One after the other: the first makes the tables.
  for (let n = 0; n < count; n++) {
    const child = context.start(program, { env: { DATABASE_URL: databaseUrl, LIMIT: String(limit) } })
    const [, origin = ''] = await child.line(/^LISTENS (\S+)$/)
    origins.push(origin)
  }
  return origins
}

interface Alone {
  readonly p50Ms: number
  readonly p99Ms: number
}

/** Executed for each accept, on its way: what runs now and then in the background is not among them. */
async function statementsOf(
  origin: string,
  count: number,
  counter: QueryCounter,
): Promise<{ plain: number; gated: number }> {
  const measureOne = async (name: string): Promise<number> => {
    // Once before: the first executions prepare their statements.
    await ask(origin, `alone-${name}`, { count: 50 })
    counter.reset()
    await ask(origin, `alone-${name}`, { count })
    const onTheWay = [...counter.counts().values()].filter((executed) => executed >= count / 2)
    return Math.round((onTheWay.reduce((sum, n) => sum + n, 0) / count) * 100) / 100
  }
  return { plain: await measureOne('plain'), gated: await measureOne('gated') }
}

/** All processes try at once, each as often as the limit allows in all. */
async function takenInAll(origins: readonly string[]): Promise<number> {
  const key = `one-${Date.now()}`
  const answers = await Promise.all(
    origins.map((origin) => ask<{ taken: number }>(origin, 'exact', { count: limit, key })),
  )
  return answers.reduce((sum, { taken }) => sum + taken, 0)
}

interface Found {
  readonly statements: { readonly plain: number; readonly gated: number }
  readonly alone: { readonly plain: Alone; readonly gated: Alone }
  readonly together: ReadonlyMap<string, readonly Timed[]>
  readonly admitted: readonly Admitted[]
  readonly exact: { readonly spillway: number; readonly limiter: number }
}

function conclude({ alone, statements, together, admitted, exact }: Found): SectionResult {
  const togetherNames = [names.plain, names.gated, ...poolSizes.map((size) => names.consume(size))]
  const perSecond = (name: string): number[] => of(together, name).map((timed) => timed.rows / timed.seconds)
  const single = (what: string, variant: string, unit: string, value: number): Figure =>
    figure({ what, variant, unit, runs: [value] })
  const rate = '64 at once, 200 users'
  const early = figure({
    what: 'the check in process, p99',
    variant: 'capacity and rate',
    unit: 'ms',
    runs: admitted.map(({ p99Ms }) => p99Ms),
  })
  const added = Math.max(0, statements.gated - statements.plain)
  return {
    figures: [
      early,
      figure({
        what: 'the check in process, median',
        variant: 'capacity and rate',
        unit: 'ms',
        runs: admitted.map(({ p50Ms }) => p50Ms),
      }),
      ...togetherNames.map((variant) => figure({ what: rate, variant, unit: '/s', runs: perSecond(variant) })),
      ...togetherNames.map((variant) =>
        figure({ what: `${rate}, p99`, variant, unit: 'ms', runs: of(together, variant).map(({ p99Ms }) => p99Ms) }),
      ),
      single('one at a time, median', names.plain, 'ms', alone.plain.p50Ms),
      single('one at a time, median', names.gated, 'ms', alone.gated.p50Ms),
      single('statements for each accept', names.plain, '', statements.plain),
      single('statements for each accept', names.gated, '', statements.gated),
      single(`taken at a limit of ${limit}, 2 processes`, 'Spillway', '', exact.spillway),
      single(`taken at a limit of ${limit}, 2 processes`, 'rate-limiter-flexible', '', exact.limiter),
    ],
    verdicts: [
      verdict({ what: 'gates in process, p99', value: early.value, unit: 'ms', rule: 'at-most', target: 1 }),
      verdict({
        what: 'statements that the gates add to an accept',
        value: added,
        unit: '',
        rule: 'at-most',
        target: 0,
      }),
      verdict({
        what: `taken at a limit of ${limit} by 2 processes`,
        value: exact.spillway,
        unit: '',
        rule: 'at-most',
        target: limit,
      }),
    ],
    plots: [],
    notes: [
      'The check in process runs before the body is read; it was timed for each request while 64 were waiting for their commit. The exact check is part of the statement that accepts, so its cost is the difference between accepting with and without gates.',
      'rate-limiter-flexible decides and keeps nothing else; a Spillway accept decides about rate and capacity and stores the operation, durably and in order. Both are called in process.',
      `Exactness: ${processes} processes, 64 tries at once in each, ${processes * limit} in all, by one user with a limit of ${limit} in an hour. Spillway's window slides by the minute; rate-limiter-flexible's is fixed.`,
      'Statements are counted in the wire protocol, one accept at a time.',
    ],
  }
}
