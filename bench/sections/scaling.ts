import pg from 'pg'
import { figure, verdict } from '../figures.js'
import { type DrainSetup, drainWith, preloadWith, ratePerSecond, settleDown } from '../programs/drain-runs.js'
import { rotated } from '../rounds.js'
import type { BenchContext, Figure, Section, SectionResult } from '../section.js'
import { median, pairedRatio } from '../statistics.js'

/** A database with a backlog that is kept at its size: what a round drains, the next one hands over again first. */
class Backlog {
  readonly name: string
  readonly pending: number
  readonly lanes: number
  readonly drainRates: number[] = []
  readonly acceptRates: number[] = []
  readonly #context: BenchContext
  readonly #database: string
  readonly #setup: DrainSetup
  #url = ''
  #handedOver = 0

  constructor(context: BenchContext, pending: number, lanes: number) {
    this.name = `${pending.toLocaleString('en')} pending in ${lanes.toLocaleString('en')} lanes`
    this.pending = pending
    this.lanes = lanes
    this.#context = context
    this.#database = `scaling_${pending}_${lanes}`
    this.#setup = { program: 'drain-spillway.ts', lanes, settings: {}, isOrdered: true }
  }

  async fill(count: number): Promise<void> {
    this.#url = await this.#context.postgres.createDatabase(this.#database)
    this.#context.say(`handing over ${this.name}`)
    await this.#accept(count)
    await settleDown(this.#url)
  }

  /** Hands over `take` more, then drains as many; both are timed. */
  async round(take: number): Promise<void> {
    this.#context.say(this.name)
    this.acceptRates.push(await this.#accept(take))
    const portion = { url: this.#url, count: this.#handedOver, stopAfter: take }
    this.drainRates.push(ratePerSecond(await drainWith(this.#context, this.#setup, portion)))
  }

  async #accept(count: number): Promise<number> {
    const portion = { url: this.#url, count, from: this.#handedOver }
    const { seconds } = await preloadWith(this.#context, this.#setup, portion)
    this.#handedOver += count
    return count / seconds
  }

  /** Each round's worker checks what it ran; this checks the sum: everything is either done, once, or still pending. */
  async check(): Promise<void> {
    const client = new pg.Client({ connectionString: this.#url })
    await client.connect()
    try {
      const { rows } = await client.query<{ pending: number; done: number; distinct: number }>(
        `SELECT (SELECT count(*)::int FROM spillway.ops) AS pending, count(*)::int AS done,
           count(DISTINCT id)::int AS distinct FROM spillway.history`,
      )
      const { pending = 0, done = 0, distinct = 0 } = rows[0] ?? {}
      if (pending + done !== this.#handedOver || distinct !== done) {
        throw new Error(
          `${this.name}: ${this.#handedOver} were handed over, ${pending} are pending and ${done} done, ${distinct} of them different`,
        )
      }
      const { rows: faults } = await client.query<{ fault: string }>('SELECT fault FROM spillway.audit() LIMIT 3')
      if (faults.length > 0) throw new Error(`${this.name}: ${faults.map(({ fault }) => fault).join('; ')}`)
    } finally {
      await client.end()
    }
  }

  async drop(): Promise<void> {
    await this.#context.postgres.dropDatabase(this.#database)
  }
}

const fewLanes = 200

export const scaling: Section = {
  name: 'scaling',
  title: 'Backlog and number of lanes',
  estimateSeconds: (quick) => (quick ? 110 : 360),
  run: runScaling,
}

async function runScaling(context: BenchContext): Promise<SectionResult> {
  const { quick } = context
  const [small, large, manyLanes, take] = quick
    ? ([20_000, 200_000, 20_000, 12_000] as const)
    : ([100_000, 1_000_000, 100_000, 60_000] as const)
  const short = new Backlog(context, small, fewLanes)
  const long = new Backlog(context, large, fewLanes)
  const wide = new Backlog(context, large, manyLanes)
  const backlogs = [short, long, wide]
  for (const backlog of backlogs) await backlog.fill(backlog.pending - take)
  const rounds = quick ? 3 : 5
  for (let round = 0; round < rounds; round++) {
    context.say(`round ${round + 1}`)
    for (const backlog of rotated(backlogs, round)) await backlog.round(take)
  }
  for (const backlog of backlogs) {
    await backlog.check()
    await backlog.drop()
  }
  const figures = backlogs.flatMap((backlog): Figure[] => [
    figure({ what: 'drain, no-op handler', variant: backlog.name, unit: '/s', runs: backlog.drainRates }),
    figure({ what: 'accept, in process', variant: backlog.name, unit: '/s', runs: backlog.acceptRates }),
  ])
  return {
    figures,
    verdicts: [
      verdict({
        what: `drain: ${long.name} ÷ ${short.name}`,
        value: pairedRatio(long.drainRates, short.drainRates),
        unit: '×',
        rule: 'at-least',
        target: 0.9,
      }),
      verdict({
        what: `drain: ${wide.name} ÷ ${long.name}`,
        value: pairedRatio(wide.drainRates, long.drainRates),
        unit: '×',
        rule: 'at-least',
        target: 0.7,
      }),
    ],
    plots: [
      {
        name: 'scaling',
        title: 'What a backlog and many lanes cost',
        xLabel: '',
        yLabel: 'operations per second',
        kind: 'bars',
        series: backlogs.flatMap((backlog) => [
          { name: `drain, ${backlog.name}`, points: [[0, median(backlog.drainRates)] as const] },
          { name: `accept, ${backlog.name}`, points: [[0, median(backlog.acceptRates)] as const] },
        ]),
      },
    ],
    notes: [
      `Each round hands over ${take.toLocaleString('en')} operations, so that the backlog has its size, and drains as many with a library worker in its default settings; the first tenth is warm-up. Accepting is measured with 2,000 submissions under way in one process.`,
      `In the end everything must be done once or still pending. Ratios are medians of the rounds’ ratios (accepting with many lanes: ${pairedRatio(wide.acceptRates, long.acceptRates).toFixed(2)} × that with ${fewLanes}).`,
    ],
  }
}
