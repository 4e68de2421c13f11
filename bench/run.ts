/**
 * The benchmark's run: options, PostgreSQL, the sections one after the other, and the report that is printed and written.
 * Whatever happens, an error, a timeout or Ctrl-C, no process and no temporary folder is left behind.
 */
import { Children } from './children.js'
import { createContext } from './context.js'
import { openPostgres, type RunningPostgres } from './database.js'
import { busyWarning, describeEnvironment, type Environment, publishingFault } from './environment.js'
import { chooseLoadGenerator, type LoadGenerator } from './load/index.js'
import { formatDuration } from './number-format.js'
import { type BenchOptions, help, parseOptions, UsageError } from './options.js'
import { Progress } from './progress.js'
import { publish, writeResults } from './publish.js'
import { environmentLines, sectionText, verdictLine } from './report.js'
import type { FailedSection, MeasuredSection, RunReport } from './results.js'
import type { Section, SectionResult } from './section.js'
import { sections as allSections } from './sections/index.js'
import { readCpuTime, stolenPercent } from './stolen.js'

export const exitCodes = { done: 0, failed: 1, usage: 2, interrupted: 130 } as const

/** A section that takes three times as long as it said hangs; a short one gets time to start its processes. */
const sectionTimeoutSeconds = (estimate: number): number => Math.max(120, estimate * 3)
const overallTimeoutSeconds = (estimate: number): number => estimate * 2 + 300

class Interrupted extends Error {
  override readonly name = 'Interrupted'
  readonly exitCode: number

  constructor(message: string, exitCode: number = exitCodes.failed) {
    super(message)
    this.exitCode = exitCode
  }
}

export async function main(args: readonly string[], sections: readonly Section[] = allSections): Promise<number> {
  const names = sections.map(({ name }) => name)
  try {
    const options = parseOptions(args, names)
    if (options.help) console.log(help)
    else if (options.list) listSections(sections)
    else return await run(options, sections)
    return exitCodes.done
  } catch (fault) {
    if (fault instanceof UsageError) {
      console.error(fault.message)
      return exitCodes.usage
    }
    if (fault instanceof Interrupted) {
      console.error(fault.message)
      return fault.exitCode
    }
    throw fault
  }
}

function listSections(sections: readonly Section[]): void {
  const widest = Math.max(...sections.map(({ name }) => name.length))
  for (const { name, title, estimateSeconds } of sections) {
    const times = `${formatDuration(estimateSeconds(false))}, quick ${formatDuration(estimateSeconds(true))}`
    console.log(`${name.padEnd(widest)}  ${title} (about ${times})`)
  }
}

async function run(options: BenchOptions, all: readonly Section[]): Promise<number> {
  const chosen = all.filter(({ name }) => options.only.length === 0 || options.only.includes(name))
  const plan = chosen.map((section) => ({ name: section.name, seconds: section.estimateSeconds(options.quick) }))
  const progress = new Progress(plan, (line) => console.log(line))
  const startedAt = new Date()
  const interruption = watchSignals()
  const total = plan.reduce((sum, { seconds }) => sum + seconds, 0)
  const overall = setTimeout(
    () => interruption.interrupt(`The whole run took longer than ${formatDuration(overallTimeoutSeconds(total))}.`),
    overallTimeoutSeconds(total) * 1_000,
  )
  let postgres: RunningPostgres | undefined
  try {
    progress.say(options.databaseUrl === null ? 'starting PostgreSQL' : 'asking PostgreSQL')
    const generatorFor = await chooseLoadGenerator((text) => progress.say(text))
    postgres = await openPostgres(options.databaseUrl)
    const environment = await describeEnvironment(postgres, generatorFor(new Children()).name)
    console.log(`\n${environmentLines(environment).join('\n')}\n`)
    const warning = busyWarning(environment)
    if (warning !== null) console.log(`Mind that ${warning}.\n`)
    const fault = publishingFault(environment, postgres.dataDir)
    if (fault !== null) console.log(`These figures will not be published: ${fault}.\n`)
    const measuring = { chosen, options, postgres, progress, environment, generatorFor, interruption }
    const { interrupted, ...outcome } = await measureAll(measuring)
    const report: RunReport = {
      startedAt: startedAt.toISOString(),
      quick: options.quick,
      only: options.only,
      seconds: (Date.now() - startedAt.getTime()) / 1_000,
      environment,
      ...outcome,
    }
    // What is measured is kept; what is published is whole.
    if (interrupted !== null) {
      if (report.sections.length > 0) console.log(`What was measured: ${await writeResults(report, options.out)}`)
      throw interrupted
    }
    return await conclude(
      report,
      options,
      fault,
      all.map(({ name }) => name),
    )
  } finally {
    clearTimeout(overall)
    await postgres?.close()
    interruption.stopWatching()
  }
}

interface Measuring {
  readonly chosen: readonly Section[]
  readonly options: BenchOptions
  readonly postgres: RunningPostgres
  readonly progress: Progress
  readonly environment: Environment
  readonly interruption: Interruption
  generatorFor(children: Children): LoadGenerator
}

interface Outcome extends Pick<RunReport, 'sections' | 'failed'> {
  readonly interrupted: Interrupted | null
}

