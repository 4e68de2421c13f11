/** The report of a run: lines for people, JSON for machines. */
import { arch, cpus, platform, totalmem } from 'node:os'
import type { Verdict } from './checker/check.js'
import { type Finding, type Rule, rules } from './checker/finding.js'
import { acceptingMaxMs, redoneMaxMs, type Spread } from './checker/recovery.js'
import type { Options } from './options.js'

const shownPerRule = 8

export function machine(): Record<string, string | number> {
  return {
    node: process.version,
    platform: `${platform()} ${arch()}`,
    cpus: cpus().length,
    memoryMb: Math.round(totalmem() / 1_048_576),
  }
}

export function countByRule(findings: readonly Finding[]): Partial<Record<Rule, number>> {
  const counts: Partial<Record<Rule, number>> = {}
  for (const { rule } of findings) counts[rule] = (counts[rule] ?? 0) + 1
  return counts
}

export function reportLines(verdict: Verdict): string[] {
  const { counts, recovery, findings } = verdict
  const spread = ({ count, medianMs, maxMs }: Spread): string =>
    count === 0 ? 'not measured' : `median ${medianMs} ms, at most ${maxMs} ms (${count})`
  const share = counts.kills === 0 ? 0 : Math.round((100 * counts.killsOfHolders) / counts.kills)
  const lines = [
    '',
    `operations      ${counts.submitted} submitted, ${counts.accepted} accepted, ${counts.refusedForGood} refused for good, ${counts.deadLetters} dead letters (as they should)`,
    `requests        ${counts.tries}: ${counts.replays} replayed, ${counts.refusals} refused for now, ${counts.networkErrors} broken off`,
    `effects         ${counts.effects} in the table, ${counts.deliveries} deliveries to the sink, of which ${counts.repeats} repeats (${counts.lateRepeats} behind a newer one)`,
    `messages        ${counts.handed} handed out, of which ${counts.handedAgain} again; ${counts.agreed} agreed to, ${counts.acksRefused} answers refused (late, or twice)`,
    `faults          ${Object.entries(counts.faults)
      .map(([kind, count]) => `${count} × ${kind}`)
      .join(', ')}`,
    `kills           ${counts.kills}, ${counts.killsOfHolders} of them (${share}%) hit a process that held leased work`,
    `PostgreSQL      away ${spread(recovery.away)}`,
    `accepting again after it is back: anyone ${spread(recovery.accepting)}; each process ${spread(recovery.acceptingEach)}; allowed ${acceptingMaxMs} ms`,
    `work of the dead done again: ${spread(recovery.redone)}; allowed ${redoneMaxMs} ms`,
    '',
  ]
  const found = countByRule(findings)
  for (const [rule, meaning] of Object.entries(rules) as [Rule, string][]) {
    const count = found[rule] ?? 0
    lines.push(`${count === 0 ? 'none  ' : 'FOUND '} ${meaning}${count === 0 ? '' : `: ${count}`}`)
    const shown = findings.filter((finding) => finding.rule === rule).slice(0, shownPerRule)
    for (const { detail } of shown) lines.push(`         ${detail}`)
    if (count > shown.length) lines.push(`         … and ${count - shown.length} more, in the report`)
  }
  return lines
}

export function reportJson(o: {
  options: Options
  verdict: Verdict
  database: Record<string, string>
  startedAt: Date
  seconds: number
}): string {
  const { options, verdict, database } = o
  const { reportFile: _, keep: __, ...asked } = options
  return `${JSON.stringify(
    {
      startedAt: o.startedAt.toISOString(),
      seconds: Math.round(o.seconds),
      options: asked,
      machine: machine(),
      database,
      counts: verdict.counts,
      recovery: verdict.recovery,
      found: countByRule(verdict.findings),
      findings: verdict.findings,
    },
    null,
    2,
  )}\n`
}
