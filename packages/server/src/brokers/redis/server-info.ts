import type { Redis } from 'ioredis'
import { refusalOf } from './faults.js'

export interface ServerInfo {
  version: string
  /** The policy that evicts keys when the memory is full. Null: no eviction. */
  evictsBy: string | null
  /** Each write goes to a file, so streams survive a restart. */
  isAppendOnly: boolean
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
