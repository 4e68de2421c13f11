import { describe, expect, expectTypeOf, it } from 'vitest'
import {
  type Config,
  ConfigError,
  describeConfig,
  type Environment,
  isLoopbackHost,
  loadClientConfig,
  loadConfig,
} from './index.js'
import { settings } from './settings.js'

function problemsOf(env: Environment): readonly { name: string; message: string }[] {
  try {
    loadConfig(env)
  } catch (error) {
    if (error instanceof ConfigError) return error.problems
    throw error
  }
  return []
}

const namesOf = (env: Environment) => problemsOf(env).map((problem) => problem.name)

describe('loadConfig', () => {
  it('gives every default from an empty environment', () => {
    const { config, sources, warnings } = loadConfig({})
    expect(config.server).toMatchObject({ host: '127.0.0.1', port: 7745, bodyLimitBytes: 1_048_576 })
    expect(config.store).toMatchObject({ url: null, schema: 'spillway', dataDir: './.spillway', poolMax: 10 })
    expect(config.process.roles).toEqual(['gateway', 'router', 'worker'])
    expect(config.operations).toMatchObject({ leaseSeconds: 15, retryMaxMs: 60_000, forwardAllow: null })
    expect(new Set(sources.values())).toEqual(new Set(['default']))
    expect(warnings).toEqual([])
  })

  it('infers the types from the table', () => {
    expectTypeOf<Config['server']['port']>().toEqualTypeOf<number>()
    expectTypeOf<Config['store']['url']>().toEqualTypeOf<string | null>()
    expectTypeOf<Config['process']['roles']>().toEqualTypeOf<readonly ('gateway' | 'router' | 'worker')[]>()
    expectTypeOf<Config['operations']['forwardAllow']>().toEqualTypeOf<readonly string[] | null>()
  })

  it('has defaults that its own rules accept', () => {
    const env: Record<string, string> = {}
    for (const group of Object.values(settings)) {
      for (const setting of Object.values(group)) {
        if (setting.default !== null) env[setting.name] = String(setting.default)
      }
    }
    expect(loadConfig(env).config).toEqual(loadConfig({}).config)
  })

  it('reads values of each type', () => {
    const { config, sources } = loadConfig({
      DATABASE_URL: 'postgres://u:p@db/app',
      SPILLWAY_ROLES: 'worker, gateway',
      SPILLWAY_BUSY_QUEUE_ABOVE: '0.5',
      SPILLWAY_CORS_ORIGINS: 'https://a.example/,https://b.example:8443',
      SPILLWAY_TRUSTED_PROXIES: '10.0.0.0/8,::1',
      SPILLWAY_FORWARD_ALLOW: '',
    })
    expect(config.store.url).toBe('postgres://u:p@db/app')
    expect(config.process.roles).toEqual(['worker', 'gateway'])
    expect(config.admission.busyQueueAbove).toBe(0.5)
    expect(config.server.corsOrigins).toEqual(['https://a.example', 'https://b.example:8443'])
    expect(config.server.trustedProxies).toEqual(['10.0.0.0/8', '::1'])
    expect(config.operations.forwardAllow).toEqual([])
    expect(sources.get('SPILLWAY_ROLES')).toBe('environment')
    expect(sources.get('SPILLWAY_HOST')).toBe('default')
  })

  it('takes the address of a socket', () => {
    const url = 'postgres://user@/app?host=/run/postgresql'
    expect(loadConfig({ DATABASE_URL: url }).config.store.url).toBe(url)
  })

  it.each([
    ['SPILLWAY_PORT', '65536'],
    ['SPILLWAY_PORT', '-1'],
    ['SPILLWAY_PORT', '80.5'],
    ['SPILLWAY_PORT', '0x50'],
    ['SPILLWAY_PORT', ''],
    ['SPILLWAY_LEASE_SECONDS', '0'],
    ['SPILLWAY_BUSY_QUEUE_ABOVE', '1.01'],
    ['SPILLWAY_PROTECT_METRICS', 'yes'],
    ['SPILLWAY_ROLES', 'worker,cook'],
    ['SPILLWAY_ROLES', ','],
    ['SPILLWAY_LOG_LEVEL', 'loud'],
    ['SPILLWAY_DB_SCHEMA', 'pg_mine'],
    ['SPILLWAY_DB_SCHEMA', 'a"; drop'],
    ['SPILLWAY_TRUSTED_PROXIES', '10.0.0.0/33'],
    ['SPILLWAY_TRUSTED_PROXIES', 'localhost'],
    ['SPILLWAY_TRUSTED_PROXIES', '10.0.0.0/8/1'],
    ['SPILLWAY_TRUSTED_PROXIES', '::/129'],
    ['SPILLWAY_TRUSTED_PROXIES', '1.2.3.4/x'],
    ['SPILLWAY_FORWARD_ALLOW', 'https://a.example/path'],
    ['SPILLWAY_FORWARD_ALLOW', '*'],
    ['SPILLWAY_HOST', 'not a host'],
    ['DATABASE_URL', 'mysql://db/app'],
    ['DATABASE_URL', ''],
    ['SPILLWAY_LISTEN_URL', 'http://db/app'],
    // Without DATABASE_URL.
    ['SPILLWAY_LISTEN_URL', 'postgres://db/app'],
  ])('refuses %s=%j', (name, value) => {
    expect(namesOf({ [name]: value })).toEqual([name])
  })

  it('lists every problem with its value and the allowed values', () => {
    const problems = problemsOf({ SPILLWAY_PORT: 'eighty', SPILLWAY_LEASE_SECONDS: '1e3', SPILLWAY_HSOT: 'x' })
    expect(problems.map((problem) => problem.name).sort()).toEqual([
      'SPILLWAY_HSOT',
      'SPILLWAY_LEASE_SECONDS',
      'SPILLWAY_PORT',
    ])
    const port = problems.find((problem) => problem.name === 'SPILLWAY_PORT')
    expect(port?.message).toContain('"eighty"')
    expect(port?.message).toContain('0 to 65535')
  })

  it('takes port 0, and PORT only when SPILLWAY_PORT is not set', () => {
    expect(loadConfig({ SPILLWAY_PORT: '0' }).config.server.port).toBe(0)
    const fallback = loadConfig({ PORT: '8080' })
    expect(fallback.config.server.port).toBe(8080)
    expect(fallback.sources.get('SPILLWAY_PORT')).toBe('environment')
    expect(loadConfig({ PORT: 'rubbish', SPILLWAY_PORT: '9' }).config.server.port).toBe(9)
    expect(namesOf({ PORT: 'rubbish' })).toEqual(['PORT'])
  })

  it.each([
    'SPILLWAY_PROT',
    'PETITION_QUEUE_TRESHOLD',
    'ROUTER_X',
    'QUEUE_FAILOVER_X',
    'GENERATION_X',
    'CONNECTION_POOL_X',
  ])('refuses unknown %s', (name) => {
    expect(namesOf({ [name]: '1' })).toEqual([name])
  })

  it('suggests the name that was meant', () => {
    expect(problemsOf({ SPILLWAY_PROT: '1' })[0]?.message).toContain('SPILLWAY_PORT')
    expect(problemsOf({ SPILLWAY_LEASE_SECS: '1' })[0]?.message).toContain('SPILLWAY_LEASE_SECONDS')
  })

  it('leaves the variables of others alone', () => {
    const foreign = { PATH: '/bin', HOME: '/root', GATEWAY_INTERFACE: 'CGI/1.1', STREAM_API_SECRET: 'x' }
    expect(loadConfig(foreign).warnings).toEqual([])
  })

  it('ignores what Kubernetes injects for a Service, with a warning each', () => {
    const { config, warnings } = loadConfig({
      SPILLWAY_PORT: 'tcp://10.0.0.1:7745',
      SPILLWAY_PORT_7745_TCP: 'tcp://10.0.0.1:7745',
      SPILLWAY_PORT_7745_TCP_ADDR: '10.0.0.1',
      SPILLWAY_SERVICE_HOST: '10.0.0.1',
      SPILLWAY_SERVICE_PORT: '7745',
      SPILLWAY_SERVICE_PORT_HTTP: '7745',
      ROUTER_DB_PORT: 'tcp://10.0.0.2:5432',
      PORT: '9000',
    })
    expect(config.server.port).toBe(9000)
    expect(warnings).toHaveLength(7)
    expect(warnings[0]).toContain('SPILLWAY_PORT')
  })

  it('refuses a reachable host without authentication, and takes it with', () => {
    for (const host of ['0.0.0.0', '::', '192.168.1.5', 'example.com']) {
      expect(namesOf({ SPILLWAY_HOST: host })).toEqual(['SPILLWAY_HOST'])
    }
    expect(loadConfig({ SPILLWAY_HOST: '0.0.0.0', SPILLWAY_API_KEYS: 'keys.json' }).config.server.host).toBe('0.0.0.0')
    const jwks = { SPILLWAY_JWKS_URL: 'https://id.example/jwks', SPILLWAY_JWT_AUDIENCE: 'spillway' }
    expect(namesOf({ SPILLWAY_HOST: '0.0.0.0', ...jwks })).toEqual([])
    expect(namesOf({ SPILLWAY_HOST: '0.0.0.0', SPILLWAY_JWT_SECRET: 'x'.repeat(32) })).toEqual([])
  })

  it.each([
    [{ SPILLWAY_RETRY_BASE_MS: '70000' }, 'SPILLWAY_RETRY_BASE_MS'],
    [{ SPILLWAY_REQUEST_TIMEOUT_MS: '5000' }, 'SPILLWAY_HEADERS_TIMEOUT_MS'],
    [{ SPILLWAY_PROTECT_METRICS: 'true' }, 'SPILLWAY_PROTECT_METRICS'],
    [{ SPILLWAY_BUFFER_BYTES_MAX: '16777216', SPILLWAY_BODY_LIMIT_BYTES: '2097153' }, 'SPILLWAY_BODY_LIMIT_BYTES'],
    [{ SPILLWAY_BUFFER_BYTES_MAX: '8388607' }, 'SPILLWAY_BUFFER_BYTES_MAX'],
    [{ SPILLWAY_JWKS_URL: 'https://id.example/jwks' }, 'SPILLWAY_JWKS_URL'],
  ])('refuses the contradiction in %j', (env, name) => {
    expect(namesOf(env)).toEqual([name])
  })

  it('says a slowed store and a weak secret loudly', () => {
    const { warnings } = loadConfig({ SPILLWAY_STORE_DELAY_MS: '100', SPILLWAY_JWT_SECRET: 'short' })
    expect(warnings.join('\n')).toContain('SPILLWAY_STORE_DELAY_MS')
    expect(warnings.join('\n')).toContain('SPILLWAY_JWT_SECRET')
  })

  it('never shows a secret or a password', () => {
    const env = {
      SPILLWAY_JWT_SECRET: 'tell-nobody\0',
      DATABASE_URL: 'postgress://u:tell-nobody@db/app',
      SPILLWAY_API_KEY: 'tell-nobody',
    }
    const text = problemsOf(env)
      .map((problem) => problem.message)
      .join('\n')
    expect(text).toContain('DATABASE_URL')
    expect(text).toContain('SPILLWAY_JWT_SECRET')
    expect(text).not.toContain('tell-nobody')
  })
})

