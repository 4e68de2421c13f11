/**
 * One Spillway process per data folder, with nothing to clean up after a `kill -9`.
 *
 * Node.js has no flock, so the lock is a growing series of files `owner-1`, `owner-2`, … of which only the highest counts.
 * States of the highest file: absent → free; holder alive → held; holder dead or `released` → free. To take the lock, a
 * process creates the next number exclusively and looks again; if it finds a higher number than its own, it withdraws. The
 * number never falls (release keeps the file), so a process that was paused between looking and creating can never come back
 * to an old number and win. Deleting a stale pid file has no such property.
 */
import { randomUUID } from 'node:crypto'
import { readdir, readFile, rm, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { EmbeddedError, errnoOf } from './error.js'
import { isAlive, startIdentity } from './processes.js'

interface Owner {
  pid: number
  /** Missing if the platform does not report it. */
  start?: string
  token: string
  released?: true
}

export interface FolderLock {
  release(): Promise<void>
}

const NAME = /^owner-(\d+)$/
/** How long an owner file may be empty (between its creation and its writing) before its writer counts as dead. */
const UNWRITTEN_MS = 1_000
const ATTEMPTS_MAX = 100

export async function lockFolder(dir: string): Promise<FolderLock> {
  const start = startIdentity(process.pid)
  const owner: Owner = { pid: process.pid, ...(start && { start }), token: randomUUID() }

  for (let attempt = 0; attempt < ATTEMPTS_MAX; attempt++) {
    const numbers = await ownerNumbers(dir)
    const highest = numbers.at(-1) ?? 0
    const holder = highest > 0 ? await readOwner(ownerFile(dir, highest)) : undefined
    if (holder && holds(holder)) throw inUse(dir, holder)

    const mine = highest + 1
    try {
      // Readable by all: after one start as root, the folder's own user must still be able to see that it is free.
      await writeFile(ownerFile(dir, mine), JSON.stringify(owner), { flag: 'wx', mode: 0o644, flush: true })
    } catch (error) {
      if (errnoOf(error) === 'EEXIST') continue
      throw new EmbeddedError('data_dir_denied', `cannot write to the data folder ${dir}`, { cause: error })
    }
    const after = await ownerNumbers(dir)
    if (after.at(-1) !== mine) {
      await rm(ownerFile(dir, mine), { force: true })
      continue
    }
    for (const number of after) if (number < mine) await rm(ownerFile(dir, number), { force: true })
    return { release: () => writeFile(ownerFile(dir, mine), JSON.stringify({ ...owner, released: true })) }
  }
  throw new EmbeddedError('data_dir_in_use', `the data folder ${dir} is being started by other processes`)
}

function inUse(dir: string, holder: Owner): EmbeddedError {
  const who = holder.pid === process.pid ? `this process (pid ${holder.pid})` : `the process with pid ${holder.pid}`
  return new EmbeddedError(
    'data_dir_in_use',
    `the data folder ${dir} is in use by ${who}; stop it first, or take another folder (SPILLWAY_DATA_DIR, in code the option dataDir)`,
  )
}

function ownerFile(dir: string, number: number): string {
  return join(dir, `owner-${number}`)
}

async function ownerNumbers(dir: string): Promise<number[]> {
  const names = await readdir(dir)
  return names
    .flatMap((name) => NAME.exec(name)?.[1] ?? [])
    .map(Number)
    .sort((a, b) => a - b)
}

async function readOwner(file: string): Promise<Owner | undefined> {
  const deadline = performance.now() + UNWRITTEN_MS
  for (;;) {
    let text: string
    try {
      text = await readFile(file, 'utf8')
    } catch (error) {
      if (errnoOf(error) === 'ENOENT') return undefined
      throw new EmbeddedError('data_dir_denied', `cannot read ${file}`, { cause: error })
    }
    const owner = parseOwner(text)
    if (owner || performance.now() >= deadline) return owner
    await delay(20)
  }
}

export function parseOwner(text: string): Owner | undefined {
  try {
    const value: unknown = JSON.parse(text)
    if (typeof value !== 'object' || value === null) return undefined
    const { pid, start, token, released } = value as Record<string, unknown>
    if (typeof pid !== 'number' || typeof token !== 'string') return undefined
    return { pid, token, ...(typeof start === 'string' && { start }), ...(released === true && { released }) }
  } catch (error) {
    if (error instanceof SyntaxError) return undefined
    throw error
  }
}

function holds(owner: Owner): boolean {
  if (owner.released || !isAlive(owner.pid)) return false
  return owner.start === undefined || owner.start === startIdentity(owner.pid)
}
