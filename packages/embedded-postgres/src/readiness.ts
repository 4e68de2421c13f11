import { errnoOf } from './error.js'

/**
 * SQLSTATEs of a server that may be ready soon: it is starting, stopping or recovering (57P..), out of connections or memory
 * (53), has an I/O error (58) or cut the connection (08). Waiting does not help with a full disk (53100).
 */
const TRANSIENT_STATE = /^(?:08...|53(?!100)...|58...|57P0[1235]|57014|55P03|25006|25P03)$/

const TRANSIENT_ERRNO = new Set([
  'ECONNREFUSED',
  'ECONNRESET',
  'ECONNABORTED',
  'EPIPE',
  'ETIMEDOUT',
  'EADDRNOTAVAIL',
  'EMFILE',
  'ENFILE',
])

/** Errors made by node-postgres itself have no code; their texts are fixed in the pinned version. */
const TRANSIENT_MESSAGE = /^(?:Query read timeout|timeout expired|Connection terminated.*|Client .* is not queryable)$/s

/** Whether to repeat a failed probe. Not for a refused password, or a server that is not PostgreSQL. */
export function isTransient(error: unknown): boolean {
  if (!(error instanceof Error)) return false
  const code = errnoOf(error)
  if (code === undefined) return TRANSIENT_MESSAGE.test(error.message)
  // Only errors that the server sent have a severity: EPIPE is five capitals, too.
  return 'severity' in error ? TRANSIENT_STATE.test(code) : TRANSIENT_ERRNO.has(code)
}
