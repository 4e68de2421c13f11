/**
 * A Redis that confirms a write only after it is on the disk (`appendfsync always`): what a durable queue on Redis has to
 * run on, if it is to be compared with one on PostgreSQL.
 *
 * Found in this order: `REDIS_URL`, a redis-server on PATH or in /usr/sbin, Debian's packages unpacked into a cache
 * folder (needs apt-get and dpkg, not root). Otherwise there is none, and the result gives the reason.
 */
import { execFile, spawn } from 'node:child_process'
import { once } from 'node:events'
import { constants } from 'node:fs'
import { access, mkdir, mkdtemp, readdir, rename, rm } from 'node:fs/promises'
import { createServer } from 'node:net'
import { homedir, tmpdir } from 'node:os'
import { delimiter, join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { promisify } from 'node:util'
import { Redis } from 'ioredis'

const run = promisify(execFile)

export interface BenchRedis {
  readonly url: string
  readonly version: string
  /** Ends what was started here; a server of `REDIS_URL` goes on. */
  stop(): Promise<void>
}

export interface NoRedis {
  readonly absent: string
}

interface Program {
  path: string
  env: Record<string, string>
}

const startMsMax = 10_000
const downloadMsMax = 120_000
/** redis-server itself is in redis-tools; the rest are its libraries. */
const packages = [
  'redis-server',
  'redis-tools',
  'liblzf1',
  'libjemalloc2',
  'liblua5.1-0',
  'lua-bitop',
  'lua-cjson',
  'libatomic1',
]

export async function startRedis(say: (text: string) => void): Promise<BenchRedis | NoRedis> {
  const given = process.env.REDIS_URL
  if (given !== undefined && given !== '') return useGiven(given)
  const program = (await findInstalled()) ?? (await fetchDebian(say))
  return 'absent' in program ? program : launch(program)
}

async function useGiven(url: string): Promise<BenchRedis | NoRedis> {
  const redis = await connect(url)
  if (redis === null) return { absent: 'the server of REDIS_URL does not answer' }
  const fsync = await setting(redis, 'appendfsync')
  const appends = await setting(redis, 'appendonly')
  const version = await versionOf(redis)
  redis.disconnect()
  if (appends !== 'yes' || fsync !== 'always') {
    return { absent: `the server of REDIS_URL has appendonly ${appends} and appendfsync ${fsync}, not yes and always` }
  }
  return { url, version, stop: async () => undefined }
}

async function findInstalled(): Promise<Program | null> {
  const folders = [...(process.env.PATH ?? '').split(delimiter), '/usr/sbin', '/usr/local/sbin']
  for (const folder of folders.filter((f) => f !== '')) {
    const path = join(folder, 'redis-server')
    if (await isExecutable(path)) return { path, env: {} }
  }
  return null
}

async function fetchDebian(say: (text: string) => void): Promise<Program | NoRedis> {
  const cache = join(process.env.XDG_CACHE_HOME ?? join(homedir(), '.cache'), 'spillway-bench')
  const folder = join(cache, 'redis')
  const path = join(folder, 'usr', 'bin', 'redis-server')
  if (!(await isExecutable(path))) {
    say('redis-server is not installed; unpacking Debian’s packages into a cache folder')
    try {
      await mkdir(cache, { recursive: true })
      const partial = await mkdtemp(join(cache, 'redis-'))
      try {
        await run('apt-get', ['download', '-q', ...packages], { cwd: partial, timeout: downloadMsMax })
        const archives = (await readdir(partial)).filter((name) => name.endsWith('.deb'))
        for (const archive of archives)
          await run('dpkg', ['-x', archive, '.'], { cwd: partial, timeout: downloadMsMax })
        await rm(folder, { recursive: true, force: true })
        await rename(partial, folder)
      } finally {
        await rm(partial, { recursive: true, force: true })
      }
    } catch (fault) {
      return { absent: `no redis-server on PATH, and Debian's packages could not be unpacked: ${firstLine(fault)}` }
    }
  }
  return { path, env: { LD_LIBRARY_PATH: (await libraryFolders(folder)).join(delimiter) } }
}

/** Debian keeps libraries in a folder named after the machine: usr/lib/x86_64-linux-gnu. */
async function libraryFolders(folder: string): Promise<string[]> {
  const found: string[] = []
  for (const base of [join(folder, 'usr', 'lib'), join(folder, 'lib')]) {
    const names = await readdir(base).catch(() => [])
    found.push(base, ...names.filter((name) => name.includes('-linux-')).map((name) => join(base, name)))
  }
  return found
}

async function launch(program: Program): Promise<BenchRedis | NoRedis> {
  const folder = await mkdtemp(join(tmpdir(), 'spillway-bench-redis-'))
  const port = await freePort()
  const settings = {
    port: String(port),
    bind: '127.0.0.1',
    dir: folder,
    appendonly: 'yes',
    appendfsync: 'always',
    // Snapshots would be written beside the log, for nothing.
    save: '',
    daemonize: 'no',
    loglevel: 'warning',
  }
  const child = spawn(
    program.path,
    Object.entries(settings).flatMap(([name, value]) => [`--${name}`, value]),
    {
      env: { PATH: process.env.PATH ?? '', ...program.env },
      stdio: ['ignore', 'pipe', 'pipe'],
    },
  )
  let written = ''
  for (const stream of [child.stdout, child.stderr]) {
    stream.setEncoding('utf8').on('data', (text: string) => {
      written = (written + text).slice(-2_000)
    })
  }
  let isOver = false
  const ended = Promise.race([once(child, 'close'), once(child, 'error')]).catch((fault: unknown) => {
    written += firstLine(fault)
  })
  void ended.then(() => {
    isOver = true
  })
  const kill = (): boolean => child.kill('SIGKILL')
  process.once('exit', kill)
  const stop = async (): Promise<void> => {
    process.off('exit', kill)
    if (!isOver) child.kill('SIGTERM')
    await ended
    await rm(folder, { recursive: true, force: true })
  }
  const url = `redis://127.0.0.1:${port}`
  const redis = await connect(url, () => isOver)
  if (redis === null) {
    await stop()
    return { absent: `redis-server did not start: ${written.trim().split('\n').at(-1) || 'it wrote nothing'}` }
  }
  const version = await versionOf(redis)
  redis.disconnect()
  return { url, version, stop }
}

/** Null when it does not answer in time, or `ended` says that it will not. */
async function connect(url: string, ended: () => boolean = () => false): Promise<Redis | null> {
  const until = performance.now() + startMsMax
  while (performance.now() < until && !ended()) {
    const redis = new Redis(url, { lazyConnect: true, retryStrategy: () => null })
    // `connect` rejects with the same error.
    redis.on('error', () => undefined)
    try {
      await redis.connect()
      return redis
    } catch {
      redis.disconnect()
      await delay(50)
    }
  }
  return null
}

async function setting(redis: Redis, name: string): Promise<string> {
  const answer = await redis.config('GET', name)
  return Array.isArray(answer) ? String(answer[1] ?? 'unknown') : 'unknown'
}

async function versionOf(redis: Redis): Promise<string> {
  return /redis_version:(\S+)/.exec(await redis.info('server'))?.[1] ?? 'unknown'
}

async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1')
  await once(server, 'listening')
  const address = server.address()
  server.close()
  await once(server, 'close')
  if (address === null || typeof address === 'string') throw new Error('no free port was found')
  return address.port
}

async function isExecutable(path: string): Promise<boolean> {
  try {
    await access(path, constants.X_OK)
    return true
  } catch {
    return false
  }
}

const firstLine = (fault: unknown): string =>
  (fault instanceof Error ? fault.message : String(fault)).split('\n')[0] ?? 'unknown'
