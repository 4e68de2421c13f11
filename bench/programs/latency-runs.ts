/** The section's side of the latency programs. */
import type { BenchContext } from '../section.js'
import type { LatencyReport, LatencyTask } from './latency-load.js'
import { type TablePoint, watchTables } from './latency-tables.js'

export interface LatencySetup {
  readonly name: string
  /** Of bench/programs: `latency-spillway.ts`. */
  readonly program: string
  readonly settings: Readonly<Record<string, unknown>>
  /** Through `spillway serve`; the program is given its origin. */
  readonly overHttp?: boolean
}

export interface LatencyRun {
  readonly report: LatencyReport
  /** Of the measured time; empty unless it was asked for. */
  readonly tables: readonly TablePoint[]
}

export type Load = Pick<LatencyTask, 'ratePerSecond' | 'seconds' | 'warmUpSeconds' | 'pointSeconds'>

const lanes = 200
const startMsMax = 60_000
const endMsMax = 60_000

export async function measureLatency(
  context: BenchContext,
  setup: LatencySetup,
  load: Load,
  watches = false,
): Promise<LatencyRun> {
  const database = 'latency'
  const databaseUrl = await context.postgres.createDatabase(database)
  const server = setup.overHttp === true ? await context.serve({ DATABASE_URL: databaseUrl }) : null
  const task: LatencyTask = { ...load, lanes, settings: setup.settings, url: server?.origin ?? databaseUrl }
  const child = context.start(`programs/${setup.program}`, {
    env: { LATENCY_TASK: JSON.stringify(task) },
    // On the same Node.js as the peers, which want a newer one than Spillway does.
    peer: true,
  })
  await child.line(/^measuring$/, startMsMax + load.warmUpSeconds * 1_000)
  const reported = child.line(/^latency (.+)$/, load.seconds * 1_000 + endMsMax)
  const tables = watches ? await watchTables(databaseUrl, reported) : []
  const [, text = ''] = await reported
  await child.stop()
  await server?.stop()
  await context.postgres.dropDatabase(database)
  // The last samples may be of the time after the last submission.
  return { report: JSON.parse(text) as LatencyReport, tables: tables.filter(({ second }) => second <= load.seconds) }
}
