/**
 * Runs a real PostgreSQL server in the data folder.
 *
 * States: locked → (cluster made) → adopted | launched → running → stopping → stopped. Running falls back to launched when
 * the server dies unasked: it is started again on the same port, so that pools reconnect.
 *
 * The data folder has: `postgres/` the cluster, `postgres.log`, `postgres.password` (0600), `owner-<n>` the lock and, if the
 * package cannot run in place, `runtime/`.
 */
import { existsSync } from 'node:fs'
import { mkdir, readFile, realpath, statfs } from 'node:fs/promises'
import { totalmem } from 'node:os'
import { join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { type Account, handOverTree, hasLinks, serverAccounts } from './account.js'
import { prepareRuntime, type Runtime } from './binaries.js'
import { clusterVersion, createCluster, placeCluster, readPassword } from './cluster.js'
import { EmbeddedError } from './error.js'
import { lockFolder } from './folder-lock.js'
import { disownPid, readPostmasterFile } from './postmaster-file.js'
import { isAlive, isPostmasterOf } from './processes.js'
import type { Placement } from './programs.js'
import {
  connectionUrl,
  ensureDatabase,
  freePort,
  type Server,
  spawnServer,
  stopServer,
  waitUntilReady,
  watchServer,
} from './server.js'
import { openServerLog, type ServerLog } from './server-log.js'
import { type ServerSettings, serverSettings } from './settings.js'

/** The logger that this package needs; a pino logger fits. */
export interface EmbeddedLog {
  info(fields: object, message: string): void
  warn(fields: object, message: string): void
  error(fields: object, message: string): void
}

export interface EmbeddedOptions {
  /** Made if missing. Held by one process at a time. */
  dataDir: string
  /** Default: no log. */
  log?: EmbeddedLog
  /** Further server settings; those that durability depends on cannot be changed. */
  settings?: ServerSettings
}

export interface EmbeddedServer {
  readonly url: string
  /** Whether the server was found running, left by a process that was killed. */
  readonly adopted: boolean
  /** The server's process id; it changes when the server dies and is restarted. */
  readonly pid: number
  /** Fast shutdown, awaited; then the folder is free. A second call waits for the first. */
  stop(): Promise<void>
}

interface Site {
  clusterDir: string
  runtime: Runtime
  placement: Placement
  password: string
  serverLog: ServerLog
  log: EmbeddedLog
  settings: ServerSettings | undefined
}

/** Another process may take the port between asking and binding; more failures than this have another reason. */
const LAUNCH_ATTEMPTS_MAX = 4
/** Backends of a killed postmaster end within seconds; until then PostgreSQL refuses with F0001 (lock_file_exists). */
const ORPHANS_WAIT_MS = 30_000
const ADOPT_TIMEOUT_MS = 30_000
const RELAUNCH_DELAY_MAX_MS = 5_000

const silent: EmbeddedLog = { info: () => undefined, warn: () => undefined, error: () => undefined }

export async function startEmbedded(options: EmbeddedOptions): Promise<EmbeddedServer> {
  const log = options.log ?? silent
  const dataDir = await makeDataDir(options.dataDir)
  const lock = await lockFolder(dataDir)
  try {
    const site = await prepareSite(dataDir, log, options.settings)
    const adopted = await adoptLeftover(site)
    const server = adopted ?? (await launch(site))
    try {
      await ensureDatabase(server.port, site.password)
    } catch (error) {
      await stopServer(server, site.runtime, site.placement)
      throw error
    }
    log.info(
      { pid: server.pid, port: server.port, dataDir, adopted: adopted !== undefined },
      'embedded PostgreSQL is ready',
    )
    return supervise(site, server, adopted !== undefined, lock.release)
  } catch (error) {
    await lock.release()
    throw error
  }
}

async function makeDataDir(dataDir: string): Promise<string> {
  // As root, the server's account must be able to enter it, except on Linux, where placeCluster finds another way. Secret
  // files inside have their own modes.
  const mode = process.geteuid?.() === 0 && process.platform !== 'linux' ? 0o711 : 0o700
  try {
    await mkdir(dataDir, { recursive: true, mode })
    return await realpath(dataDir)
  } catch (error) {
    throw new EmbeddedError('data_dir_denied', `cannot make the data folder ${dataDir}`, { cause: error })
  }
}

async function prepareSite(dataDir: string, log: EmbeddedLog, settings: ServerSettings | undefined): Promise<Site> {
  const clusterDir = join(dataDir, 'postgres')
  const account = await settleAccount(clusterDir, log)
  const runtime = await prepareRuntime({ dataDir, account })
  if (!existsSync(clusterDir)) {
    log.info({ dataDir }, 'making the embedded PostgreSQL cluster')
    await createCluster({ dataDir, clusterDir, runtime, account })
  }
  const version = await clusterVersion(clusterDir)
  if (version === undefined) {
    throw new EmbeddedError('data_dir_damaged', `${clusterDir} is not a PostgreSQL cluster: PG_VERSION is missing`)
  }
  if (version !== runtime.major) {
    throw new EmbeddedError(
      'data_dir_version',
      `the data in ${clusterDir} was made by PostgreSQL ${version}, the embedded server is ${runtime.major}; dump and restore it, or set SPILLWAY_DATA_DIR to a new folder`,
    )
  }
  return {
    clusterDir,
    runtime,
    placement: await placeCluster(clusterDir, account),
    password: await readPassword(dataDir),
    serverLog: await openServerLog(join(dataDir, 'postgres.log')),
    log,
    settings,
  }
}

/** A cluster that belongs to a shared account gets its own account, unless a server runs on it. */
async function settleAccount(clusterDir: string, log: EmbeddedLog): Promise<Account | undefined> {
  const { account, from } = await serverAccounts(clusterDir)
  if (account === undefined || from === undefined) return account
  const file = await readPostmasterFile(clusterDir)
  if (from.uid !== 0 && file && isPostmasterOf(file.pid, clusterDir)) return from
  if (from.uid !== 0 && (await hasLinks(clusterDir))) {
    log.warn(
      { clusterDir, uid: from.uid },
      `the embedded PostgreSQL runs as nobody, which others on this machine may share: its folder has links, so change the owner of it and of what they lead to by hand, to uid ${account.uid}`,
    )
    return from
  }
  await handOverTree(clusterDir, from, account)
  log.info({ clusterDir, from: from.uid, to: account.uid }, 'the embedded PostgreSQL got an account of its own')
  return account
}

/** Takes over a server that a killed process left behind; stops it if it does not answer or runs from other binaries. */
async function adoptLeftover(site: Site): Promise<Server | undefined> {
  const file = await readPostmasterFile(site.clusterDir)
  if (!file) return undefined
  if (!isPostmasterOf(file.pid, site.clusterDir)) {
    // PostgreSQL itself handles a dead pid.
    if (isAlive(file.pid)) await disownPid(site.clusterDir)
    return undefined
  }
  const current = await runsFrom(site)
  if (file.port !== undefined && current) {
    const server = watchServer(file.pid, file.port)
    const outcome = await waitUntilReady(server, site.password, ADOPT_TIMEOUT_MS).catch((error: unknown) => {
      site.log.warn({ err: error, pid: file.pid }, 'a leftover PostgreSQL server refuses the connection')
      return 'timeout' as const
    })
    if (outcome === 'ready') return server
    if (outcome === 'exited') return undefined
  }
  site.log.warn({ pid: file.pid }, 'stopping a leftover PostgreSQL server that cannot be taken over')
  await stopServer(file, site.runtime, site.placement)
  return undefined
}

/** The first word of postmaster.opts is the program: a server from before an upgrade is not kept. */
async function runsFrom({ clusterDir, runtime }: Site): Promise<boolean> {
  const file = join(clusterDir, 'postmaster.opts')
  return existsSync(file) && (await readFile(file, 'utf8')).startsWith(runtime.postgres)
}

async function launch(site: Site, fixedPort?: number): Promise<Server> {
  const orphansDeadline = performance.now() + ORPHANS_WAIT_MS
  let last = ''
  for (let attempt = 0; attempt < LAUNCH_ATTEMPTS_MAX; ) {
    const port = fixedPort ?? (await freePort())
    const mark = site.serverLog.size()
    const { bavail, bsize } = await statfs(site.clusterDir)
    const server = await spawnServer({
      ...site,
      port,
      log: site.serverLog,
      settings: serverSettings({
        port,
        freeBytes: bavail * bsize,
        totalMemoryBytes: totalmem(),
        ...(site.settings && { overrides: site.settings }),
      }),
    })
    const outcome = await readyOrStop(site, server)
    if (outcome === 'ready') return server
    last = site.serverLog.since(mark)
    if (outcome === 'timeout') break
    if (/ F0001 /.test(last) && performance.now() < orphansDeadline) await delay(250)
    else attempt++
  }
  throw new EmbeddedError('start_failed', `the embedded PostgreSQL did not start; its log ends with: ${last}`)
}

async function readyOrStop(site: Site, server: Server): Promise<'ready' | 'exited' | 'timeout'> {
  try {
    const outcome = await waitUntilReady(server, site.password)
    if (outcome === 'timeout') await stopServer(server, site.runtime, site.placement)
    return outcome
  } catch (error) {
    await stopServer(server, site.runtime, site.placement)
    throw new EmbeddedError('start_failed', 'the embedded PostgreSQL refuses its own password', { cause: error })
  }
}

function supervise(site: Site, first: Server, adopted: boolean, release: () => Promise<void>): EmbeddedServer {
  let server = first
  let stopping: Promise<void> | undefined
  let relaunching: Promise<void> | undefined
  const aborted = new AbortController()
  const logWatch = site.serverLog.watch((err) =>
    site.log.warn({ err }, 'the log of the embedded PostgreSQL cannot be kept bounded'),
  )

  const onExit = () => {
    if (stopping) return
    site.log.error({ pid: server.pid }, 'embedded PostgreSQL stopped unexpectedly; restarting it')
    relaunching = relaunch()
  }
  const relaunch = async () => {
    for (let waitMs = 100; !stopping; waitMs = Math.min(waitMs * 2, RELAUNCH_DELAY_MAX_MS)) {
      try {
        server = await launch(site, first.port)
        site.log.warn({ pid: server.pid }, 'embedded PostgreSQL is running again')
        void server.exited.then(onExit)
        return
      } catch (error) {
        site.log.error({ err: error }, 'cannot restart embedded PostgreSQL yet, retrying')
        await delay(waitMs, undefined, { signal: aborted.signal, ref: false }).catch(ignoreAbort)
      }
    }
  }
  void first.exited.then(onExit)

  const stop = async () => {
    aborted.abort()
    await relaunching
    await stopServer(server, site.runtime, site.placement)
    logWatch.close()
    await release()
  }
  return {
    url: connectionUrl(first.port, site.password),
    adopted,
    get pid() {
      return server.pid
    },
    stop: () => {
      stopping ??= stop()
      return stopping
    },
  }
}

function ignoreAbort(error: unknown): void {
  if (!(error instanceof Error) || error.name !== 'AbortError') throw error
}
