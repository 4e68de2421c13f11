import { spawn } from 'node:child_process'
import { closeSync, openSync } from 'node:fs'
import { createServer } from 'node:net'
import { setTimeout as delay } from 'node:timers/promises'
import pg from 'pg'
import type { Runtime } from './binaries.js'
import { CLUSTER_NAME } from './cluster.js'
import { EmbeddedError } from './error.js'
import { isAlive, waitForExit } from './processes.js'
import { type Placement, programEnvironment, runProgram, spawnFailure } from './programs.js'
import { isTransient } from './readiness.js'
import type { ServerLog } from './server-log.js'
import { type ServerSettings, toArguments } from './settings.js'

/** A server process, our child or adopted. `exited` resolves when it is gone, for any reason. */
export interface Server {
  pid: number
  port: number
  exited: Promise<void>
}

/** Crash recovery replays at most max_wal_size, which takes seconds, or longer on a slow disk. */
const READY_TIMEOUT_MS = 120_000
const PROBE_INTERVAL_MS = 50
const PROBE_TIMEOUT_MS = 2_000
const FAST_STOP_MS = 60_000
const IMMEDIATE_STOP_MS = 10_000
const ADOPTED_POLL_MS = 1_000

export function connectionUrl(port: number, password: string, database = CLUSTER_NAME): string {
  return `postgres://${CLUSTER_NAME}:${encodeURIComponent(password)}@127.0.0.1:${port}/${database}`
}

/**
 * In its own session: Ctrl-C in a terminal goes to the whole foreground process group, and the server must outlive the
 * draining of the process that stores in it.
 */
export async function spawnServer(options: {
  runtime: Runtime
  placement: Placement
  settings: ServerSettings
  port: number
  log: ServerLog
}): Promise<Server> {
  const { runtime, placement, port } = options
  const output = openSync(options.log.file, 'a')
  try {
    const child = spawn(runtime.postgres, ['-D', placement.dataArgument, ...toArguments(options.settings)], {
      cwd: placement.cwd,
      env: programEnvironment(),
      stdio: ['ignore', output, output],
      detached: true,
      windowsHide: true,
      ...placement.account,
    })
    const exited = new Promise<void>((resolve) => child.once('exit', () => resolve()))
    await new Promise<void>((resolve, reject) => {
      child.once('spawn', resolve)
      child.once('error', (error) => reject(spawnFailure(runtime.postgres, error)))
    })
    // No process waits for the server at its exit. If nobody stops it, the next start adopts it.
    child.unref()
    if (child.pid === undefined) throw new EmbeddedError('start_failed', 'the PostgreSQL server has no pid')
    return { pid: child.pid, port, exited }
  } finally {
    closeSync(output)
  }
}

/** A server that another process started. Its end is not signalled to us, so we poll. */
export function watchServer(pid: number, port: number): Server {
  const exited = new Promise<void>((resolve) => {
    const timer = setInterval(() => {
      if (isAlive(pid)) return
      clearInterval(timer)
      resolve()
    }, ADOPTED_POLL_MS)
    timer.unref()
  })
  return { pid, port, exited }
}

/** A port that listens may still answer 57P03 (starting up), so only an answered query counts. */
export async function waitUntilReady(
  server: Server,
  password: string,
  timeoutMs = READY_TIMEOUT_MS,
): Promise<'ready' | 'exited' | 'timeout'> {
  const deadline = performance.now() + timeoutMs
  while (isAlive(server.pid)) {
    if (await probe(connectionUrl(server.port, password, 'postgres'))) return 'ready'
    if (performance.now() >= deadline) return 'timeout'
    await delay(PROBE_INTERVAL_MS)
  }
  return 'exited'
}

/** False: not yet. Throws errors that waiting does not fix. */
async function probe(url: string): Promise<boolean> {
  try {
    await withClient(url, (client) => client.query('SELECT 1'))
    return true
  } catch (error) {
    if (isTransient(error)) return false
    throw error
  }
}

export async function ensureDatabase(port: number, password: string): Promise<void> {
  try {
    await withClient(connectionUrl(port, password, 'postgres'), async (client) => {
      const { rowCount } = await client.query('SELECT 1 FROM pg_database WHERE datname = $1', [CLUSTER_NAME])
      if (!rowCount) await client.query(`CREATE DATABASE ${CLUSTER_NAME}`)
    })
  } catch (error) {
    throw new EmbeddedError('start_failed', 'the embedded database cannot be created', { cause: error })
  }
}

async function withClient<T>(url: string, use: (client: pg.Client) => Promise<T>): Promise<T> {
  const client = new pg.Client({
    connectionString: url,
    connectionTimeoutMillis: PROBE_TIMEOUT_MS,
    query_timeout: PROBE_TIMEOUT_MS * 5,
  })
  // The next query notices a connection that breaks between two queries.
  client.on('error', () => undefined)
  try {
    await client.connect()
    return await use(client)
  } finally {
    await client.end()
  }
}

/** Fast shutdown: ends sessions and writes a checkpoint. The harder way, if needed, loses nothing but time. */
export async function stopServer(server: { pid: number }, runtime: Runtime, placement: Placement): Promise<void> {
  if (process.platform === 'win32') {
    if (!isAlive(server.pid)) return
    return runProgram(runtime.pgCtl, placement, ['stop', '-D', placement.dataArgument, '-m', 'fast', '-w'])
  }
  if (await signalAndWait(server.pid, 'SIGINT', FAST_STOP_MS)) return
  if (await signalAndWait(server.pid, 'SIGQUIT', IMMEDIATE_STOP_MS)) return
  throw new EmbeddedError('stop_failed', `the PostgreSQL server with pid ${server.pid} does not stop`)
}

async function signalAndWait(pid: number, signal: NodeJS.Signals, timeoutMs: number): Promise<boolean> {
  if (!isAlive(pid)) return true
  process.kill(pid, signal)
  return waitForExit(pid, timeoutMs)
}

/** PostgreSQL refuses port 0, so the system is asked for a free one. If another process takes it first, the start is retried. */
export function freePort(): Promise<number> {
  return new Promise((resolve, reject) => {
    const server = createServer()
    server.once('error', reject)
    server.listen(0, '127.0.0.1', () => {
      const address = server.address()
      server.close(() => {
        if (address && typeof address === 'object') resolve(address.port)
        else reject(new EmbeddedError('start_failed', 'the system gave no free port'))
      })
    })
  })
}
