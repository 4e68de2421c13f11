/** The command line of `npm run chaos`. */
import { parseArgs } from 'node:util'
import { type Breakage, breakages } from './breakage.js'

export interface Options {
  seed: number
  seconds: number
  kills: number
  servers: number
  workers: number
  lanes: number
  rate: number
  leaseMs: number
  keep: boolean
  breakage: Breakage | null
  /** The overloads of the router's intake instead. */
  routing: boolean
  /** Streams of generations instead: so many at once; null: not. */
  streams: number | null
  /** Hostile callers instead. */
  hostile: { quick: boolean } | null
  reportFile: string | null
}

const streamsUsual = 500
const streamsQuick = 60

export const usage = `npm run chaos -- [options]

  --seed N        repeats the plan of a run (default: a new one, printed)
  --seconds N     how long faults are played (default 60)
  --kills N       processes and PostgreSQL servers that are ended with SIGKILL meanwhile (default 60)
  --servers N     spillway servers, and as many apps on the library (default 2)
  --workers N     processes that only work, of both kinds in turn (default 2)
  --lanes N       lanes, of fifteen kinds in turn (default 50)
  --rate N        operations per second (default 200)
  --lease N       seconds until a silent process loses its lanes (default 3)
  --quick         a short run: 10 seconds, 8 kills, one server, app and worker, 24 lanes, 80/s
  --keep          keep the logs of a clean run, too
  --report FILE   where the JSON report goes (default: in the system's folder for temporary files)
  --break WHAT    breaks the queue on purpose (${breakages.join(', ')}); success is that it is caught
  --routing       the overloads of the router's intake in full size instead; with --report and --keep only
  --streams       streams of generations instead, ${streamsUsual} at once (${streamsQuick} with --quick); with --seed, --report and --keep only
  --hostile       hostile callers against one server instead; with --quick, --report and --keep only

Ends with 0 when nothing was found, 1 when something was, 2 when the run itself could not be done.`

export class UsageError extends Error {
  override readonly name = 'UsageError'
}

const quick = { seconds: 10, kills: 8, servers: 1, workers: 1, lanes: 24, rate: 80 }
const usual = { seconds: 60, kills: 60, servers: 2, workers: 2, lanes: 50, rate: 200 }
const bounds: Record<keyof typeof usual | 'lease' | 'seed', readonly [number, number]> = {
  seed: [0, 4_294_967_295],
  seconds: [1, 86_400],
  kills: [0, 100_000],
  servers: [1, 16],
  workers: [0, 16],
  lanes: [1, 10_000],
  rate: [1, 100_000],
  lease: [1, 3_600],
}

/** Null: help was asked for. */
export function parseOptions(args: readonly string[]): Options | null {
  const { values } = parse(args)
  if (values.help === true) return null
  if (values.routing === true) refuseBeside(values, 'routing', ['report', 'keep'])
  if (values.streams === true) refuseBeside(values, 'streams', ['report', 'keep', 'seed', 'quick'])
  if (values.hostile === true) refuseBeside(values, 'hostile', ['report', 'keep', 'quick'])
  const defaults = values.quick === true ? quick : usual
  const whole = (name: keyof typeof bounds, fallback: number): number => {
    const given = values[name]
    if (given === undefined) return fallback
    const [low, high] = bounds[name]
    const number = Number(given)
    if (!/^\d+$/.test(given) || number < low || number > high) {
      throw new UsageError(`--${name} wants a whole number from ${low} to ${high}, not ${JSON.stringify(given)}`)
    }
    return number
  }
  return {
    seed: whole('seed', Math.floor(Math.random() * 1_000_000)),
    seconds: whole('seconds', defaults.seconds),
    kills: whole('kills', defaults.kills),
    servers: whole('servers', defaults.servers),
    workers: whole('workers', defaults.workers),
    lanes: whole('lanes', defaults.lanes),
    rate: whole('rate', defaults.rate),
    leaseMs: whole('lease', 3) * 1_000,
    keep: values.keep === true,
    breakage: breakageOf(values.break),
    routing: values.routing === true,
    streams: values.streams !== true ? null : values.quick === true ? streamsQuick : streamsUsual,
    hostile: values.hostile === true ? { quick: values.quick === true } : null,
    reportFile: values.report ?? null,
  }
}

function parse(args: readonly string[]) {
  const text = { type: 'string' } as const
  const flag = { type: 'boolean' } as const
  try {
    return parseArgs({
      args: [...args],
      options: {
        ...{ seed: text, seconds: text, kills: text, servers: text, workers: text, lanes: text, rate: text },
        ...{
          lease: text,
          report: text,
          break: text,
          quick: flag,
          keep: flag,
          routing: flag,
          streams: flag,
          hostile: flag,
          help: { ...flag, short: 'h' },
        },
      },
    })
  } catch (fault) {
    throw new UsageError(fault instanceof Error ? fault.message : String(fault))
  }
}

/** They are always the same ones: what shapes the other run would do nothing. */
function refuseBeside(values: Record<string, unknown>, part: string, allowed: readonly string[]): void {
  const other = Object.keys(values).find((name) => name !== part && !allowed.includes(name))
  if (other !== undefined) throw new UsageError(`--${other} has no meaning beside --${part}`)
}

function breakageOf(given: string | undefined): Breakage | null {
  if (given === undefined) return null
  const found = breakages.find((breakage) => breakage === given)
  if (found === undefined) {
    throw new UsageError(`--break wants one of ${breakages.join(', ')}, not ${JSON.stringify(given)}`)
  }
  return found
}
