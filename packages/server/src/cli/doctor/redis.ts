import { probeRedis, type RedisProbe } from '../../brokers/redis/index.js'
import { type Finding, hint, right, wrong } from './finding.js'

const name = 'redis'

export async function checkRedis(url: string): Promise<Finding> {
  return judgeRedis(await probeRedis(url))
}

export function judgeRedis(probe: RedisProbe): Finding {
  if (!probe.ok) {
    return hint(
      name,
      `${probe.shown} cannot be reached (${probe.why}): streams are kept in PostgreSQL until it can`,
      'check REDIS_URL, that the server runs, and that it lets this user in',
    )
  }
  const { shown, server } = probe
  if (server === null) return right(name, `${shown} answers`)
  const detail = `${shown} answers: Redis ${server.version}`
  if (server.evictsBy !== null) {
    const eviction = `which throws away running streams when its memory is full (${server.evictsBy})`
    return wrong(name, `${detail}, ${eviction}`, 'maxmemory-policy noeviction')
  }
  if (server.isAppendOnly) return right(name, `${detail} with an append-only file`)
  return hint(
    name,
    `${detail} without an append-only file: a restart of it ends the streams that run, with an error`,
    'appendonly yes, if they are to outlive it',
  )
}
