import { Redis } from 'ioredis'
import { answered, meaningOf } from './faults.js'
import { parseAddress } from './server-address.js'
import { type ServerInfo, serverInfo } from './server-info.js'

export type RedisProbe =
  | { ok: true; shown: string /** Null: it answers, but the user may not read its info. */; server: ServerInfo | null }
  | { ok: false; shown: string; why: string }

const dialTimeoutMs = 3_000

/** Checks for a Redis and its version. Changes nothing. */
export async function probeRedis(url: string): Promise<RedisProbe> {
  const { shown } = parseAddress(url)
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

const codeOf = (error: unknown): string | null =>
  error instanceof Error && 'code' in error && typeof error.code === 'string' ? error.code : null