async function measureAll(measuring: Measuring): Promise<Outcome> {
  const { chosen, options, progress, environment } = measuring
  const measured: MeasuredSection[] = []
  const failed: FailedSection[] = []
  for (const section of chosen) {
    const { name, title } = section
    progress.begin(name)
    progress.say(title)
    const began = Date.now()
    const cpuBefore = readCpuTime()
    try {
      const result = await measure(section, measuring)
      const stolen = stolenPercent(cpuBefore, readCpuTime())
      const seconds = (Date.now() - began) / 1_000
      const measuredAt = new Date(began).toISOString()
      measured.push({
        ...{ name, title, measuredAt, seconds, quick: options.quick, stolenPercent: stolen, environment, result },
      })
      if (stolen !== null && stolen > 0) progress.say(`the machine's host kept ${stolen}% of it for others meanwhile`)
      for (const verdict of result.verdicts) progress.say(verdictLine(verdict))
    } catch (fault) {
      if (fault instanceof Interrupted) return { sections: measured, failed, interrupted: fault }
      const error = fault instanceof Error ? (fault.stack ?? fault.message) : String(fault)
      failed.push({ name, title, error })
      progress.say(`FAILED\n${error}`)
    }
  }
  return { sections: measured, failed, interrupted: null }
}

async function measure(section: Section, measuring: Measuring): Promise<SectionResult> {
  const { options, postgres, progress, interruption } = measuring
  const children = new Children()
  const forget = interruption.onSecond(() => children.killNow())
  const seconds = sectionTimeoutSeconds(section.estimateSeconds(options.quick))
  let timer: NodeJS.Timeout | undefined
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(
      () => reject(new Error(`${section.name} was stopped: it took longer than ${formatDuration(seconds)}`)),
      seconds * 1_000,
    )
  })
  const context = createContext({
    quick: options.quick,
    postgres,
    children,
    load: measuring.generatorFor(children),
    say: (text) => progress.say(text),
  })
  try {
    // Here and not at the end, so that it is done after a section that failed too.
    await Promise.race([postgres.clear(), late, interruption.happened])
    return await Promise.race([section.run(context), late, interruption.happened])
  } finally {
    clearTimeout(timer)
    await children.close()
    forget()
  }
}

async function conclude(
  report: RunReport,
  options: BenchOptions,
  fault: string | null,
  names: readonly string[],
): Promise<number> {
  console.log('')
  for (const { title, result } of report.sections) console.log(sectionText(title, result))
  const verdicts = report.sections.flatMap(({ result }) => result.verdicts)
  const missed = verdicts.filter(({ met }) => !met)
  if (verdicts.length > 0) {
    console.log(`${verdicts.length - missed.length} of ${verdicts.length} targets are met.`)
    for (const verdict of missed) console.log(verdictLine(verdict))
  }
  for (const { name, error } of report.failed) console.log(`${name} could not be measured: ${error.split('\n')[0]}`)
  const file = await writeResults(report, options.out)
  console.log(`\nAll runs and the plots: ${file}`)
  const isWhole = options.only.length === 0 && !options.quick
  if (isWhole || options.write) {
    if (fault === null) console.log(`Refreshed: ${await publish(report.sections, names)}`)
    else console.log(`docs/benchmarks.md is left as it is: ${fault}.`)
  }
  const isFailed = report.failed.length > 0 || (options.strict && missed.length > 0)
  return isFailed ? exitCodes.failed : exitCodes.done
}

interface Interruption {
  /** Never resolves; rejects once. */
  readonly happened: Promise<never>
  interrupt(why: string, exitCode?: number): void
  /** Runs `act` at a second signal, to skip the graceful stop. Returns a function that cancels it. */
  onSecond(act: () => void): () => void
  stopWatching(): void
}

/** npm passes a terminal's Ctrl-C on, so that it comes twice within milliseconds: that is one, not impatience. */
const sameSignalWithinMs = 500
const signals = ['SIGINT', 'SIGTERM', 'SIGHUP'] as const

function watchSignals(): Interruption {
  let interrupt: Interruption['interrupt'] = () => undefined
  const happened = new Promise<never>((_, reject) => {
    interrupt = (why, exitCode) => reject(new Interrupted(why, exitCode))
  })
  // Each section handles the rejection itself; between two sections nothing does.
  happened.catch(() => undefined)
  const impatient = new Set<() => void>()
  let firstAt: number | undefined
  const onSignal = (signal: NodeJS.Signals): void => {
    if (firstAt === undefined) {
      firstAt = performance.now()
      console.error(`\n${signal}: stopping what was started; again to stop it at once`)
      interrupt('Interrupted: nothing was published.', exitCodes.interrupted)
    } else if (performance.now() - firstAt > sameSignalWithinMs) for (const act of impatient) act()
  }
  const onFault = (fault: unknown): void => {
    console.error(fault)
    interrupt('An error that no section caught ended the run.')
  }
  for (const signal of signals) process.on(signal, onSignal)
  process.on('uncaughtException', onFault)
  return {
    happened,
    interrupt,
    onSecond(act) {
      impatient.add(act)
      return () => impatient.delete(act)
    },
    stopWatching() {
      for (const signal of signals) process.off(signal, onSignal)
      process.off('uncaughtException', onFault)
    },
  }
}
