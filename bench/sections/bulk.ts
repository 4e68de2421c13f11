/** A thousand operations in one call, beside a peer's bulk insert. */
import { figure, verdict } from '../figures.js'
import { ask } from '../measurement.js'
import { interleave, of, type Variant } from '../rounds.js'
import type { BenchContext, Section, SectionResult } from '../section.js'
import { pairedRatio } from '../statistics.js'

const paces = { full: { rounds: 9, seconds: 2 }, quick: { rounds: 5, seconds: 1 } } as const

const names = {
  plain: 'Spillway submitMany, no lane',
  laned: 'Spillway submitMany, 200 lanes',
  boss: 'pg-boss insert',
} as const

export const bulk: Section = {
  name: 'bulk',
  title: 'A thousand in one call',
  estimateSeconds(quick) {
    const { rounds, seconds } = paces[quick ? 'quick' : 'full']
    return Object.keys(names).length * (rounds + 1) * seconds + 10
  },
  run: measure,
}

async function measure(context: BenchContext): Promise<SectionResult> {
  const { rounds, seconds } = paces[context.quick ? 'quick' : 'full']
  context.say('starting the programs')
  const program = async (name: string, file: string, peer = false): Promise<string> => {
    const env = { DATABASE_URL: await context.postgres.createDatabase(`bulk_${name}`), POOL_MAX: '10' }
    const [, origin = ''] = await context.start(file, { env, peer }).line(/^LISTENS (\S+)$/)
    return origin
  }
  const [spillway, boss] = await Promise.all([
    program('spillway', 'programs/bulk-spillway.ts'),
    program('boss', 'programs/bulk-pg-boss.ts', true),
  ])
  const variant = (name: string, origin: string, measurement: string): Variant<number> => ({
    name,
    run: async () => (await ask<{ p50Ms: number }>(origin, measurement, { seconds })).p50Ms,
  })
  const variants = [
    variant(names.plain, spillway, 'plain'),
    variant(names.laned, spillway, 'laned'),
    variant(names.boss, boss, 'insert'),
  ]
  context.say('warming up')
  for (const { run } of variants) await run()
  const took = await interleave(variants, rounds, (round) => context.say(`round ${round + 1} of ${rounds}`))
  const ratio = (what: string, name: string) =>
    verdict({ what, value: pairedRatio(of(took, name), of(took, names.boss)), unit: '×', rule: 'at-most', target: 2 })
  return {
    figures: Object.values(names).map((name) =>
      figure({ what: '1,000 operations in one call, median', variant: name, unit: 'ms', runs: of(took, name) }),
    ),
    verdicts: [
      ratio('time of submitMany without lanes over pg-boss insert', names.plain),
      ratio('time of submitMany over 200 lanes over pg-boss insert', names.laned),
    ],
    plots: [],
    notes: [
      'In process, one call after the other, bodies of about 150 bytes, 10 connections. No workers: accepting alone is measured.',
    ],
  }
}
