import { readFileSync } from 'node:fs'
import { stat } from 'node:fs/promises'
import { dirname } from 'node:path'
import { errnoOf } from './error.js'

/** The account PostgreSQL runs as when we are root, which it refuses to be. Undefined: run as ourselves. */
export interface Account {
  uid: number
  gid: number
}

const NOBODY: Account = { uid: 65534, gid: 65534 }

/**
 * The owner of an existing cluster keeps it (it may have been made by an ordinary user, or by an image's own account);
 * a new one goes to nobody.
 */
export async function serverAccount(clusterDir: string): Promise<Account | undefined> {
  if (process.geteuid?.() !== 0) return undefined
  try {
    const { uid, gid } = await stat(clusterDir)
    if (uid !== 0) return { uid, gid }
  } catch (error) {
    if (errnoOf(error) !== 'ENOENT') throw error
  }
  return nobody()
}

function nobody(): Account {
  try {
    return parsePasswd(readFileSync('/etc/passwd', 'utf8')) ?? NOBODY
  } catch (error) {
    if (errnoOf(error) === 'ENOENT') return NOBODY
    throw error
  }
}

/** Only an unprivileged pair will do: macOS writes nobody as -2, which is its unsigned form here. */
export function parsePasswd(text: string): Account | undefined {
  for (const line of text.split('\n')) {
    const [name, , uid, gid] = line.split(':')
    if (name !== 'nobody') continue
    const account = { uid: Number(uid) >>> 0, gid: Number(gid) >>> 0 }
    return account.uid > 0 && account.gid > 0 ? account : undefined
  }
  return undefined
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
