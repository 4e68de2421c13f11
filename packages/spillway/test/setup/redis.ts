/**
 * A Redis server of a test's own, to be killed and restarted at will. The program, in this order: the one that
 * SPILLWAY_TEST_REDIS_SERVER names; one on PATH or where Debian puts it; Debian's packages, unpacked into a cache folder.
 */
import { type ChildProcess, execFile, spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync, rmSync } from 'node:fs'
import { mkdir, mkdtemp, readdir, rename, rm } from 'node:fs/promises'
import { connect } from 'node:net'
import { tmpdir } from 'node:os'
import { delimiter, dirname, join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { freePort } from './nats.js'

const run = promisify(execFile)

const programName = 'redis-server'
const debianFolder = '/usr/bin'
/** The program itself is in redis-tools; the rest are its libraries. */
const debianPackages = [
  'redis-server',
  'redis-tools',
  'liblzf1',
  'libjemalloc2',
  'liblua5.1-0',
  'lua-bitop',
  'lua-cjson',
  'libatomic1',
]
const cacheFolder = fileURLToPath(new URL('../../../../node_modules/.cache/spillway-redis', import.meta.url))
const startTimeoutMs = 15_000
const pollMs = 20

interface Program {
  path: string
  /** Beside PATH. */
  env: Record<string, string>
}

export interface RedisOptions {
  /** As in redis.conf, e.g. `{ appendonly: 'yes' }`. Default: nothing is kept over a restart. */
  settings?: Readonly<Record<string, string>>
}

export interface RedisServer {
  url: string
  port: number
  dataDir: string
  /** With SIGKILL, as a power switch would. */
  kill(): Promise<void>
  /** On the same port and folder; one that still runs is killed first. */
  restart(): Promise<void>
  /** It runs but does not answer, until it goes on. */
  hang(): void
  goOn(): void
  stop(): Promise<void>
}

/** The program, or why there is none. Where the tests must not be skipped (CI), there being none is a failure. */
export async function findRedis(): Promise<{ program: Program } | { missing: string }> {
  const given = process.env.SPILLWAY_TEST_REDIS_SERVER
  if (given) return { program: { path: given, env: {} } }
  const folders = [...(process.env.PATH ?? '').split(delimiter), debianFolder].filter((folder) => folder !== '')
  const installed = folders.map((folder) => join(folder, programName)).find((path) => existsSync(path))
  if (installed !== undefined) return { program: { path: installed, env: {} } }
  try {
    return { program: await unpackDebian() }
  } catch (error) {
    const missing = `no ${programName}: none is installed, and Debian's could not be had (${String(error)})`
    if (process.env.CI) throw new Error(missing, { cause: error })
    console.warn(missing)
    return { missing }
  }
}

/** Several test workers may come here at once: each unpacks for itself, the first to finish gives it its name. */
async function unpackDebian(): Promise<Program> {
  const path = join(cacheFolder, 'usr', 'bin', programName)
  if (!existsSync(path)) {
    await mkdir(dirname(cacheFolder), { recursive: true })
    const fresh = await mkdtemp(`${cacheFolder}-`)
    try {
      await run('apt-get', ['download', ...debianPackages], { cwd: fresh })
      const archives = (await readdir(fresh)).filter((name) => name.endsWith('.deb'))
      for (const archive of archives) await run('dpkg', ['-x', archive, '.'], { cwd: fresh })
      await Promise.all(archives.map((archive) => rm(join(fresh, archive))))
      await rename(fresh, cacheFolder).catch((error: unknown) => {
        if (!existsSync(path)) throw error
      })
    } finally {
      await rm(fresh, { recursive: true, force: true })
    }
  }
  return { path, env: { LD_LIBRARY_PATH: (await libraryFolders()).join(delimiter) } }
}

/** Debian keeps libraries in a folder that is named after the machine: usr/lib/x86_64-linux-gnu. */
async function libraryFolders(): Promise<string[]> {
  const base = join(cacheFolder, 'usr', 'lib')
  const names = await readdir(base)
  return [base, ...names.filter((name) => name.includes('-linux-')).map((name) => join(base, name))]
}

export async function startRedis(options: RedisOptions = {}): Promise<RedisServer> {
  const found = await findRedis()
  if ('missing' in found) throw new Error(found.missing)
  const dataDir = await mkdtemp(join(tmpdir(), 'spillway-redis-'))
  const port = await freePort()
  const settings = {
    port: String(port),
    bind: '127.0.0.1',
    dir: dataDir,
    save: '',
    daemonize: 'no',
    loglevel: 'warning',
    ...options.settings,
  }
  let running = await launch(found.program, settings, port)
  const kill = async (): Promise<void> => {
    running.child.kill('SIGKILL')
    await running.ended
  }
  const cutShort = (): void => {
    running.child.kill('SIGKILL')
    rmSync(dataDir, { recursive: true, force: true })
  }
  process.once('exit', cutShort)
  return {
    url: `redis://127.0.0.1:${port}`,
    port,
    dataDir,
    kill,
    restart: async () => {
      await kill()
      running = await launch(found.program, settings, port)
    },
    hang: () => void running.child.kill('SIGSTOP'),
    goOn: () => void running.child.kill('SIGCONT'),
    stop: async () => {
      process.off('exit', cutShort)
      await kill()
      await rm(dataDir, { recursive: true, force: true, maxRetries: 10, retryDelay: 100 })
    },
  }
}

interface Running {
  child: ChildProcess
  ended: Promise<unknown>
}

async function launch(program: Program, settings: Record<string, string>, port: number): Promise<Running> {
  const args = Object.entries(settings).flatMap(([name, value]) => [`--${name}`, value])
  const env = { PATH: process.env.PATH ?? '', ...program.env }
  const child = spawn(program.path, args, { env, stdio: ['ignore', 'pipe', 'pipe'] })
  let output = ''
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', (chunk: Buffer) => {
      output = (output + chunk.toString()).slice(-4_000)
    })
  }
  const ended = once(child, 'exit')
  await once(child, 'spawn')
  for (const until = Date.now() + startTimeoutMs; ; ) {
    if (await answers(port)) return { child, ended }
    if (child.exitCode !== null || Date.now() > until) {
      child.kill('SIGKILL')
      throw new Error(`${programName} does not start: ${output}`)
    }
    await delay(pollMs)
  }
}

/** It listens before it has read what it kept; until then, and where a password is wanted, it answers with an error. */
async function answers(port: number): Promise<boolean> {
  const socket = connect(port, '127.0.0.1')
  try {
    socket.write('PING\r\n')
    const [said] = (await once(socket, 'data')) as [Buffer]
    return /^(\+PONG|-NOAUTH)/.test(said.toString())
  } catch {
    return false
  } finally {
    socket.destroy()
  }
}
