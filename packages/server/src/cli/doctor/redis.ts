import { probeRedis, type RedisProbe } from '../../brokers/redis/index.js'
import type { Finding } from './finding.js'

export async function checkRedis(url: string): Promise<Finding> {
  return judgeRedis(await probeRedis(url))
}

export function judgeRedis(probe: RedisProbe): Finding {
  const name = 'redis'
  if (!probe.ok) {
    return {
      name,
      state: 'hint',
      detail: `${probe.shown} cannot be reached (${probe.why}): streams are kept in PostgreSQL until it can`,
      fix: 'check REDIS_URL, that the server runs, and that it lets this user in',
    }
  }
  const { shown, server } = probe
  if (server === null) return { name, state: 'right', detail: `${shown} answers` }
  const detail = `${shown} answers: Redis ${server.version}`
  if (server.evictsBy !== null) {
    return {
      name,
      state: 'wrong',
      detail: `${detail}, which throws away running streams when its memory is full (${server.evictsBy})`,
      fix: 'maxmemory-policy noeviction',
    }
  }
  if (server.isAppendOnly) return { name, state: 'right', detail: `${detail} with an append-only file` }
  return {
    name,
    state: 'hint',
    detail: `${detail} without an append-only file: a restart of it ends the streams that run, with an error`,
    fix: 'appendonly yes, if they are to outlive it',
  }
}
