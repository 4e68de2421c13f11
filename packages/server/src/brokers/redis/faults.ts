import { setImmediate } from 'node:timers/promises'
import { LogFault, withDeadline } from 'spillway/workload'

/** Redis error replies by their first word, in our words. */
const meanings = {
  OOM: 'it is out of memory (maxmemory)',
  READONLY: 'it is a read-only replica',
  MISCONF: 'it cannot save to its disk and takes no writes',
  NOREPLICAS: 'it has too few replicas to take writes',
  MASTERDOWN: 'it is a replica without its master',
  LOADING: 'it is still loading its data',
  BUSY: 'it is busy with a script',
  NOSCRIPT: 'it has forgotten our script',
  WRONGTYPE: 'a key of ours holds something else',
  NOAUTH: 'it wants a password',
  WRONGPASS: 'it does not accept the user or password',
  NOPERM: 'the user may not do this',
  MOVED: 'it is a node of a cluster; one server is needed',
  CLUSTERDOWN: 'it is a cluster that is down; one server is needed',
} as const

export type RefusalCode = keyof typeof meanings | 'ERR'

const codes = Object.keys(meanings) as (keyof typeof meanings)[]

/** The server's refusal; null if the error did not come from the server. */
export function refusalOf(error: unknown): RefusalCode | null {
  if (!(error instanceof Error) || error.name !== 'ReplyError') return null
  const { message } = error
  // Older servers put other words before an error inside a script.
  return codes.find((code) => new RegExp(`(^|[ :-])${code}( |$)`).test(message)) ?? 'ERR'
}

export function meaningOf(error: unknown): string {
  if (error instanceof TimeoutFault) return 'it did not answer in time'
  const code = refusalOf(error)
  if (code === null) return isUnreachable(error) ? 'it cannot be reached' : 'the connection is lost'
  return code === 'ERR' ? 'it answered with an error' : meanings[code]
}

const unreachable = ['ECONNREFUSED', 'ENOTFOUND', 'EAI_AGAIN', 'EHOSTUNREACH', 'ENETUNREACH', 'ETIMEDOUT']

const isUnreachable = (error: unknown): boolean =>
  error instanceof Error && 'code' in error && unreachable.includes(String(error.code))

/** Converts the driver's error. */
export function asLogFault(error: unknown, doing: string): LogFault {
  if (error instanceof LogFault) return error
  return new LogFault(`Redis did not ${doing}: ${meaningOf(error)}`, { cause: error })
}

export class TimeoutFault extends Error {
  override readonly name = 'TimeoutFault'
}

/**
 * Rejects on timeout. Node runs due timers before it reads arrived data, so after its own pause a process would blame
 * Redis. It therefore checks once more after reading.
 */
export function answered<T>(work: Promise<T>, ms: number): Promise<T> {
  return withDeadline(work, ms, async () => {
    await setImmediate()
    throw new TimeoutFault(`no answer within ${ms} ms`)
  })
}
