import { type ChildProcess, spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { existsSync } from 'node:fs'
import { chmod, lstat, mkdir, mkdtemp, readdir, readFile, rename, rm, stat, symlink, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import { type EmbeddedServer, startEmbedded } from '@spillway/embedded-postgres'
import {
  freePort,
  handOverTree,
  isAlive,
  nobody,
  openServerLog,
  placeCluster,
  prepareRuntime,
  readPassword,
  serverAccounts,
  serverSettings,
  spawnServer,
  waitForExit,
  waitUntilReady,
} from '@spillway/embedded-postgres/internal'
import pg from 'pg'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'

const log = { info: () => undefined, warn: () => undefined, error: () => undefined }
const settings = { min_wal_size: '80MB', shared_buffers: '16MB', max_connections: '20' }
const holderProgram = fileURLToPath(new URL('../../../spillway/test/setup/hold-embedded.ts', import.meta.url))

interface Report {
  url: string
  pid: number
  adopted: boolean
  code: string
  message: string
  signal: string
}

interface Holder {
  process: ChildProcess
  pid: number
  next(): Promise<Report>
}

let base: string
let dataDir: string
let servers: EmbeddedServer[]
let children: ChildProcess[]

beforeEach(async () => {
  base = await mkdtemp(join(tmpdir(), 'spillway-embedded-'))
  await chmod(base, 0o755)
  dataDir = join(base, 'data')
  servers = []
  children = []
})

afterEach(async () => {
  for (const child of children) {
    if (child.exitCode !== null || child.signalCode !== null) continue
    child.kill('SIGKILL')
    await once(child, 'exit')
  }
  for (const server of servers) await server.stop()
  // A test that failed may have left a server that nobody holds any more.
  const pid = await postmasterPid()
  if (pid !== undefined && isAlive(pid)) {
    process.kill(pid, 'SIGQUIT')
    await waitForExit(pid, 10_000)
  }
  await rm(base, { recursive: true, force: true })
})

async function postmasterPid(): Promise<number | undefined> {
  const file = join(dataDir, 'postgres', 'postmaster.pid')
  return existsSync(file) ? Number.parseInt(await readFile(file, 'utf8'), 10) || undefined : undefined
}

async function start(): Promise<EmbeddedServer> {
  const server = await startEmbedded({ dataDir, log, settings })
  servers.push(server)
  return server
}

function hold(): Holder {
  const child = spawn(process.execPath, ['--import', 'tsx', holderProgram, dataDir], {
    stdio: ['ignore', 'pipe', 'inherit'],
    detached: true,
  })
  children.push(child)
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]()
  return {
    process: child,
    pid: child.pid ?? 0,
    next: async () => JSON.parse((await lines.next()).value ?? '{"message":"the holder ended"}'),
  }
}

async function killHard(holder: Holder): Promise<void> {
  holder.process.kill('SIGKILL')
  await once(holder.process, 'exit')
}

async function query<T extends pg.QueryResultRow>(url: string, text: string): Promise<T[]> {
  const client = new pg.Client({ connectionString: url, connectionTimeoutMillis: 2_000 })
  client.on('error', () => undefined)
  try {
    await client.connect()
    return (await client.query<T>(text)).rows
  } finally {
    await client.end()
  }
}

describe('the embedded server', () => {
  it('starts, keeps its data over a stop, and is gone after it', async () => {
    const first = await start()
    expect(first.adopted).toBe(false)
    await query(first.url, 'CREATE TABLE kept AS SELECT 42 AS n')
    await first.stop()
    expect(isAlive(first.pid)).toBe(false)
    await expect(query(first.url, 'SELECT 1')).rejects.toMatchObject({ code: 'ECONNREFUSED' })

    const second = await start()
    expect(second.adopted).toBe(false)
    expect(await query(second.url, 'SELECT n FROM kept')).toEqual([{ n: 42 }])
  })

  it('is durable, local, in UTF8, and open only to its password', async () => {
    const unsafe = { ...settings, fsync: 'off', listen_addresses: '*' }
    const server = await startEmbedded({ dataDir, log, settings: unsafe })
    servers.push(server)
    const rows = await query<{ name: string; setting: string }>(
      server.url,
      `SELECT name, setting FROM pg_settings WHERE name IN ('fsync', 'synchronous_commit', 'full_page_writes',
         'listen_addresses', 'unix_socket_directories', 'server_encoding', 'autovacuum_naptime', 'max_connections')`,
    )
    expect(Object.fromEntries(rows.map(({ name, setting }) => [name, setting]))).toEqual({
      fsync: 'on',
      synchronous_commit: 'on',
      full_page_writes: 'on',
      listen_addresses: '127.0.0.1',
      unix_socket_directories: '',
      server_encoding: 'UTF8',
      autovacuum_naptime: '5',
      max_connections: '20',
    })
    expect((await stat(join(dataDir, 'postgres.password'))).mode & 0o777).toBe(0o600)
    const guess = new URL(server.url)
    guess.password = 'guess'
    await expect(query(guess.href, 'SELECT 1')).rejects.toMatchObject({ code: '28P01' })
  })

  it('works twice in a row below a folder that only its owner may pass', async () => {
    await chmod(base, 0o700)
    for (const n of [1, 2]) {
      const server = await start()
      expect(await query(server.url, `SELECT ${n} AS n`)).toEqual([{ n }])
      await query(server.url, 'CREATE TABLE IF NOT EXISTS t (n int); INSERT INTO t VALUES (1)')
      expect(await query(server.url, 'SELECT count(*)::int AS n FROM t')).toEqual([{ n }])
      await server.stop()
    }
    expect(existsSync(join(dataDir, 'postgres', 'PG_VERSION'))).toBe(true)
  })

  describe.runIf(process.geteuid?.() === 0)('as root', () => {
    const clusterDir = (): string => join(dataDir, 'postgres')
    const uidOf = async (pid: number): Promise<number> => (await stat(`/proc/${pid}`)).uid
    const readAs = (uid: number, path: string): number | null =>
      spawnSync('cat', [path], { uid, gid: uid, stdio: 'ignore' }).status

    it('runs under an account of its own, in folders closed to others', async () => {
      const server = await start()
      const { uid } = await stat(clusterDir())
      expect(await uidOf(server.pid)).toBe(uid)
      expect([0, nobody().uid]).not.toContain(uid)
      for (const folder of [dataDir, clusterDir()]) expect((await stat(folder)).mode & 0o777).toBe(0o700)
      const files = (await readdir(clusterDir(), { recursive: true })).map((name) => join(clusterDir(), name))
      const owners = await Promise.all(files.map((file) => lstat(file).then((seen) => seen.uid)))
      expect(new Set(owners)).toEqual(new Set([uid]))
      for (const way of [clusterDir(), `/proc/${server.pid}/cwd`]) {
        expect(readAs(uid, `/proc/${server.pid}/cwd/PG_VERSION`)).toBe(0)
        expect(readAs(nobody().uid, join(way, 'PG_VERSION'))).not.toBe(0)
      }
    })

    it('takes over a folder that belongs to nobody, once no server runs on it', async () => {
      const first = await start()
      await query(first.url, 'CREATE TABLE t (n int)')
      await first.stop()
      const own = await stat(clusterDir())
      await handOverTree(clusterDir(), own, nobody())
      const second = await start()
      expect(await uidOf(second.pid)).toBe(own.uid)
      expect((await stat(join(clusterDir(), 'base'))).uid).toBe(own.uid)
      expect(await query(second.url, 'SELECT * FROM t')).toEqual([])
    })

    it('does not touch a running server that belongs to nobody until it ends', async () => {
      await (await start()).stop()
      const own = await stat(clusterDir())
      await handOverTree(clusterDir(), own, nobody())
      const account = nobody()
      const runtime = await prepareRuntime({ dataDir, account })
      const placement = await placeCluster(clusterDir(), account)
      const port = await freePort()
      const serverLog = await openServerLog(join(dataDir, 'postgres.log'))
      const given = serverSettings({ port, freeBytes: 1e9, totalMemoryBytes: 1e9, overrides: settings })
      const left = await spawnServer({ runtime, placement, port, log: serverLog, settings: given })
      expect(await waitUntilReady(left, await readPassword(dataDir))).toBe('ready')
      const adopting = await start()
      expect({ adopted: adopting.adopted, pid: adopting.pid }).toEqual({ adopted: true, pid: left.pid })
      expect((await stat(clusterDir())).uid).toBe(account.uid)
      await adopting.stop()
      const next = await start()
      expect(await uidOf(next.pid)).toBe(own.uid)
    })

    it('does not follow links: a cluster with its log elsewhere stays as it is, and says so', async () => {
      await (await start()).stop()
      const own = await stat(clusterDir())
      await rename(join(clusterDir(), 'pg_wal'), join(base, 'wal'))
      await symlink(join(base, 'wal'), join(clusterDir(), 'pg_wal'))
      await handOverTree(clusterDir(), own, nobody())
      await handOverTree(join(base, 'wal'), own, nobody())
      const warned: string[] = []
      const server = await startEmbedded({
        ...{ dataDir, settings },
        log: { ...log, warn: (_: object, message: string) => void warned.push(message) },
      })
      servers.push(server)
      expect(await uidOf(server.pid)).toBe(nobody().uid)
      expect(warned).toEqual([expect.stringContaining('by hand')])
    })
  })

  it('refuses a second start on a live folder, naming the holder, and does the first no harm', async () => {
    const holder = hold()
    const { url } = await holder.next()
    const refusal = await startEmbedded({ dataDir, log }).catch((error: unknown) => error)
    expect(refusal).toMatchObject({ name: 'EmbeddedError', code: 'data_dir_in_use' })
    expect(String(refusal)).toContain(`pid ${holder.pid}`)
    expect(await query(url, 'SELECT 1 AS n')).toEqual([{ n: 1 }])
  })

  it('refuses a second start in the same process, until the first is stopped', async () => {
    const first = await start()
    await expect(startEmbedded({ dataDir, log })).rejects.toMatchObject({ code: 'data_dir_in_use' })
    await Promise.all([first.stop(), first.stop()])
    await start()
  })

  it('lets exactly one of four that start at once have the folder', async () => {
    const reports = await Promise.all([hold(), hold(), hold(), hold()].map((holder) => holder.next()))
    expect(reports.filter(({ url }) => url !== undefined)).toHaveLength(1)
    expect(reports.filter(({ code }) => code === 'data_dir_in_use')).toHaveLength(3)
  })

  it('takes over the server of a process that was killed, and can stop it', async () => {
    const holder = hold()
    const left = await holder.next()
    await query(left.url, 'CREATE TABLE kept AS SELECT 7 AS n')
    await killHard(holder)
    expect(isAlive(left.pid)).toBe(true)

    const server = await start()
    expect(server).toMatchObject({ adopted: true, pid: left.pid, url: left.url })
    expect(await query(server.url, 'SELECT n FROM kept')).toEqual([{ n: 7 }])
    await server.stop()
    expect(isAlive(left.pid)).toBe(false)
  })

  it('starts again with every commit when process and server were both killed', async () => {
    const holder = hold()
    const left = await holder.next()
    await query(left.url, 'CREATE TABLE kept AS SELECT 7 AS n')
    await killHard(holder)
    process.kill(left.pid, 'SIGKILL')
    await waitForExit(left.pid, 10_000)

    const server = await start()
    expect(server.adopted).toBe(false)
    expect(await query(server.url, 'SELECT n FROM kept')).toEqual([{ n: 7 }])
  })

  it('starts over a postmaster.pid whose pid another program has now, and over an empty one', async () => {
    const first = await start()
    const file = join(dataDir, 'postgres', 'postmaster.pid')
    const lines = (await readFile(file, 'utf8')).split('\n')
    await first.stop()
    // Of the account the server runs as: of any other, PostgreSQL itself would know better.
    const { account } = await serverAccounts(join(dataDir, 'postgres'))
    const stranger = spawn(process.platform === 'win32' ? 'timeout' : 'sleep', ['600'], { stdio: 'ignore', ...account })
    children.push(stranger)
    await writeFile(file, [String(stranger.pid), ...lines.slice(1)].join('\n'))
    const second = await start()
    expect(second.adopted).toBe(false)
    expect(await query(second.url, 'SELECT 1 AS n')).toEqual([{ n: 1 }])
    expect(isAlive(stranger.pid ?? 0)).toBe(true)
    await second.stop()

    await writeFile(file, '')
    const third = await start()
    expect(await query(third.url, 'SELECT 1 AS n')).toEqual([{ n: 1 }])
  })

  it('does not hear the Ctrl-C of its holder', async () => {
    const holder = hold()
    const { url, pid } = await holder.next()
    process.kill(-holder.pid, 'SIGINT')
    expect(await holder.next()).toEqual({ signal: 'SIGINT' })
    expect(await query(url, 'SELECT 1 AS n')).toEqual([{ n: 1 }])
    holder.process.kill('SIGTERM')
    await once(holder.process, 'exit')
    expect(isAlive(pid)).toBe(false)
  })

  it('is started again on its port when it ends unasked', async () => {
    const server = await start()
    const { pid } = server
    await query(server.url, 'CREATE TABLE kept AS SELECT 7 AS n')
    process.kill(pid, 'SIGKILL')
    await expect
      .poll(() => query(server.url, 'SELECT n FROM kept').catch(() => []), { timeout: 20_000 })
      .toEqual([{ n: 7 }])
    await expect.poll(() => server.pid).not.toBe(pid)
    await server.stop()
    expect(isAlive(server.pid)).toBe(false)
  })

  it('refuses a cluster of another major version, and frees the folder', async () => {
    await mkdir(join(dataDir, 'postgres'), { recursive: true })
    await writeFile(join(dataDir, 'postgres', 'PG_VERSION'), '14\n')
    await expect(startEmbedded({ dataDir, log })).rejects.toMatchObject({ code: 'data_dir_version' })
    await rm(join(dataDir, 'postgres'), { recursive: true })
    await start()
  })

  it('clears what a start that was killed while making the cluster left', async () => {
    await mkdir(join(dataDir, 'postgres.draft-0123'), { recursive: true })
    await start()
    expect((await readdir(dataDir)).filter((name) => name.includes('draft'))).toEqual([])
  })
})

describe('the runtime', () => {
  it('says which package is missing and what to do instead', async () => {
    const resolve = (name: string): string => {
      throw new Error(`no ${name}`)
    }
    const error = await prepareRuntime({ dataDir: base, account: undefined, resolve }).catch(
      (thrown: unknown) => thrown,
    )
    expect(error).toMatchObject({ code: 'platform_unsupported' })
    expect(String(error)).toContain('DATABASE_URL')
  })

  it('is laid out once by racing starts, with its library links, and again when files were lost', async () => {
    const resolve = await installPackage(join(base, 'package'))
    const prepare = () => prepareRuntime({ dataDir: base, account: undefined, resolve })
    const all = await Promise.all(Array.from({ length: 8 }, prepare))
    const dir = join(base, 'runtime', `postgresql-18.9.0-${process.platform}-${process.arch}`)
    expect(all.map((runtime) => runtime.dir)).toEqual(all.map(() => dir))
    expect(await readdir(join(base, 'runtime'))).toHaveLength(1)
    expect(await readFile(join(dir, 'lib', 'libx.so.1'), 'utf8')).toBe('lib/libx.so.1.2')
    expect(all[0]?.major).toBe('18')

    await rm(join(dir, 'lib', 'libx.so.1'))
    await prepare()
    expect(await readFile(join(dir, 'lib', 'libx.so.1'), 'utf8')).toBe('lib/libx.so.1.2')
    expect(await readdir(join(base, 'runtime'))).toHaveLength(1)
  })

  it('is the package itself where that can be run', async () => {
    const resolve = await installPackage(join(base, 'package'))
    await symlink('libx.so.1.2', join(base, 'package', 'native', 'lib', 'libx.so.1'))
    const runtime = await prepareRuntime({ dataDir: base, account: undefined, resolve })
    expect(runtime.dir).toBe(join(base, 'package', 'native'))
    expect(existsSync(join(base, 'runtime'))).toBe(false)
  })
})

/** A platform package as npm installs it without running scripts: complete but for its library links. */
async function installPackage(root: string): Promise<() => string> {
  const native = join(root, 'native')
  for (const dir of ['bin', 'lib', 'share']) await mkdir(join(native, dir), { recursive: true })
  for (const file of ['bin/postgres', 'bin/initdb', 'bin/pg_ctl', 'lib/libx.so.1.2', 'share/postgres.bki']) {
    await writeFile(join(native, file), file, { mode: file.startsWith('bin') ? 0o755 : 0o644 })
  }
  const links = [{ source: 'native/lib/libx.so.1.2', target: 'native/lib/libx.so.1' }]
  await writeFile(join(native, 'pg-symlinks.json'), JSON.stringify(links))
  await writeFile(join(root, 'package.json'), JSON.stringify({ version: '18.9.0' }))
  return () => join(root, 'dist', 'index.js')
}
