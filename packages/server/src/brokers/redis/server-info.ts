import type { Redis } from 'ioredis'
import { refusalOf } from './faults.js'

export interface ServerInfo {
  version: string
  /** Keys may be thrown away when its memory is full: by this policy. Null: none are. */
  evictsBy: string | null
  /** Each write goes to a file; a restart keeps the streams. */
  isAppendOnly: boolean
}

/** What the server is and how it is set. Null when the user may not ask. */
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
