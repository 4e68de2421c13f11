/**
 * A PostgreSQL of the oldest version that we support, for tests that are to run on it too. In this order: the server
 * that TEST_DATABASE_URL names; a program on PATH or where Debian puts it, started in a folder of its own; Debian's
 * package, unpacked into a cache folder and started likewise.
 */
import { execFile, spawn } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { existsSync, readdirSync, rmSync } from 'node:fs'
import { chmod, chown, mkdir, mkdtemp, readdir, rename, rm, writeFile } from 'node:fs/promises'
import { createServer } from 'node:net'
import { tmpdir } from 'node:os'
import { delimiter, join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { promisify } from 'node:util'
import { type Account, nobody } from '@spillway/embedded-postgres/internal'
import pg from 'pg'

const run = promisify(execFile)

const wantedMajor = 15
const debianFolder = '/usr/lib/postgresql'
/** The server's package, and the libraries that a small image may lack. */
const packages = [
  'postgresql-15',
  'libpq5',
  'libicu72',
  'libxml2',
  'libldap-2.5-0',
  'libsasl2-2',
  'libgssapi-krb5-2',
  'libkrb5-3',
  'libk5crypto3',
  'libkrb5support0',
  'libkeyutils1',
]
const startTimeoutMs = 30_000
const pollMs = 50

interface Programs {
  bin: string
  /** Where libraries are that the system does not have. */
  libraries: string | null
}

export interface TestServer {
  /** A database of its own. */
  url: string
  stop(): Promise<void>
}

export type FoundServer = { start(): Promise<TestServer> } | { missing: string }

export async function findPostgres15(): Promise<FoundServer> {
  const given = process.env.TEST_DATABASE_URL
  if (given) return { start: () => useGiven(given) }
  const installed = await findInstalled()
  if (installed !== undefined) return { start: () => startServer(installed) }
  try {
    const unpacked = await unpackDebian()
    return { start: () => startServer(unpacked) }
  } catch (error) {
    return { missing: `no PostgreSQL ${wantedMajor}: none installed, and Debian's could not be had (${String(error)})` }
  }
}

async function useGiven(given: string): Promise<TestServer> {
  const name = `test_${process.pid}_${randomBytes(6).toString('hex')}`
  await statement(given, `CREATE DATABASE ${name} TEMPLATE template0 ENCODING 'UTF8'`)
  const url = new URL(given)
  url.pathname = `/${name}`
  return { url: url.href, stop: () => statement(given, `DROP DATABASE IF EXISTS ${name} WITH (FORCE)`) }
}

async function findInstalled(): Promise<Programs | undefined> {
  const versions = existsSync(debianFolder) ? readdirSync(debianFolder) : []
  const folders = [...(process.env.PATH ?? '').split(delimiter), ...versions.map((v) => join(debianFolder, v, 'bin'))]
  for (const bin of folders) {
    const complete = ['postgres', 'initdb'].every((program) => existsSync(join(bin, program)))
    if (complete && (await majorOf({ bin, libraries: null })) === wantedMajor) return { bin, libraries: null }
  }
  return undefined
}

async function majorOf(programs: Programs): Promise<number> {
  const { stdout } = await run(join(programs.bin, 'postgres'), ['--version'], { env: environment(programs) })
  return Number(/(\d+)/.exec(stdout)?.[1])
}

/** The package keeps its programs and its shared files in places that are found from each other. */
async function unpackDebian(): Promise<Programs> {
  const cache = join(tmpdir(), `spillway-debian-postgresql-${wantedMajor}`)
  const libraries = join(cache, 'usr', 'lib', debianTriplet())
  const programs = { bin: join(cache, debianFolder, `${wantedMajor}`, 'bin'), libraries }
  if (!existsSync(cache)) {
    const fresh = await mkdtemp(`${cache}-`)
    try {
      await chmod(fresh, 0o755)
      for (const name of packages) {
        // A library of another release has another name; the server's own start says whether one is missing.
        const needed = name === packages[0]
        await run('apt-get', ['download', name], { cwd: fresh }).catch((error: unknown) => {
          if (needed) throw error
        })
      }
      for (const file of await readdir(fresh)) await run('dpkg', ['-x', file, '.'], { cwd: fresh })
      await rename(fresh, cache)
    } finally {
      await rm(fresh, { recursive: true, force: true })
    }
  }
  if ((await majorOf(programs)) !== wantedMajor) throw new Error(`${programs.bin} is of another version`)
  return programs
}

function debianTriplet(): string {
  return process.arch === 'arm64' ? 'aarch64-linux-gnu' : 'x86_64-linux-gnu'
}

function environment({ libraries }: Programs): NodeJS.ProcessEnv {
  return { PATH: process.env.PATH, LC_ALL: 'C', ...(libraries !== null && { LD_LIBRARY_PATH: libraries }) }
}

async function startServer(programs: Programs): Promise<TestServer> {
  const dir = await mkdtemp(join(tmpdir(), 'spillway-postgres15-'))
  const data = join(dir, 'data')
  const account = process.geteuid?.() === 0 ? nobody() : undefined
  const password = randomBytes(12).toString('hex')
  const passwordFile = join(dir, 'password')
  await mkdir(data, { mode: 0o700 })
  await writeFile(passwordFile, password, { mode: 0o600 })
  if (account !== undefined) for (const path of [dir, data, passwordFile]) await chown(path, account.uid, account.gid)
  const as = { env: environment(programs), cwd: dir, ...account }
  const initial = [
    '-D',
    data,
    '-U',
    'spillway',
    '-A',
    'scram-sha-256',
    `--pwfile=${passwordFile}`,
    '-E',
    'UTF8',
    '--no-sync',
  ]
  await run(join(programs.bin, 'initdb'), initial, as)
  const port = await freePort()
  const server = await launch(programs, data, port, account)
  const url = `postgres://spillway:${password}@127.0.0.1:${port}/postgres`
  const cutShort = (): void => {
    server.child.kill('SIGQUIT')
    rmSync(dir, { recursive: true, force: true })
  }
  process.once('exit', cutShort)
  const stop = async (): Promise<void> => {
    process.off('exit', cutShort)
    // Immediate: the data is worth nothing.
    server.child.kill('SIGQUIT')
    await server.ended
    await rm(dir, { recursive: true, force: true })
  }
  try {
    await untilReady(url, server)
  } catch (error) {
    await stop()
    throw error
  }
  return { url, stop }
}

interface Launched {
  child: ReturnType<typeof spawn>
  ended: Promise<unknown>
  output(): string
}

async function launch(programs: Programs, data: string, port: number, account: Account | undefined): Promise<Launched> {
  const settings = { listen_addresses: '127.0.0.1', unix_socket_directories: '', max_connections: '200', fsync: 'off' }
  const flags = Object.entries(settings).flatMap(([name, value]) => ['-c', `${name}=${value}`])
  const child = spawn(join(programs.bin, 'postgres'), ['-D', data, '-p', `${port}`, ...flags], {
    env: environment(programs),
    cwd: data,
    stdio: ['ignore', 'ignore', 'pipe'],
    ...account,
  })
  let output = ''
  child.stderr?.on('data', (chunk: Buffer) => {
    output = (output + chunk.toString()).slice(-4_000)
  })
  const ended = once(child, 'exit')
  await once(child, 'spawn')
  return { child, ended, output: () => output }
}

async function untilReady(url: string, { child, output }: Launched): Promise<void> {
  const deadline = Date.now() + startTimeoutMs
  for (;;) {
    try {
      return await statement(url, 'SELECT 1')
    } catch (error) {
      if (child.exitCode !== null || Date.now() > deadline) {
        throw new Error(`PostgreSQL does not start: ${output()}`, { cause: error })
      }
      await delay(pollMs)
    }
  }
}

async function statement(url: string, text: string): Promise<void> {
  const client = new pg.Client({ connectionString: url })
  try {
    await client.connect()
    await client.query(text)
  } finally {
    await client.end()
  }
}

async function freePort(): Promise<number> {
  const server = createServer()
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const address = server.address()
  server.close()
  await once(server, 'close')
  if (address === null || typeof address === 'string') throw new Error('no port')
  return address.port
}
