import { describe, expect, it } from 'vitest'
import { describeConfig } from '../../config/describe.js'
import { ConfigError, type Environment, loadConfig } from '../../config/load.js'
import { generationSettings } from './settings.js'

const generationOf = (env: Environment) => loadConfig(env).config.generation

const problemsOf = (env: Environment): readonly { name: string; message: string }[] => {
  try {
    loadConfig(env)
    return []
  } catch (fault) {
    if (!(fault instanceof ConfigError)) throw fault
    return fault.problems
  }
}

const upstream = { GENERATION_UPSTREAM_URL: 'http://127.0.0.1:11434/v1' }

const read: readonly (readonly [string, string, string, unknown])[] = [
  ['REDIS_URL', 'redis://:secret@cache:6379/2', 'redisUrl', 'redis://:secret@cache:6379/2'],
  ['GENERATION_UPSTREAM_URL', 'https://llm.example/v1', 'upstreamUrl', 'https://llm.example/v1'],
  ['GENERATION_UPSTREAM_KEY', 'sk-abc', 'upstreamKey', 'sk-abc'],
  ['GENERATION_CONCURRENCY', '7', 'concurrency', 7],
  ['GENERATION_DEMO_TOKENS_PER_SECOND', '2.5', 'demoTokensPerSecond', 2.5],
  ['CONNECTION_POOL_MAX_PER_USER', '4', 'poolPerUser', 4],
  ['CONNECTION_POOL_MAX_GLOBAL', '500', 'poolGlobal', 500],
  ['QUEUE_FAILOVER_ENABLED', 'false', 'failoverEnabled', false],
  ['QUEUE_FAILOVER_TIMEOUT_SECONDS', '0.5', 'failoverTimeoutSeconds', 0.5],
  ['QUEUE_FAILOVER_MAX_RETRIES', '0', 'failoverRetriesMax', 0],
  ['QUEUE_FAILOVER_BASE_DELAY_MS', '200', 'failoverBaseDelayMs', 200],
  ['QUEUE_FAILOVER_MAX_DELAY_MS', '9000', 'failoverMaxDelayMs', 9_000],
  ['QUEUE_FAILOVER_MAX_DEPTH', '20', 'failoverDepthMax', 20],
  ['STREAM_FIRST_TOKEN_SECONDS', '5', 'firstTokenSeconds', 5],
  ['STREAM_IDLE_SECONDS', '6', 'idleSeconds', 6],
  ['STREAM_TOTAL_SECONDS', '700', 'totalSeconds', 700],
  ['STREAM_RETENTION_SECONDS', '60', 'retentionSeconds', 60],
  ['STREAM_DETACH_GRACE_SECONDS', '0', 'detachGraceSeconds', 0],
  ['STREAM_STALL_SECONDS', '3', 'stallSeconds', 3],
  ['STREAM_HEARTBEAT_SECONDS', '15', 'heartbeatSeconds', 15],
]

