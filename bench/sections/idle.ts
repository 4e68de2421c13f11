/** What a server costs that has nothing to do. */
import { setTimeout as delay } from 'node:timers/promises'
import { figure, verdict } from '../figures.js'
import { usageOf } from '../process-usage.js'
import { countQueries } from '../query-counter.js'
import type { BenchContext, Section, SectionResult } from '../section.js'

const seconds = (quick: boolean): number => (quick ? 10 : 30)
/** Migrations, prepared statements and the first maintenance are the start's cost, not idleness's. */
const settleSeconds = 5

export const idle: Section = {
  name: 'idle',
  title: 'Idle',
  estimateSeconds: (quick) => seconds(quick) + settleSeconds + 5,
  run: measure,
}

async function measure(context: BenchContext): Promise<SectionResult> {
  const counter = await countQueries(await context.postgres.createDatabase('idle'))
  try {
    const server = await context.serve({ DATABASE_URL: counter.url })
    context.say(`letting it settle for ${settleSeconds} s`)
    await delay(settleSeconds * 1_000)
    counter.reset()
    const before = usageOf(server.pid)
    const began = performance.now()
    const rss: number[] = []
    context.say(`watching it for ${seconds(context.quick)} s`)
    for (let second = 0; second < seconds(context.quick); second++) {
      await delay(1_000)
      rss.push(usageOf(server.pid).rssMb)
    }
    const elapsed = (performance.now() - began) / 1_000
    const cpu = ((usageOf(server.pid).cpuSeconds - before.cpuSeconds) / elapsed) * 100
    return conclude(counter.counts(), elapsed, rss, cpu)
  } finally {
    await counter.close()
  }
}

function conclude(
  counts: ReadonlyMap<string, number>,
  elapsed: number,
  rss: readonly number[],
  cpu: number,
): SectionResult {
  const queries = [...counts.values()].reduce((sum, count) => sum + count, 0) / elapsed
  const what = 'one idle server, all roles'
  const largest = Math.max(...rss)
  return {
    figures: [
      figure({ what, variant: 'statements to PostgreSQL', unit: '/s', runs: [queries] }),
      figure({ what, variant: 'resident memory of the Node.js process', unit: 'MB', runs: rss }),
      figure({ what, variant: 'CPU of the Node.js process', unit: '%', runs: [cpu] }),
    ],
    verdicts: [
      verdict({
        what: 'statements per second of an idle process',
        value: queries,
        unit: '/s',
        rule: 'at-most',
        target: 2,
      }),
      verdict({ what: 'resident memory of an idle process', value: largest, unit: 'MB', rule: 'at-most', target: 130 }),
    ],
    plots: [],
    notes: [
      `The real \`spillway serve\`, all roles, watched for ${Math.round(elapsed)} s, from ${settleSeconds} s after it was ready. Statements are counted in the wire protocol, between this process and PostgreSQL: what autovacuum or others do is not among them.`,
      `What it asked: ${busiest(counts, elapsed)}.`,
    ],
  }
}

const shown = 6

/** The statements asked most often, each cut to its beginning. */
function busiest(counts: ReadonlyMap<string, number>, elapsed: number): string {
  const rows = [...counts].sort(([, a], [, b]) => b - a).slice(0, shown)
  if (rows.length === 0) return 'nothing'
  return rows
    .map(
      ([statement, count]) =>
        `\`${statement.replaceAll(/\s+/g, ' ').trim().slice(0, 60)}\` ${(count / elapsed).toFixed(2)}/s`,
    )
    .join('; ')
}
