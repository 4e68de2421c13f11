import { readFile, rm, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { errnoOf } from './error.js'

export interface PostmasterFile {
  pid: number
  /** Missing in a file whose server died before it listened. */
  port?: number
}

/** Lines: pid, data directory, start time, port, socket directory, listen address, shared memory key, status. */
export function parsePostmasterFile(text: string): PostmasterFile | undefined {
  const lines = text.split('\n')
  const pid = Number.parseInt(lines[0] ?? '', 10)
  const port = Number.parseInt(lines[3] ?? '', 10)
  if (!(pid > 0)) return undefined
  return port > 0 ? { pid, port } : { pid }
}

const fileIn = (clusterDir: string) => join(clusterDir, 'postmaster.pid')

export async function readPostmasterFile(clusterDir: string): Promise<PostmasterFile | undefined> {
  let text: string
  try {
    text = await readFile(fileIn(clusterDir), 'utf8')
  } catch (error) {
    if (errnoOf(error) === 'ENOENT') return undefined
    throw error
  }
  const parsed = parsePostmasterFile(text)
  // An empty file (after a full disk or a power cut) makes PostgreSQL refuse to start; no server can be behind it.
  if (!parsed) await rm(fileIn(clusterDir), { force: true })
  return parsed
}

/**
 * PostgreSQL refuses to start while the recorded pid is alive, even if another program has it now. Deleting the file would
 * also delete the shared memory key, by which PostgreSQL finds backends that outlived a killed postmaster. So only the pid
 * is replaced, by that of the new server's parent, which PostgreSQL does not treat as a rival.
 */
export async function disownPid(clusterDir: string): Promise<void> {
  const text = await readFile(fileIn(clusterDir), 'utf8')
  await writeFile(fileIn(clusterDir), text.replace(/^\d+/, String(process.pid)))
}
