/** The Redis server itself: its address, version and settings. */
import { Redis } from 'ioredis'
import { codeOf } from 'spillway/workload'
import { answered, meaningOf, refusalOf } from './faults.js'

export interface ServerInfo {
  version: string
  /** The policy that evicts keys when the memory is full. Null: no eviction. */
  evictsBy: string | null
  /** Each write goes to a file, so streams survive a restart. */
  isAppendOnly: boolean
}

export type RedisProbe =
  | { ok: true; shown: string /** Null: it answers, but the user may not read its info. */; server: ServerInfo | null }
  | { ok: false; shown: string; why: string }

const dialTimeoutMs = 3_000
const defaultPort = '6379'

/** Host, port and database of `redis://[[user]:password@]host[:port][/database]` or `rediss://…`: safe to log. */
export function shownAddress(url: string): string {
  // The text may contain a password, so errors do not quote it.
  if (!URL.canParse(url)) throw new TypeError('the address of Redis is no URL')
  const { protocol, hostname, port, pathname } = new URL(url)
  if (!/^rediss?:$/.test(protocol) || hostname === '') {
    throw new TypeError('the address of Redis is not of the form redis://host:port')
  }
  return `${hostname}:${port || defaultPort}${pathname === '/' ? '' : pathname}`
}

/** The server's version and settings. Null if the user lacks the permission. */
export async function serverInfo(redis: Redis): Promise<ServerInfo | null> {
  try {
    const text = await redis.info()
    const value = (name: string): string | undefined => new RegExp(`^${name}:(.*?)\\r?$`, 'm').exec(text)?.[1]
    const policy = value('maxmemory_policy') ?? 'noeviction'
    const isLimited = (value('maxmemory') ?? '0') !== '0'
    return {
      version: value('redis_version') ?? '',
      evictsBy: isLimited && policy !== 'noeviction' ? policy : null,
      isAppendOnly: value('aof_enabled') === '1',
    }
  } catch (error) {
    if (refusalOf(error) === null) throw error
    return null
  }
}

/** Checks for a Redis and its version. Changes nothing. */
export async function probeRedis(url: string): Promise<RedisProbe> {
  const shown = shownAddress(url)
  const redis = new Redis(url, {
    lazyConnect: true,
    retryStrategy: () => null,
    connectTimeout: dialTimeoutMs,
    disconnectTimeout: 0,
    connectionName: 'spillway doctor',
  })
  let first: unknown = null
  redis.on('error', (error: unknown) => {
    first ??= error
  })
  try {
    await answered(redis.connect(), dialTimeoutMs)
    return { ok: true, shown, server: await answered(serverInfo(redis), dialTimeoutMs) }
  } catch (fault) {
    return { ok: false, shown, why: codeOf(first) ?? meaningOf(first ?? fault) }
  } finally {
    redis.disconnect()
  }
}