describe('the settings of generation', () => {
  it('have the defaults that callers build on', () => {
    expect(generationOf({})).toEqual({
      ...{ redisUrl: null, upstreamUrl: null, upstreamKey: null, concurrency: 64, demoTokensPerSecond: 50 },
      ...{ poolPerUser: 3, poolGlobal: 10_000 },
      ...{ failoverEnabled: true, failoverTimeoutSeconds: 30, failoverRetriesMax: 5, failoverDepthMax: 10_000 },
      ...{ failoverBaseDelayMs: 100, failoverMaxDelayMs: 5_000 },
      ...{ firstTokenSeconds: 30, idleSeconds: 60, totalSeconds: 600, retentionSeconds: 3_600 },
      ...{ detachGraceSeconds: 60, stallSeconds: 30, heartbeatSeconds: 12 },
    })
  })

  it.each(read)('%s=%s is read', (name, text, key, value) => {
    const env = name === 'GENERATION_UPSTREAM_KEY' ? upstream : {}
    const { config, sources } = loadConfig({ ...env, [name]: text })
    expect(config.generation).toEqual({ ...generationOf(env), [key]: value })
    expect(sources.get(name)).toBe('environment')
  })

  it('have no name that these tests do not know', () => {
    const known = read.map(([name]) => name).sort()
    expect(
      Object.values(generationSettings)
        .map(({ name }) => name)
        .sort(),
    ).toEqual(known)
  })

  it.each([
    ['REDIS_URL', 'http://cache'],
    ['REDIS_URL', 'cache:6379'],
    ['REDIS_URL', ''],
    ['GENERATION_UPSTREAM_URL', 'ftp://llm/v1'],
    ['GENERATION_UPSTREAM_URL', 'llm.example/v1'],
    ['GENERATION_UPSTREAM_URL', 'https://llm.example/v1?key=1'],
    ['GENERATION_UPSTREAM_URL', 'https://llm.example/v1#a'],
    ['GENERATION_UPSTREAM_URL', 'https://me:pass@llm.example/v1'],
    ['GENERATION_UPSTREAM_KEY', 'two words'],
    ['GENERATION_CONCURRENCY', '0'],
    ['GENERATION_DEMO_TOKENS_PER_SECOND', '0'],
    ['CONNECTION_POOL_MAX_PER_USER', '0'],
    ['CONNECTION_POOL_MAX_GLOBAL', '1.5'],
    ['QUEUE_FAILOVER_ENABLED', '1'],
    ['QUEUE_FAILOVER_TIMEOUT_SECONDS', '0'],
    ['QUEUE_FAILOVER_MAX_RETRIES', '-1'],
    ['QUEUE_FAILOVER_MAX_RETRIES', '101'],
    ['QUEUE_FAILOVER_BASE_DELAY_MS', '0'],
    ['QUEUE_FAILOVER_MAX_DELAY_MS', 'soon'],
    ['QUEUE_FAILOVER_MAX_DEPTH', '0'],
    ['STREAM_FIRST_TOKEN_SECONDS', '0'],
    ['STREAM_IDLE_SECONDS', '-5'],
    ['STREAM_TOTAL_SECONDS', '86401'],
    ['STREAM_RETENTION_SECONDS', '0'],
    ['STREAM_DETACH_GRACE_SECONDS', '-1'],
    ['STREAM_STALL_SECONDS', '0'],
    ['STREAM_HEARTBEAT_SECONDS', '0.5'],
    ['STREAM_HEARTBEAT_SECONDS', '16'],
  ])('%s=%j is refused, and the allowed values are named', (name, text) => {
    const problems = problemsOf({ [name]: text })
    expect(problems.map((problem) => problem.name)).toEqual([name])
    expect(problems[0]?.message).toContain('; allowed: ')
  })

  it.each([
    ['https://llm.example/v1/', 'https://llm.example/v1'],
    ['http://127.0.0.1:8000//', 'http://127.0.0.1:8000'],
  ])('the upstream %s is kept as %s', (given, kept) => {
    expect(generationOf({ GENERATION_UPSTREAM_URL: given }).upstreamUrl).toBe(kept)
  })

  it.each<[Environment, string]>([
    [{ CONNECTION_POOL_MAX_PER_USER: '11', CONNECTION_POOL_MAX_GLOBAL: '10' }, 'CONNECTION_POOL_MAX_PER_USER'],
    [{ CONNECTION_POOL_MAX_PER_USER: '10001' }, 'CONNECTION_POOL_MAX_PER_USER'],
    [{ QUEUE_FAILOVER_BASE_DELAY_MS: '5001' }, 'QUEUE_FAILOVER_BASE_DELAY_MS'],
    [{ QUEUE_FAILOVER_BASE_DELAY_MS: '100', QUEUE_FAILOVER_MAX_DELAY_MS: '99' }, 'QUEUE_FAILOVER_BASE_DELAY_MS'],
    [{ STREAM_FIRST_TOKEN_SECONDS: '601' }, 'STREAM_FIRST_TOKEN_SECONDS'],
    [{ STREAM_FIRST_TOKEN_SECONDS: '30', STREAM_TOTAL_SECONDS: '29.5' }, 'STREAM_FIRST_TOKEN_SECONDS'],
    [{ GENERATION_UPSTREAM_KEY: 'sk-abc' }, 'GENERATION_UPSTREAM_KEY'],
  ])('the contradiction in %j is refused', (env, name) => {
    expect(problemsOf(env).map((problem) => problem.name)).toEqual([name])
  })

  it.each<[Environment, Partial<ReturnType<typeof generationOf>>]>([
    [{ CONNECTION_POOL_MAX_GLOBAL: '2' }, { poolPerUser: 2 }],
    [{ QUEUE_FAILOVER_MAX_DELAY_MS: '50' }, { failoverBaseDelayMs: 50 }],
    [{ STREAM_TOTAL_SECONDS: '10' }, { firstTokenSeconds: 10 }],
    [{ STREAM_FIRST_TOKEN_SECONDS: '10', STREAM_TOTAL_SECONDS: '10' }, { firstTokenSeconds: 10 }],
  ])('%j also lowers what is not set', (env, values) => {
    expect(generationOf(env)).toMatchObject(values)
  })

  it('show no secret', () => {
    const shown = JSON.stringify(
      describeConfig(
        loadConfig({ ...upstream, REDIS_URL: 'redis://:token-one@cache', GENERATION_UPSTREAM_KEY: 'token-two' }),
      ),
    )
    expect(shown).not.toMatch(/token-/)
  })
})
