/**
 * A PgBouncer of a test's own in front of a PostgreSQL server, for all of its databases. The program, in this order: the one
 * that SPILLWAY_TEST_PGBOUNCER names; one on PATH or where Debian puts it; Debian's package, unpacked into a cache folder.
 */
import { execFile, spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync, rmSync } from 'node:fs'
import { chmod, mkdtemp, readdir, rename, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { delimiter, join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { promisify } from 'node:util'
import pg from 'pg'
import { freePort } from './nats.js'

const run = promisify(execFile)

/** The program's package, and the library that a small image lacks. */
const packages = ['pgbouncer', 'libc-ares2']
const debianFolder = '/usr/sbin'
const startTimeoutMs = 15_000
const pollMs = 20
/** It does not run as root. */
const nobody = { uid: 65_534, gid: 65_534 }

export type PoolMode = 'session' | 'transaction'

export interface PgBouncer {
  port: number
  /** The same database, user and password by way of this pooler. */
  through(url: string): string
  stop(): Promise<void>
}

export interface PgBouncerOptions {
  /** The server's address: any of its databases. Its user and password are used for all. */
  url: string
  mode: PoolMode
  /** Sessions per database. Default 20, as PgBouncer's own. */
  poolSize?: number
  /** Takes the session that was not used for longest, instead of the last used. Default false. */
  roundRobin?: boolean
}

export async function startPgBouncer(options: PgBouncerOptions): Promise<PgBouncer> {
  const { program, libraries } = await findProgram()
  const dir = await mkdtemp(join(tmpdir(), 'spillway-pgbouncer-'))
  await chmod(dir, 0o755)
  const file = join(dir, 'pgbouncer.ini')
  const port = await freePort()
  await writeFile(file, configOf(options, port))
  const child = spawn(program, [file], {
    env: { PATH: process.env.PATH, ...(libraries !== null && { LD_LIBRARY_PATH: libraries }) },
    stdio: ['ignore', 'ignore', 'pipe'],
    ...(process.geteuid?.() === 0 && nobody),
  })
  let output = ''
  child.stderr?.on('data', (chunk: Buffer) => {
    output = (output + chunk.toString()).slice(-4_000)
  })
  const ended = once(child, 'exit')
  const cutShort = (): void => {
    child.kill('SIGKILL')
    rmSync(dir, { recursive: true, force: true })
  }
  process.once('exit', cutShort)
  const stop = async (): Promise<void> => {
    process.off('exit', cutShort)
    child.kill('SIGKILL')
    await ended
    await rm(dir, { recursive: true, force: true })
  }
  const through = (url: string): string => {
    const there = new URL(url)
    there.hostname = '127.0.0.1'
    there.port = String(port)
    return there.href
  }
  try {
    await once(child, 'spawn')
    for (const end = Date.now() + startTimeoutMs; !(await answers(through(options.url))); await delay(pollMs)) {
      if (child.exitCode !== null || Date.now() > end) throw new Error(`PgBouncer does not start: ${output}`)
    }
  } catch (error) {
    await stop()
    throw error
  }
  return { port, through, stop }
}

/** Nothing that makes it easier: its defaults, but for the addresses and who may log in. */
function configOf({ url, mode, poolSize = 20, roundRobin = false }: PgBouncerOptions, port: number): string {
  const { hostname, port: serverPort, username, password } = new URL(url)
  return `[databases]
* = host=${hostname} port=${serverPort} user=${decodeURIComponent(username)} password='${decodeURIComponent(password)}'
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = ${port}
unix_socket_dir =
auth_type = any
pool_mode = ${mode}
default_pool_size = ${poolSize}
server_round_robin = ${roundRobin ? 1 : 0}
max_client_conn = 2000
`
}

async function answers(url: string): Promise<boolean> {
  const client = new pg.Client({ connectionString: url })
  try {
    await client.connect()
    await client.query('SELECT 1')
    return true
  } catch {
    return false
  } finally {
    await client.end()
  }
}

async function findProgram(): Promise<{ program: string; libraries: string | null }> {
  const given = process.env.SPILLWAY_TEST_PGBOUNCER
  if (given) return { program: given, libraries: null }
  const folders = [...(process.env.PATH ?? '').split(delimiter), debianFolder].filter((folder) => folder !== '')
  const installed = folders.map((folder) => join(folder, 'pgbouncer')).find((path) => existsSync(path))
  return installed === undefined ? unpackDebian() : { program: installed, libraries: null }
}

/** Several test workers may come here at once: each unpacks for itself, the first to finish gives it its name. */
async function unpackDebian(): Promise<{ program: string; libraries: string }> {
  const cache = join(tmpdir(), 'spillway-debian-pgbouncer')
  const triplet = process.arch === 'arm64' ? 'aarch64-linux-gnu' : 'x86_64-linux-gnu'
  const found = { program: join(cache, debianFolder, 'pgbouncer'), libraries: join(cache, 'usr', 'lib', triplet) }
  if (existsSync(found.program)) return found
  const fresh = await mkdtemp(`${cache}-`)
  try {
    await chmod(fresh, 0o755)
    await run('apt-get', ['download', ...packages], { cwd: fresh })
    for (const file of await readdir(fresh)) await run('dpkg', ['-x', file, '.'], { cwd: fresh })
    await rename(fresh, cache).catch((error: unknown) => {
      if (!existsSync(found.program)) throw error
    })
  } finally {
    await rm(fresh, { recursive: true, force: true })
  }
  return found
}
