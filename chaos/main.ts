/** `npm run chaos`. See docs/guides/chaos.md. */
import { rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { type Breakage, breakageMeanings } from './breakage.js'
import { check, type Verdict } from './checker/check.js'
import { rules } from './checker/finding.js'
import { runDirected, scenarios } from './directed.js'
import { runHostile } from './hostile.js'
import { type Options, parseOptions, UsageError, usage } from './options.js'
import { planFaults } from './plan.js'
import { reportJson, reportLines } from './report.js'
import { runRouting } from './routing-overload.js'
import { type RunResult, run } from './run.js'
import { runStreams } from './streams.js'
import { lanesOf, usualTemper } from './workload.js'

/** At least this share of the kills has to hit a process that holds leased work, or the run has shown too little. */
const holdersShareMin = 0.5
const exits = { clean: 0, found: 1, undone: 2 } as const

interface Watch {
  say(line: string): void
  signal: AbortSignal
}

async function runAll(options: Options, watch: Watch): Promise<RunResult & { verdict: Verdict }> {
  const result = await run({
    ...options,
    lanes: lanesOf(options.lanes),
    temper: usualTemper,
    plan: (slots) => planFaults({ ...options, slots: slots.length }),
    ...watch,
  })
  watch.say('checking')
  return { ...result, verdict: check(result.evidence) }
}

/** Clean is what a run has to be, or, with a broken queue, caught. */
function conclude(verdict: Verdict, breakage: Breakage | null, plannedKills: number): { ok: boolean; line: string } {
  const { findings, counts } = verdict
  if (breakage !== null) {
    const { rule } = scenarios[breakage]
    const ok = findings.some((finding) => finding.rule === rule)
    return { ok, line: `${ok ? 'caught' : 'NOT CAUGHT'}: ${breakageMeanings[breakage]}, to be seen as: ${rules[rule]}` }
  }
  if (findings.length > 0) return { ok: false, line: `${findings.length} violations` }
  if (counts.kills > 0 && counts.killsOfHolders / counts.kills < holdersShareMin) {
    return { ok: false, line: 'nothing was found, but too few kills hit a process that held leased work' }
  }
  if (counts.kills < plannedKills) {
    return {
      ok: false,
      line: `nothing was found, but only ${counts.kills} of ${plannedKills} kills could be played in time`,
    }
  }
  return { ok: true, line: 'nothing was found' }
}

async function main(options: Options): Promise<number> {
  const startedAt = new Date()
  const began = performance.now()
  const seconds = (): number => (performance.now() - began) / 1_000
  const say = (line: string): void => console.log(`${seconds().toFixed(1).padStart(6)} s  ${line}`)
  const interrupt = new AbortController()
  process.once('SIGINT', () => {
    say('interrupted: ending what runs; a second Ctrl-C ends at once')
    interrupt.abort()
  })
  if (options.routing) {
    const findings = await runRouting({ ...options, say, signal: interrupt.signal })
    if (findings === null) return exits.undone
    return findings.length === 0 ? exits.clean : exits.found
  }
  if (options.streams !== null) {
    const findings = await runStreams({ ...options, streams: options.streams, say, signal: interrupt.signal })
    if (findings === null) return exits.undone
    return findings.length === 0 ? exits.clean : exits.found
  }
  if (options.hostile !== null) {
    const findings = await runHostile({ ...options, ...options.hostile, say, signal: interrupt.signal })
    if (findings === null) return exits.undone
    return findings.length === 0 ? exits.clean : exits.found
  }
  say(`seed ${options.seed} (the same plan again: --seed ${options.seed})`)
  const watch: Watch = { say, signal: interrupt.signal }
  const { breakage, seed } = options
  const { verdict, folder, planned, database, interrupted } = await (breakage === null
    ? runAll(options, watch)
    : runDirected({ scenario: breakage, broken: true, seed, ...watch }))
  for (const line of reportLines(verdict)) console.log(line)
  const { ok, line } = conclude(verdict, breakage, planned)
  const file = options.reportFile ?? join(tmpdir(), `spillway-chaos-${seed}.json`)
  await writeFile(file, reportJson({ options, verdict, database, startedAt, seconds: seconds() }))
  const keep = options.keep || !ok
  if (!keep) await rm(folder, { recursive: true, force: true })
  console.log(
    `\n${interrupted ? 'interrupted before its end; of what there is: ' : ''}${line}\nseed ${seed}; report: ${file}${keep ? `; logs: ${folder}` : ''}`,
  )
  if (interrupted) return exits.undone
  return ok ? exits.clean : exits.found
}

try {
  const options = parseOptions(process.argv.slice(2))
  if (options === null) console.log(usage)
  else process.exitCode = await main(options)
} catch (fault) {
  if (fault instanceof UsageError) console.error(`chaos: ${fault.message}\n\n${usage}`)
  else console.error('chaos: the run could not be done.', fault)
  process.exitCode = exits.undone
}
