/**
 * PostgreSQL refuses to run as root, so a root process runs it under another account that nobody else uses. `nobody` is
 * shared by other programs on the machine, which could read, signal and stop the server.
 *
 *   an account named spillway-postgres, if the operator made one; else our own uid, without an entry in /etc/passwd
 *
 * The server needs no entry; initdb does, once. Without an account of its own, initdb runs as nobody for that second, in a
 * folder that only root can enter; the files change owner before the folder gets its name.
 *
 * Folders of earlier versions belong to nobody. Their owner is changed at the next start at which no server runs on them.
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
/** Within the range that containers map, outside the range that distributions and systemd assign. */
const PRIVATE: Account = { uid: 57_745, gid: 57_745 }
const ACCOUNT_NAME = 'spillway-postgres'

/** The account that runs the server, and the former owner of an existing cluster, if that has to change. */
export interface Accounts {
  account: Account | undefined
  /** The cluster belongs to nobody or to root: its owner has to change. */
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

/** The account that runs initdb: initdb needs an entry for its own user. */
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

/** Accepts only an unprivileged pair: macOS writes nobody as -2, which is its unsigned form here. */
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
 * A cluster with its log or tablespaces elsewhere stays unchanged: root does not follow links that another account may have
 * made.
 */
export async function hasLinks(clusterDir: string): Promise<boolean> {
  const spaces = await readdir(join(clusterDir, 'pg_tblspc'))
  return spaces.length > 0 || (await lstat(join(clusterDir, 'pg_wal'))).isSymbolicLink()
}

/**
 * Changes the folder itself last, so that an interrupted run starts again. Touches only files of the former owner; follows
 * no link.
 */
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
