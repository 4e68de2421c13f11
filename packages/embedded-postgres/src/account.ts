/**
 * PostgreSQL refuses to run as root, so a root process runs it under another account: one that nobody else uses. `nobody`
 * is shared by whatever else runs as it on the machine, and could be read, signalled and stopped by all of that.
 *
 *   an account named spillway-postgres, if the operator made one; else a uid of our own, without an entry in /etc/passwd
 *
 * The server needs no entry; initdb does, once. Without an account of its own it runs as nobody for that second, in a folder
 * that only root can enter, and what it made is handed over before it gets its name.
 *
 * Folders of earlier versions belong to nobody. They are handed over at the next start at which no server runs on them.
 */
import { readFileSync } from 'node:fs'
import { lchown, lstat, readdir, stat } from 'node:fs/promises'
import { dirname, join } from 'node:path'
import { errnoOf } from './error.js'

/** The account PostgreSQL runs as when we are root. Undefined: run as ourselves. */
export interface Account {
  uid: number
  gid: number
}

const NOBODY: Account = { uid: 65_534, gid: 65_534 }
/** Within what a container maps, outside of what distributions and systemd give away. */
const PRIVATE: Account = { uid: 57_745, gid: 57_745 }
const ACCOUNT_NAME = 'spillway-postgres'

/** Who is to run the server, and who made the cluster that is there, if that is somebody else to take it from. */
export interface Accounts {
  account: Account | undefined
  /** The cluster belongs to nobody, or to root: it is to be handed over. */
  from?: Account
}

/** The owner of an existing cluster keeps it: an ordinary user may have made it, or an image's own account. */
export async function serverAccounts(clusterDir: string): Promise<Accounts> {
  if (process.geteuid?.() !== 0) return { account: undefined }
  const account = accountNamed(ACCOUNT_NAME) ?? PRIVATE
  try {
    const { uid, gid } = await stat(clusterDir)
    if (uid === account.uid) return { account }
    if (uid === 0 || uid === nobody().uid) return { account, from: { uid, gid } }
    return { account: { uid, gid } }
  } catch (error) {
    if (errnoOf(error) !== 'ENOENT') throw error
  }
  return { account }
}

/** Who may run initdb for this account: it looks its own user up. */
export function setupAccount(account: Account): Account {
  return hasEntry(account.uid) ? account : nobody()
}

export function nobody(): Account {
  return accountNamed('nobody') ?? NOBODY
}

function readPasswd(): string {
  try {
    return readFileSync('/etc/passwd', 'utf8')
  } catch (error) {
    if (errnoOf(error) === 'ENOENT') return ''
    throw error
  }
}

const accountNamed = (name: string): Account | undefined => parsePasswd(readPasswd(), name)

const hasEntry = (uid: number): boolean =>
  readPasswd()
    .split('\n')
    .some((line) => Number(line.split(':')[2]) === uid)

/** Only an unprivileged pair will do: macOS writes nobody as -2, which is its unsigned form here. */
export function parsePasswd(text: string, wanted: string): Account | undefined {
  for (const line of text.split('\n')) {
    const [name, , uid, gid] = line.split(':')
    if (name !== wanted) continue
    const account = { uid: Number(uid) >>> 0, gid: Number(gid) >>> 0 }
    return account.uid > 0 && account.gid > 0 ? account : undefined
  }
  return undefined
}

/**
 * A cluster whose log or tablespaces are elsewhere stays as it is: root does not follow links that another account may have
 * made.
 */
export async function hasLinks(clusterDir: string): Promise<boolean> {
  const spaces = await readdir(join(clusterDir, 'pg_tblspc'))
  return spaces.length > 0 || (await lstat(join(clusterDir, 'pg_wal'))).isSymbolicLink()
}

/** The folder itself last: what was cut short is begun again. Only what is the former owner's is touched, and no link followed. */
export async function handOverTree(dir: string, from: Account, to: Account): Promise<void> {
  for (const entry of await readdir(dir, { withFileTypes: true })) {
    const path = join(dir, entry.name)
    if (entry.isDirectory()) await handOverTree(path, from, to)
    else await handOverOne(path, from, to)
  }
  await handOverOne(dir, from, to)
}

async function handOverOne(path: string, from: Account, to: Account): Promise<void> {
  if ((await lstat(path)).uid === from.uid) await lchown(path, to.uid, to.gid)
}

/** Whether the account may pass the folder and every folder above it, by their mode bits. */
export async function canReach(dir: string, account: Account | undefined): Promise<boolean> {
  if (!account) return true
  for (let current = dir; ; current = dirname(current)) {
    const { uid, gid, mode } = await stat(current)
    const shift = uid === account.uid ? 6 : gid === account.gid ? 3 : 0
    if (((mode >> shift) & 0o1) === 0) return false
    if (dirname(current) === current) return true
  }
}
