/** The processes of a run: real servers, apps on the library, and workers of both kinds. */
import { join } from 'node:path'
import type { Breakage } from './breakage.js'
import type { Cluster } from './cluster.js'
import { startFaultProxy } from './fault-proxy.js'
import { type AppSettings, appSettingsName } from './programs/app-settings.js'
import { compilePrograms } from './programs/compile.js'
import type { Life } from './records.js'
import { type Program, Slot } from './slot.js'
import type { Lane, Temper } from './workload.js'

export interface FleetOptions {
  seed: number
  servers: number
  workers: number
  lanes: readonly Lane[]
  temper: Temper
  leaseMs: number
  breakage: Breakage | null
  cluster: Cluster
  sinkOrigin: string
  logDir: string
  lives: Life[]
}

export const directWaitMs = 1_000
export const drainMs = 3_000
const concurrency = 32
const poolMax = 10

const root = join(import.meta.dirname, '..')
const serverProgram = join(root, 'packages/server/dist/cli/main.js')
const nowhere: ReadonlySet<string> = new Set()

export async function makeFleet(options: FleetOptions): Promise<Slot[]> {
  const appRoutes = new Set(['tx', 'outside', 'apply', 'gated', 'rated'])
  const needed = new Set(options.lanes.flatMap((lane) => [...lane.routes]))
  const serverRoutes = new Set(['forward', 'petition', 'push'])
  const wantsServer = [...needed].some((route) => serverRoutes.has(route))
  const wantsApp = [...needed].some((route) => appRoutes.has(route))
  const appProgram = wantsApp ? await compilePrograms() : ''
  const slots: Slot[] = []
  const add = async (name: string, routes: ReadonlySet<string>, programOf: (databaseUrl: string) => Program) => {
    const proxy = await startFaultProxy(options.cluster.address)
    const url = new URL(options.cluster.url)
    url.port = String(proxy.port)
    const program = programOf(url.href)
    slots.push(new Slot({ name, routes, program, proxy, logDir: options.logDir, lives: options.lives }))
  }
  for (let i = 1; i <= options.servers; i++) {
    if (wantsServer) await add(`server-${i}`, serverRoutes, (url) => server(options, url, 'serve'))
    if (wantsApp) await add(`app-${i}`, appRoutes, (url) => app(options, appProgram, url, true))
  }
  for (let i = 1; i <= options.workers; i++) {
    // In turn of both kinds, where both have something to do.
    const ofServer = wantsServer && (!wantsApp || i % 2 === 0)
    if (ofServer) await add(`server-worker-${i}`, nowhere, (url) => server(options, url, 'worker'))
    else await add(`app-worker-${i}`, nowhere, (url) => app(options, appProgram, url, false))
  }
  return slots
}

function server(options: FleetOptions, databaseUrl: string, role: 'serve' | 'worker'): Program {
  return {
    command: [process.execPath, serverProgram, role],
    channel: false,
    env: {
      DATABASE_URL: databaseUrl,
      ...(role === 'serve' && { SPILLWAY_PORT: '0' }),
      SPILLWAY_FORWARD_ALLOW: options.sinkOrigin,
      SPILLWAY_LEASE_SECONDS: String(options.leaseMs / 1_000),
      SPILLWAY_DIRECT_WAIT_MS: String(directWaitMs),
      SPILLWAY_DRAIN_SECONDS: String(drainMs / 1_000),
      SPILLWAY_RETRY_BASE_MS: '20',
      SPILLWAY_RETRY_MAX_MS: '300',
      SPILLWAY_CONCURRENCY: String(concurrency),
      SPILLWAY_POOL_MAX: String(poolMax),
      // A lane is one submitter, and nobody works through what is received.
      PETITION_RATE_LIMIT_PER_HOUR: '1000000',
      PETITION_QUEUE_THRESHOLD: '1000000',
    },
    readyPort: (written) => {
      if (role === 'worker') return written.includes('works on operations') ? 0 : null
      const port = /listens on http:\/\/[^:\s]+:(\d+)/.exec(written)?.[1]
      return port === undefined ? null : Number(port)
    },
  }
}

function app(options: FleetOptions, program: string, databaseUrl: string, listen: boolean): Program {
  const settings: AppSettings = {
    seed: options.seed,
    databaseUrl,
    sinkOrigin: options.sinkOrigin,
    lanes: options.lanes,
    temper: options.temper,
    leaseMs: options.leaseMs,
    directWaitMs,
    drainMs,
    concurrency,
    poolMax,
    listen,
    breakage: options.breakage,
  }
  return {
    command: [process.execPath, program],
    channel: true,
    env: { [appSettingsName]: JSON.stringify(settings) },
    readyPort: (written) => {
      const port = /^ready (\d+)$/m.exec(written)?.[1]
      return port === undefined ? null : Number(port)
    },
  }
}
