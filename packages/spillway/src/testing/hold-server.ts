/** The process that holds the embedded PostgreSQL of the tests: see shared-server.ts. */
import { existsSync } from 'node:fs'
import { rename, rm, writeFile } from 'node:fs/promises'
import { setTimeout as delay } from 'node:timers/promises'
import { startEmbedded } from '../store/embedded-package.js'
import { countSessions } from '../store/postgres/test-schema.js'
import { type Address, addressFile } from './shared-server.js'

const [dataDir = '', idle = ''] = process.argv.slice(2)
const idleMs = Number(idle)
const lookMs = Math.min(5_000, Math.max(100, idleMs / 5))
const file = addressFile(dataDir)

const say = (fields: object, message: string): void => console.error(message, fields)
const log = { info: () => undefined, warn: say, error: say }

/** Another process holds it already, or is about to. */
const isTaken = (fault: unknown): boolean => (fault as { code?: unknown }).code === 'data_dir_in_use'

async function hold(): Promise<void> {
  const server = await startEmbedded({ dataDir, log, settings: { max_connections: '500' } }).catch((fault: unknown) => {
    if (!isTaken(fault)) throw fault
    return null
  })
  if (server === null) return
  const asked = new AbortController()
  for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) process.on(signal, () => asked.abort())
  try {
    do await announce(server.url)
    while (!(await isOver(server.url, asked.signal)))
  } finally {
    await rm(file, { force: true })
    await server.stop()
  }
}

/** Whole or not at all: others read it at any time. */
async function announce(url: string): Promise<void> {
  const address: Address = { url, pid: process.pid }
  await writeFile(`${file}.new`, JSON.stringify(address), { mode: 0o600 })
  await rename(`${file}.new`, file)
}

/** Waits until it is not used. False: somebody came at the last moment, having read the address before it was removed. */
async function isOver(url: string, asked: AbortSignal): Promise<boolean> {
  let usedAt = performance.now()
  while (!asked.aborted && existsSync(file)) {
    if (await isUsed(url)) usedAt = performance.now()
    else if (performance.now() - usedAt >= idleMs) break
    await delay(lookMs, undefined, { signal: asked }).catch(() => undefined)
  }
  await rm(file, { force: true })
  return asked.aborted || !existsSync(dataDir) || !(await isUsed(url))
}

/** A server that does not answer is being started again. */
const isUsed = async (url: string): Promise<boolean> => (await countSessions(url).catch(() => 1)) > 0

await hold()
