/**
 * An nginx of a test's own with deploy/nginx.conf, its ports filled in. The program, in this order: the one that
 * SPILLWAY_TEST_NGINX names; one on PATH or where Debian puts it; Debian's package, unpacked into a cache folder.
 */
import { type ChildProcess, execFile, spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync, readFileSync, rmSync } from 'node:fs'
import { mkdir, mkdtemp, open, readdir, readFile, rename, rm, writeFile } from 'node:fs/promises'
import { connect } from 'node:net'
import { tmpdir } from 'node:os'
import { delimiter, dirname, join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { freePort } from './nats.js'

const run = promisify(execFile)

const programName = 'nginx'
const debianFolder = '/usr/sbin'
const cacheFolder = fileURLToPath(new URL('../../../../node_modules/.cache/spillway-nginx', import.meta.url))
const configFile = fileURLToPath(new URL('../../../../deploy/nginx.conf', import.meta.url))
const startTimeoutMs = 15_000
const pollMs = 20
/** Enough to see that they share what they must. */
const workers = 2

export interface NginxOptions {
  /** The gateways: origins, or host and port. */
  servers: readonly string[]
  /** Texts of deploy/nginx.conf and what stands there instead; each of them has to be found. */
  replace?: Readonly<Record<string, string>>
}

export interface Nginx {
  origin: string
  port: number
  /** The lines of its access log so far. */
  accesses(): Promise<Record<string, unknown>[]>
  /** What it wrote to its error log, from the level notice on. */
  errors(): string
  /** Resolves when new workers have taken over; the old ones end what they have. */
  reload(): Promise<void>
  stop(): Promise<void>
}

/** The program, or why there is none. Where the tests must not be skipped (CI), there being none is a failure. */
export async function findNginx(): Promise<{ program: string } | { missing: string }> {
  const given = process.env.SPILLWAY_TEST_NGINX
  if (given) return { program: given }
  const folders = [...(process.env.PATH ?? '').split(delimiter), debianFolder].filter((folder) => folder !== '')
  const installed = folders.map((folder) => join(folder, programName)).find((path) => existsSync(path))
  if (installed !== undefined) return { program: installed }
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
async function unpackDebian(): Promise<string> {
  const program = join(cacheFolder, 'usr', 'sbin', programName)
  if (existsSync(program)) return program
  await mkdir(dirname(cacheFolder), { recursive: true })
  const fresh = await mkdtemp(`${cacheFolder}-`)
  try {
    await run('apt-get', ['download', programName], { cwd: fresh })
    for (const file of await readdir(fresh)) await run('dpkg', ['-x', file, '.'], { cwd: fresh })
    // Its libraries are the system's; where one is missing, this says which.
    await run(join(fresh, 'usr', 'sbin', programName), ['-v'])
    await rename(fresh, cacheFolder).catch((error: unknown) => {
      if (!existsSync(program)) throw error
    })
  } finally {
    await rm(fresh, { recursive: true, force: true })
  }
  return program
}

/** The configuration as it is shipped. */
export const shippedConfig = (): string => readFileSync(configFile, 'utf8')

/** What nginx says of a configuration. The folder is for what it makes while it looks. */
export async function checkNginxConfig(program: string, config: string): Promise<{ ok: boolean; output: string }> {
  const folder = await mkdtemp(join(tmpdir(), 'spillway-nginx-'))
  const stdout = await open(join(folder, 'stdout'), 'w')
  try {
    const file = join(folder, 'nginx.conf')
    await writeFile(file, config)
    // It opens /dev/stdout, too, which a socket does not let it.
    const child = spawn(program, ['-t', ...argumentsFor(folder, file)], { stdio: ['ignore', stdout.fd, 'pipe'] })
    let output = ''
    child.stderr?.on('data', (chunk: Buffer) => {
      output += chunk.toString()
    })
    const [code] = await once(child, 'close')
    return { ok: code === 0, output }
  } finally {
    await stdout.close()
    await rm(folder, { recursive: true, force: true })
  }
}

function argumentsFor(folder: string, file: string): string[] {
  // Workers of root would run as nobody, who may not enter a temporary folder of root's.
  const user = process.getuid?.() === 0 ? ' user root;' : ''
  return ['-p', `${folder}/`, '-c', file, '-e', 'stderr', '-g', `daemon off;${user}`]
}

function replaced(text: string, changes: Readonly<Record<string, string>>): string {
  return Object.entries(changes).reduce((done, [from, to]) => {
    if (!done.includes(from)) throw new Error(`deploy/nginx.conf has no "${from}"`)
    return done.replaceAll(from, () => to)
  }, text)
}

function filledIn(options: NginxOptions, port: number): string {
  const text = replaced(shippedConfig(), {
    'listen 8080 ': `listen 127.0.0.1:${port} `,
    'worker_processes auto;': `worker_processes ${workers};`,
    // It cannot open a socket, which is what a test process has for its output.
    'access_log /dev/stdout': 'access_log access.log',
    'error_log stderr warn': 'error_log stderr notice',
    ...options.replace,
  })
  const placeholders = /(?:^ *server 127\.0\.0\.1:\d+[^;]*;\n)+/m
  const settings = /server 127\.0\.0\.1:\d+([^;]*;)/.exec(text)?.[1]
  if (settings === undefined) throw new Error('deploy/nginx.conf has no servers')
  const lines = options.servers.map((server) => `server ${server.replace(/^http:\/\//, '')}${settings}\n`)
  return text.replace(placeholders, () => lines.join(''))
}

export async function startNginx(options: NginxOptions): Promise<Nginx> {
  const found = await findNginx()
  if ('missing' in found) throw new Error(found.missing)
  const folder = await mkdtemp(join(tmpdir(), 'spillway-nginx-'))
  const file = join(folder, 'nginx.conf')
  const port = await freePort()
  await writeFile(file, filledIn(options, port))
  // A group of its own: killed alone, the master would leave its workers behind.
  const child = spawn(found.program, argumentsFor(folder, file), {
    stdio: ['ignore', 'ignore', 'pipe'],
    detached: true,
  })
  let errors = ''
  child.stderr?.on('data', (chunk: Buffer) => {
    errors += chunk.toString()
  })
  const ended = once(child, 'exit')
  const cutShort = (): void => {
    killGroup(child)
    rmSync(folder, { recursive: true, force: true })
  }
  process.once('exit', cutShort)
  const stop = async (): Promise<void> => {
    process.off('exit', cutShort)
    killGroup(child)
    await ended
    await rm(folder, { recursive: true, force: true, maxRetries: 10, retryDelay: 100 })
  }
  const until = async (holds: () => boolean | Promise<boolean>, what: string): Promise<void> => {
    for (const end = Date.now() + startTimeoutMs; !(await holds()); await delay(pollMs)) {
      if (child.exitCode !== null || Date.now() > end) throw new Error(`${programName} does not ${what}: ${errors}`)
    }
  }
  try {
    await once(child, 'spawn')
    await until(() => accepts(port), 'start')
  } catch (error) {
    await stop()
    throw error
  }
  return {
    origin: `http://127.0.0.1:${port}`,
    port,
    accesses: async () => {
      const text = await readFile(join(folder, 'access.log'), 'utf8')
      return text.split('\n').flatMap((line) => (line === '' ? [] : [JSON.parse(line) as Record<string, unknown>]))
    },
    errors: () => errors,
    reload: async () => {
      const leaving = (): number => errors.split('gracefully shutting down').length - 1
      const before = leaving()
      child.kill('SIGHUP')
      await until(() => leaving() >= before + workers, 'reload')
    },
    stop,
  }
}

function killGroup(child: ChildProcess): void {
  if (child.pid === undefined || child.exitCode !== null || child.signalCode !== null) return
  process.kill(-child.pid, 'SIGKILL')
}

async function accepts(port: number): Promise<boolean> {
  const socket = connect(port, '127.0.0.1')
  try {
    await once(socket, 'connect')
    return true
  } catch {
    return false
  } finally {
    socket.destroy()
  }
}