describe('describeConfig', () => {
  it('has a row per setting, masks secrets and passwords, and shows the source', () => {
    const rows = describeConfig(
      loadConfig({
        DATABASE_URL: 'postgres://u:p%40ss@rd@db/app?sslmode=require&password=other',
        SPILLWAY_JWT_SECRET: 's'.repeat(40),
      }),
    )
    const row = (name: string) => rows.find((one) => one.name === name)
    expect(row('DATABASE_URL')).toMatchObject({
      value: 'postgres://u:***@db/app?sslmode=require&password=***',
      source: 'environment',
    })
    expect(row('SPILLWAY_JWT_SECRET')).toMatchObject({ value: '***', source: 'environment' })
    expect(row('SPILLWAY_PORT')).toMatchObject({ value: '7745', source: 'default', default: '7745' })
    expect(row('SPILLWAY_API_KEYS')).toMatchObject({ value: '' })
    expect(rows).toHaveLength(Object.values(settings).flatMap((group) => Object.keys(group)).length)
    expect(rows.every((one) => one.meaning.length > 10)).toBe(true)
  })
})

describe('the petition settings', () => {
  const petitionsOf = (env: Environment) => loadConfig(env).config.petitions
  const messageOf = (env: Environment) => problemsOf(env)[0]?.message ?? ''
  const optional = [
    ['PETITION_RATE_LIMIT_REALM_PER_HOUR', 'rateRealmPerHour'],
    ['PETITION_RATE_LIMIT_GLOBAL_PER_HOUR', 'rateGlobalPerHour'],
    ['PETITION_RATE_LIMIT_GENERAL_PER_HOUR', 'rateGeneralPerHour'],
    ['PETITION_RATE_LIMIT_CESSATION_PER_HOUR', 'rateCessationPerHour'],
    ['PETITION_RATE_LIMIT_GRIEVANCE_PER_HOUR', 'rateGrievancePerHour'],
    ['PETITION_RATE_LIMIT_COLLABORATION_PER_HOUR', 'rateCollaborationPerHour'],
    ['PETITION_RATE_LIMIT_META_PER_HOUR', 'rateMetaPerHour'],
  ] as const
  const numbers = [
    ['PETITION_QUEUE_THRESHOLD', 'queueThreshold'],
    ['PETITION_QUEUE_HYSTERESIS', 'queueHysteresis'],
    ['PETITION_QUEUE_CACHE_TTL', 'queueCacheTtl'],
    ['PETITION_RETRY_AFTER', 'retryAfter'],
    ['PETITION_RATE_LIMIT_PER_HOUR', 'ratePerHour'],
    ['PETITION_RATE_LIMIT_WINDOW_MINUTES', 'rateWindowMinutes'],
    ['PETITION_RATE_LIMIT_TTL_HOURS', 'rateTtlHours'],
    ...optional,
  ] as const

  it('have the defaults that callers build on', () => {
    expect(petitionsOf({})).toEqual({
      realms: null,
      queueThreshold: 10_000,
      queueHysteresis: 500,
      queueCacheTtl: 5,
      retryAfter: 60,
      ratePerHour: 10,
      rateWindowMinutes: 60,
      rateTtlHours: 2,
      ...Object.fromEntries(optional.map(([, key]) => [key, null])),
    })
  })

  it.each(numbers)('read %s, which changes %s', (name, key) => {
    const { config, sources } = loadConfig({ [name]: '7' })
    const computed = key === 'queueThreshold' ? { queueHysteresis: 0 } : {}
    expect(config.petitions).toEqual({ ...petitionsOf({}), ...computed, [key]: 7 })
    expect(sources.get(name)).toBe('environment')
  })

  it('read PETITION_REALMS as names, each once, spaces around them dropped', () => {
    expect(petitionsOf({ PETITION_REALMS: 'north, south sea,north' }).realms).toEqual(['north', 'south sea'])
    const longest = '🜁'.repeat(100)
    expect(petitionsOf({ PETITION_REALMS: longest }).realms).toEqual([longest])
  })

  it('have no name that these tests do not know', () => {
    const known = ['PETITION_REALMS', ...numbers.map(([name]) => name)].sort()
    const names = Object.values(settings.petitions).map((setting) => setting.name)
    expect(names.sort()).toEqual(known)
  })

  it.each([
    ['10', 0],
    ['100', 5],
    ['2000', 100],
    ['9999', 499],
    ['10000', 500],
    ['1000000', 500],
  ])('compute the hysteresis of a threshold of %s', (threshold, hysteresis) => {
    expect(petitionsOf({ PETITION_QUEUE_THRESHOLD: threshold }).queueHysteresis).toBe(hysteresis)
  })

  it.each([
    ['5', 2],
    ['60', 2],
    ['90', 2.5],
    ['10080', 169],
  ])('compute how long counts are kept for a window of %s minutes', (window, hours) => {
    expect(petitionsOf({ PETITION_RATE_LIMIT_WINDOW_MINUTES: window }).rateTtlHours).toBe(hours)
  })

  it.each([
    ['PETITION_QUEUE_THRESHOLD', '0'],
    ['PETITION_QUEUE_THRESHOLD', '1.5'],
    ['PETITION_QUEUE_THRESHOLD', 'many'],
    ['PETITION_QUEUE_HYSTERESIS', '-1'],
    ['PETITION_QUEUE_CACHE_TTL', '-0.1'],
    ['PETITION_QUEUE_CACHE_TTL', '3601'],
    ['PETITION_RETRY_AFTER', '0'],
    ['PETITION_RETRY_AFTER', '86401'],
    ['PETITION_RATE_LIMIT_PER_HOUR', '0'],
    ['PETITION_RATE_LIMIT_PER_HOUR', '1e3'],
    ['PETITION_RATE_LIMIT_WINDOW_MINUTES', '0'],
    ['PETITION_RATE_LIMIT_WINDOW_MINUTES', '10081'],
    ['PETITION_RATE_LIMIT_TTL_HOURS', '0'],
    ...optional.map(([name]) => [name, '0']),
    ['PETITION_REALMS', ''],
    ['PETITION_REALMS', ' , '],
    ['PETITION_REALMS', 'r'.repeat(101)],
  ])('refuse %s=%j, and name the allowed values', (name = '', value = '') => {
    expect(namesOf({ [name]: value })).toEqual([name])
    expect(messageOf({ [name]: value })).toMatch(new RegExp(`^${name} is .*; allowed: `, 's'))
  })

  it.each<Environment>([
    { PETITION_QUEUE_HYSTERESIS: '10000' },
    { PETITION_QUEUE_THRESHOLD: '100', PETITION_QUEUE_HYSTERESIS: '100' },
    { PETITION_QUEUE_THRESHOLD: '100', PETITION_QUEUE_HYSTERESIS: '101' },
  ])('refuse a hysteresis that is not less than the threshold: %j', (env) => {
    expect(namesOf(env)).toEqual(['PETITION_QUEUE_HYSTERESIS'])
    expect(messageOf(env)).toMatch(/PETITION_QUEUE_HYSTERESIS \(\d+\) must be less than PETITION_QUEUE_THRESHOLD/)
    expect(namesOf({ ...env, PETITION_QUEUE_HYSTERESIS: '99' })).toEqual([])
  })

  it.each<Environment>([
    { PETITION_RATE_LIMIT_TTL_HOURS: '1' },
    { PETITION_RATE_LIMIT_TTL_HOURS: '2', PETITION_RATE_LIMIT_WINDOW_MINUTES: '120' },
    { PETITION_RATE_LIMIT_TTL_HOURS: '2', PETITION_RATE_LIMIT_WINDOW_MINUTES: '600' },
  ])('refuse to forget counts while they count: %j', (env) => {
    expect(namesOf(env)).toEqual(['PETITION_RATE_LIMIT_TTL_HOURS'])
    expect(messageOf(env)).toMatch(/PETITION_RATE_LIMIT_TTL_HOURS \(\d\) must be more than the window of \d+ minutes/)
    expect(namesOf({ ...env, PETITION_RATE_LIMIT_TTL_HOURS: '10.5' })).toEqual([])
  })

  it('refuse an unknown name, with the one that was meant', () => {
    expect(messageOf({ PETITION_QUEUE_TRESHOLD: '5' })).toContain('PETITION_QUEUE_THRESHOLD')
    expect(messageOf({ PETITION_RATE_LIMIT_MTEA_PER_HOUR: '5' })).toContain('PETITION_RATE_LIMIT_META_PER_HOUR')
    expect(namesOf({ PETITION_COLOUR: 'red' })).toEqual(['PETITION_COLOUR'])
  })

  it('are described with the computed values of unset ones', () => {
    const rows = describeConfig(
      loadConfig({ PETITION_QUEUE_THRESHOLD: '200', PETITION_RATE_LIMIT_WINDOW_MINUTES: '90', PETITION_REALMS: 'a,b' }),
    )
    const row = (name: string) => rows.find((one) => one.name === name)
    expect(row('PETITION_QUEUE_HYSTERESIS')).toMatchObject({ value: '10', source: 'default', unit: 'petitions' })
    expect(row('PETITION_RATE_LIMIT_TTL_HOURS')).toMatchObject({ value: '2.5', source: 'default', unit: 'h' })
    expect(row('PETITION_QUEUE_THRESHOLD')).toMatchObject({ value: '200', source: 'environment', default: '10000' })
    expect(row('PETITION_REALMS')).toMatchObject({ value: 'a,b', source: 'environment' })
    expect(row('PETITION_RATE_LIMIT_META_PER_HOUR')).toMatchObject({ value: '', source: 'default' })
  })
})

describe('loadClientConfig', () => {
  it('has a default address, reads its two variables, and is not stopped by a wrong server setting', () => {
    expect(loadClientConfig({ SPILLWAY_PORT: 'rubbish' })).toEqual({ url: 'http://127.0.0.1:7745', apiKey: null })
    expect(loadClientConfig({ SPILLWAY_URL: 'https://q.example', SPILLWAY_API_KEY: 'k' })).toEqual({
      url: 'https://q.example',
      apiKey: 'k',
    })
    expect(() => loadClientConfig({ SPILLWAY_URL: 'ftp://q' })).toThrow(ConfigError)
  })
})

describe('isLoopbackHost', () => {
  it.each(['127.0.0.1', '127.9.9.9', '::1', 'localhost', 'LOCALHOST', '::ffff:127.0.0.1'])('takes %s', (host) => {
    expect(isLoopbackHost(host)).toBe(true)
  })
  it.each(['0.0.0.0', '::', '10.0.0.1', 'localhost.example.com', '::ffff:10.0.0.1'])('does not take %s', (host) => {
    expect(isLoopbackHost(host)).toBe(false)
  })
})
