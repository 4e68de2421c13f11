/**
 * A NATS server with JetStream of a test's own, to be killed and restarted at will. The program, in this order: the one
 * that SPILLWAY_TEST_NATS_SERVER names; one on PATH or where Debian puts it; Debian's package, unpacked into a cache
 * folder.
 */
import { type ChildProcess, execFile, spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync, rmSync } from 'node:fs'
import { mkdir, mkdtemp, readdir, rename, rm, writeFile } from 'node:fs/promises'
import { connect, createServer } from 'node:net'
import { tmpdir } from 'node:os'
import { delimiter, dirname, join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

const run = promisify(execFile)

const programName = 'nats-server'
const debianFolder = '/usr/sbin'
const cacheFolder = fileURLToPath(new URL('../../../../node_modules/.cache/spillway-nats-server', import.meta.url))
const startTimeoutMs = 15_000
const pollMs = 20

export interface NatsOptions {
  /** Lines of the server's configuration, e.g. `max_payload: 8192`. */
  settings?: readonly string[]
  /** Default: with JetStream. */
  jetstream?: boolean
  /** Default: a free one. */
  port?: number
}

export interface NatsServer {
  url: string
  port: number
  dataDir: string
  /** With SIGKILL, as a power switch would. */
  kill(): Promise<void>
  /** On the same port and folder; one that still runs is killed first. */
  restart(): Promise<void>
  stop(): Promise<void>
}

/** The program, or why there is none. Where the tests must not be skipped (CI), there being none is a failure. */
export async function findNats(): Promise<{ program: string } | { missing: string }> {
  const given = process.env.SPILLWAY_TEST_NATS_SERVER
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
    await rename(fresh, cacheFolder).catch((error: unknown) => {
      if (!existsSync(program)) throw error
    })
  } finally {
    await rm(fresh, { recursive: true, force: true })
  }
  return program
}

export async function startNats(options: NatsOptions = {}): Promise<NatsServer> {
  const found = await findNats()
  if ('missing' in found) throw new Error(found.missing)
  const dataDir = await mkdtemp(join(tmpdir(), 'spillway-nats-'))
  const port = options.port ?? (await freePort())
  const configFile = join(dataDir, 'nats.conf')
  const lines = [`listen: 127.0.0.1:${port}`, ...(options.settings ?? [])]
  if (options.jetstream !== false) lines.push(`jetstream { store_dir: ${JSON.stringify(join(dataDir, 'store'))} }`)
  await writeFile(configFile, `${lines.join('\n')}\n`)
  let running = await launch(found.program, configFile, port)
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
    url: `nats://127.0.0.1:${port}`,
    port,
    dataDir,
    kill,
    restart: async () => {
      await kill()
      running = await launch(found.program, configFile, port)
    },
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

async function launch(program: string, configFile: string, port: number): Promise<Running> {
  const child = spawn(program, ['-c', configFile], { stdio: ['ignore', 'ignore', 'pipe'] })
  let output = ''
  child.stderr?.on('data', (chunk: Buffer) => {
    output = (output + chunk.toString()).slice(-4_000)
  })
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

/** It greets each client that connects. */
async function answers(port: number): Promise<boolean> {
  const socket = connect(port, '127.0.0.1')
  try {
    await once(socket, 'data')
    return true
  } catch {
    return false
  } finally {
    socket.destroy()
  }
}

export async function freePort(): Promise<number> {
  const server = createServer()
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const address = server.address()
  server.close()
  await once(server, 'close')
  if (address === null || typeof address === 'string') throw new Error('no port')
  return address.port
}
