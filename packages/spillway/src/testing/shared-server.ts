/**
 * One embedded PostgreSQL for all tests of this machine, whichever process asks first. It runs in a process of its own
 * (hold-server.ts), so that it outlives the test that started it, and ends by itself when nobody has used it for a while.
 *
 *   asked ──its address is written, it answers and has a holder──► in use
 *     └──else──► a holder is started ──it has the folder's lock──► writes the address
 *                                     └──another holder has it──► ends; the other one's address is used
 */
import { type ChildProcess, spawn } from 'node:child_process'
import { closeSync, openSync } from 'node:fs'
import { mkdir, readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'

export interface SharedServerOptions {
  dataDir: string
  /** How long it runs without a session. Default 300,000. */
  idleMs?: number
  /** For tests: the program that holds the server. */
  holder?: string
}

/** What a holder writes, while its server takes sessions. */
export interface Address {
  url: string
  /** Of the holder. A server without one would never end, so the next holder adopts it. */
  pid: number
}
export const addressFile = (dataDir: string): string => join(dataDir, 'address')
export const holderLog = (dataDir: string): string => join(dataDir, 'holder.log')

const idleMsDefault = 300_000
/** The first start of all unpacks and initialises a server. */
const patienceMs = 120_000
const pollMs = 20
/** A holder that found another one may start again: that one may be about to end. */
const againMs = 250
const holderFile = fileURLToPath(new URL('./hold-server.js', import.meta.url))

/** What `use` makes of the server's address. It is called again if the server ends at that moment. */
export async function withSharedServer<T>(options: SharedServerOptions, use: (url: string) => Promise<T>): Promise<T> {
  const { dataDir } = options
  await mkdir(dataDir, { recursive: true, mode: 0o700 })
  const deadline = performance.now() + patienceMs
  let holder: Holder | undefined
  for (;;) {
    const url = await readAddress(dataDir)
    if (url !== null) {
      try {
        return await use(url)
      } catch (fault) {
        if ((fault as { code?: unknown }).code !== 'unavailable' || performance.now() > deadline) throw fault
      }
    }
    const failure = holder?.failure ?? null
    if (failure !== null || performance.now() > deadline) {
      const log = await readFile(holderLog(dataDir), 'utf8').catch(() => '')
      throw new Error(
        `createTestIntake: the embedded PostgreSQL in ${dataDir} did not start (${failure ?? 'no answer'}): ${log.slice(-2_000).trim()}`,
      )
    }
    if (holder === undefined || holder.mayStartAgain) holder = startHolder(options)
    await delay(pollMs)
  }
}

interface Holder {
  /** Why it failed; null if it runs, or left the folder to another one. */
  readonly failure: string | null
  readonly mayStartAgain: boolean
}

function startHolder({ dataDir, idleMs = idleMsDefault, holder = holderFile }: SharedServerOptions): Holder {
  const log = openSync(holderLog(dataDir), 'a', 0o600)
  let child: ChildProcess
  try {
    child = spawn(process.execPath, [holder, dataDir, String(idleMs)], {
      cwd: dataDir,
      // Its own session: Ctrl-C ends the tests, not the server that other tests use.
      detached: true,
      stdio: ['ignore', log, log],
      windowsHide: true,
    })
  } finally {
    closeSync(log)
  }
  let failure: string | null = null
  let endedAt: number | null = null
  child.once('error', (error) => {
    failure = error.message
  })
  child.once('exit', (code, signal) => {
    endedAt = performance.now()
    if (code !== 0) failure = `the holder ended with ${signal ?? `code ${code}`}`
  })
  child.unref()
  return {
    get failure() {
      return failure
    },
    get mayStartAgain() {
      return endedAt !== null && performance.now() - endedAt > againMs
    },
  }
}

async function readAddress(dataDir: string): Promise<string | null> {
  try {
    const { url, pid }: Address = JSON.parse(await readFile(addressFile(dataDir), 'utf8'))
    return isAlive(pid) ? url : null
  } catch (fault) {
    if ((fault as { code?: unknown }).code !== 'ENOENT') throw fault
    return null
  }
}

function isAlive(pid: number): boolean {
  try {
    return process.kill(pid, 0)
  } catch (fault) {
    // EPERM: it is another user's.
    return (fault as { code?: unknown }).code === 'EPERM'
  }
}
