import { closeSync, fstatSync, openSync, readSync, truncateSync } from 'node:fs'
import { rename, stat } from 'node:fs/promises'
import { errnoOf } from './error.js'

const LOG_MAX_BYTES = 8 * 1024 ** 2
const CHECK_INTERVAL_MS = 5_000
const TAIL_BYTES = 2_000

/**
 * The server writes its log through an inherited descriptor: a pipe to us would break when we are killed. It is opened for
 * appending, so truncating it is safe while the server writes.
 */
export interface ServerLog {
  file: string
  /** The text written since `mark`, cut to its end. */
  since(mark: number): string
  size(): number
  /** Starts the watch that keeps the file bounded. */
  watch(onError: (error: unknown) => void): { close(): void }
}

export async function openServerLog(file: string): Promise<ServerLog> {
  await setAsideIfLarge(file)
  // Created now, so that it has our mode and owner even if the server appends first.
  closeSync(openSync(file, 'a', 0o600))
  const size = () => {
    const fd = openSync(file, 'r')
    try {
      return fstatSync(fd).size
    } finally {
      closeSync(fd)
    }
  }
  return {
    file,
    size,
    since: (mark) => readTail(file, mark),
    watch: (onError) => {
      const timer = setInterval(() => {
        try {
          if (size() > LOG_MAX_BYTES) truncateSync(file, 0)
        } catch (error) {
          onError(error)
        }
      }, CHECK_INTERVAL_MS)
      timer.unref()
      return { close: () => clearInterval(timer) }
    },
  }
}

async function setAsideIfLarge(file: string): Promise<void> {
  try {
    if ((await stat(file)).size > LOG_MAX_BYTES / 2) await rename(file, `${file}.1`)
  } catch (error) {
    if (errnoOf(error) !== 'ENOENT') throw error
  }
}

function readTail(file: string, mark: number): string {
  const fd = openSync(file, 'r')
  try {
    const end = fstatSync(fd).size
    const start = Math.max(Math.min(mark, end), end - TAIL_BYTES)
    const buffer = Buffer.alloc(end - start)
    readSync(fd, buffer, 0, buffer.length, start)
    return buffer.toString('utf8').trim()
  } finally {
    closeSync(fd)
  }
}
