/** The section's side of the drain programs: fills a database, drains it, and judges what the worker counted. */
import pg from 'pg'
import type { BenchContext } from '../section.js'
import type { Drained, DrainTask, Preloaded } from './drain-count.js'

export interface DrainSetup {
  /** Of bench/programs: `drain-spillway.ts`. */
  readonly program: string
  readonly lanes: number
  readonly settings: Readonly<Record<string, unknown>>
  /** Must each lane have been run in order? */
  readonly isOrdered: boolean
}

export interface Portion {
  readonly url: string
  readonly count: number
  readonly from?: number
  readonly stopAfter?: number
}

const preloadMsMax = 300_000
const drainMsMax = 150_000

export async function preloadWith(context: BenchContext, setup: DrainSetup, portion: Portion): Promise<Preloaded> {
  return (await runStage(context, setup, portion, 'preload')) as Preloaded
}

/** Throws when something was run twice, not at all, or out of order: then its speed means nothing. */
export async function drainWith(context: BenchContext, setup: DrainSetup, portion: Portion): Promise<Drained> {
  const drained = (await runStage(context, setup, portion, 'drain')) as Drained
  const { doubled, missing, strange, disordered } = drained
  if (doubled + missing + strange > 0 || (setup.isOrdered && disordered > 0)) {
    throw new Error(
      `${setup.program} ran ${doubled} jobs twice, ${missing} not at all, ${strange} that were never handed over, ` +
        `and took ${disordered} steps out of order`,
    )
  }
  return drained
}

export const ratePerSecond = (drained: Drained): number => drained.steadyCount / drained.steadySeconds

/** What autovacuum would have done before long, done for all: whose plans it comes in time for is chance. */
export async function settleDown(url: string): Promise<void> {
  const client = new pg.Client({ connectionString: url })
  await client.connect()
  try {
    await client.query('ANALYZE')
  } finally {
    await client.end()
  }
}

async function runStage(
  context: BenchContext,
  setup: DrainSetup,
  portion: Portion,
  stage: DrainTask['stage'],
): Promise<Preloaded | Drained> {
  const { url, count, from = 0, stopAfter = 0 } = portion
  const { lanes, settings } = setup
  const task: DrainTask = { url, stage, count, from, lanes, settings, stopAfter }
  const child = context.start(`programs/${setup.program}`, {
    env: { DRAIN_TASK: JSON.stringify(task) },
    // On the same Node.js as the peers, which want a newer one than Spillway does.
    peer: true,
  })
  const pattern = stage === 'preload' ? /^preloaded (.+)$/ : /^drained (.+)$/
  const [, report = ''] = await child.line(pattern, stage === 'preload' ? preloadMsMax : drainMsMax)
  await child.stop()
  return JSON.parse(report) as Preloaded | Drained
}
