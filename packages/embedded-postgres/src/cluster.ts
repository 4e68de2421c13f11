import { randomBytes } from 'node:crypto'
import { chmod, chown, mkdir, open, readdir, readFile, rename, rm, writeFile } from 'node:fs/promises'
import { userInfo } from 'node:os'
import { join } from 'node:path'
import { type Account, canReach, handOverTree, setupAccount } from './account.js'
import type { Runtime } from './binaries.js'
import { EmbeddedError, errnoOf } from './error.js'
import { type Placement, runProgram } from './programs.js'

/** The superuser's and the database's name in the embedded server. */
export const CLUSTER_NAME = 'spillway'

const passwordFile = (dataDir: string) => join(dataDir, 'postgres.password')

/**
 * How programs find the cluster. Below a folder that the server's account cannot enter, no path leads there; but a working
 * directory that was entered as root stays usable, and Linux names it /proc/self/cwd for every server process.
 */
export async function placeCluster(clusterDir: string, account: Account | undefined): Promise<Placement> {
  const base = { cwd: clusterDir, ...(account && { account }) }
  if (await canReach(clusterDir, account)) return { ...base, dataArgument: clusterDir }
  if (process.platform === 'linux') return { ...base, dataArgument: '/proc/self/cwd' }
  throw new EmbeddedError(
    'data_dir_denied',
    `PostgreSQL does not run as root, and the account it runs as (uid ${account?.uid}) cannot reach ${clusterDir}; set SPILLWAY_DATA_DIR to a folder that it can`,
  )
}

/** The major version recorded in a cluster, or undefined where there is none yet. */
export async function clusterVersion(clusterDir: string): Promise<string | undefined> {
  try {
    return (await readFile(join(clusterDir, 'PG_VERSION'), 'utf8')).trim()
  } catch (error) {
    if (errnoOf(error) === 'ENOENT') return undefined
    throw new EmbeddedError('data_dir_denied', `cannot read the cluster in ${clusterDir}`, { cause: error })
  }
}

export async function readPassword(dataDir: string): Promise<string> {
  try {
    return (await readFile(passwordFile(dataDir), 'utf8')).trim()
  } catch (error) {
    throw new EmbeddedError(
      errnoOf(error) === 'ENOENT' ? 'data_dir_damaged' : 'data_dir_denied',
      `the data folder has a database but its password cannot be read from ${passwordFile(dataDir)}`,
      { cause: error },
    )
  }
}

/** Made beside its place and renamed when complete, so that a start killed half-way leaves nothing that looks like a cluster. */
export async function createCluster(options: {
  dataDir: string
  clusterDir: string
  runtime: Runtime
  account: Account | undefined
}): Promise<void> {
  const { dataDir, clusterDir, runtime, account: owner } = options
  const account = owner && setupAccount(owner)
  if (!account) assertNamedUser()
  await removeDrafts(dataDir)
  const password = randomBytes(24).toString('base64url')
  await writeDurably(passwordFile(dataDir), `${password}\n`)

  const draft = join(dataDir, `postgres.draft-${randomBytes(6).toString('hex')}`)
  await mkdir(draft, { mode: 0o700 })
  if (account) await chown(draft, account.uid, account.gid)
  const placement = await placeCluster(draft, account)
  const args = ['-D', placement.dataArgument, `--username=${CLUSTER_NAME}`, '--auth=scram-sha-256', '--encoding=UTF8']
  args.push('--locale=C', '--data-checksums')
  try {
    if (account) {
      await handOver(`${draft}.password`, password, account, (stdin) =>
        runProgram(runtime.initdb, placement, [...args, '--pwfile=/dev/stdin'], stdin),
      )
    } else {
      await runProgram(runtime.initdb, placement, [...args, `--pwfile=${passwordFile(dataDir)}`])
    }
    if (account && owner && account.uid !== owner.uid) await handOverTree(draft, account, owner)
    await rename(draft, clusterDir)
    await syncFolder(dataDir)
  } finally {
    await rm(draft, { recursive: true, force: true })
  }
}

/** initdb looks up its own user, and containers often run under a uid without an entry. */
function assertNamedUser(): void {
  try {
    userInfo()
  } catch (error) {
    throw new EmbeddedError(
      'start_failed',
      `the embedded PostgreSQL cannot be set up by uid ${process.geteuid?.()}, which has no entry in /etc/passwd; add one, run as root, or set DATABASE_URL`,
      { cause: error },
    )
  }
}

/**
 * initdb runs as an account that cannot read our password file and perhaps none of our folders, so it gets an open file of
 * its own as standard input.
 */
async function handOver(
  file: string,
  password: string,
  account: Account,
  use: (stdin: number) => Promise<void>,
): Promise<void> {
  await writeFile(file, `${password}\n`, { mode: 0o600 })
  try {
    await chown(file, account.uid, account.gid)
    const handle = await open(file, 'r')
    try {
      await use(handle.fd)
    } finally {
      await handle.close()
    }
  } finally {
    await rm(file, { force: true })
  }
}

async function removeDrafts(dataDir: string): Promise<void> {
  for (const name of await readdir(dataDir)) {
    if (name.startsWith('postgres.draft-')) await rm(join(dataDir, name), { recursive: true, force: true })
  }
}

async function writeDurably(file: string, text: string): Promise<void> {
  const draft = `${file}.new`
  await writeFile(draft, text, { mode: 0o600, flush: true })
  await chmod(draft, 0o600)
  await rename(draft, file)
}

async function syncFolder(dir: string): Promise<void> {
  if (process.platform === 'win32') return
  const handle = await open(dir, 'r')
  try {
    await handle.sync()
  } finally {
    await handle.close()
  }
}
