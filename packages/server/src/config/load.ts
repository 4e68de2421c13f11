import { BlockList, isIP } from 'node:net'
import { doubtfulAlerts } from '../workloads/alerts/settings.js'
import { checkGeneration, completeGeneration } from '../workloads/generation/settings.js'
import { checkPetitions, completePetitions, type PetitionsConfig } from '../workloads/petitions/settings.js'
import { checkRouting, doubtfulRouting } from '../workloads/routing/settings.js'
import { isInjectedByKubernetes, isOwnName, nearestName } from './names.js'
import type { Say, Setting, SettingsTable, ValuesOf } from './setting.js'
import { clientSettings, settings } from './settings.js'
import { allowedValues, parseSetting, type SettingValue, showRejected } from './values.js'

export type Environment = Readonly<Record<string, string | undefined>>

/** The environment of this process. Other modules read it here. */
export const processEnvironment = (): Environment => process.env

export type Config = Omit<ValuesOf<typeof settings>, 'petitions'> & {
  readonly petitions: PetitionsConfig
  /** false for `spillway worker` without a port: no socket is opened. */
  readonly listen: boolean
}
export type ClientConfig = ValuesOf<typeof clientSettings>['client']

export type ConfigSource = 'default' | 'environment'

export interface LoadedConfig {
  readonly config: Config
  /** By variable name. */
  readonly sources: ReadonlyMap<string, ConfigSource>
  readonly warnings: readonly string[]
}

export interface ConfigProblem {
  /** The variable; if two contradict each other, the one to check first. */
  readonly name: string
  readonly message: string
}

/** The environment is not a valid configuration. Lists all problems, not only the first. */
export class ConfigError extends Error {
  override readonly name = 'ConfigError'
  readonly code = 'config_invalid'
  readonly problems: readonly ConfigProblem[]

  constructor(problems: readonly ConfigProblem[]) {
    super(`The configuration is not valid:\n${problems.map((problem) => `  ${problem.message}`).join('\n')}`)
    this.problems = problems
  }
}

const knownNames: ReadonlySet<string> = new Set(
  [settings, clientSettings].flatMap((table: SettingsTable) =>
    Object.values(table).flatMap((group) =>
      Object.values(group).flatMap((setting) =>
        setting.fallbackName ? [setting.name, setting.fallbackName] : [setting.name],
      ),
    ),
  ),
)

/** Reads the server's settings. Throws {@link ConfigError} if any is wrong, unknown or contradicts another. */
export function loadConfig(environment: Environment = process.env): LoadedConfig {
  const warnings: string[] = []
  const problems: ConfigProblem[] = []
  const env = withoutInjected(environment, warnings)
  findUnknownNames(env, problems)
  const sources = new Map<string, ConfigSource>()
  const values = readTable(settings, env, sources, problems)
  const config: Config = {
    ...values,
    petitions: completePetitions(values.petitions),
    generation: completeGeneration(values.generation, (name) => sources.get(name) === 'default'),
    listen: true,
  }
  findContradictions(config, problems, new Set(problems.map((problem) => problem.name)))
  if (problems.length > 0) throw new ConfigError(problems)
  return { config, sources, warnings: [...warnings, ...findDoubtful(config)] }
}

/** Reads only the settings of a client command; a wrong server setting does not stop it. */
export function loadClientConfig(environment: Environment = process.env): ClientConfig {
  const problems: ConfigProblem[] = []
  const values = readTable(clientSettings, environment, new Map(), problems)
  if (problems.length > 0) throw new ConfigError(problems)
  return values.client
}

/** Whether errors are shown with their stacks. Works even if the configuration cannot be loaded. */
export function isDebugging(environment: Environment = process.env): boolean {
  const level = environment[settings.process.logLevel.name]
  return level === 'debug' || level === 'trace'
}

/** Whether only this machine can reach a server on this host. A name other than localhost may be anything. */
export function isLoopbackHost(host: string): boolean {
  if (host.toLowerCase() === 'localhost') return true
  const family = isIP(host)
  return family !== 0 && loopback.check(host, family === 4 ? 'ipv4' : 'ipv6')
}

const loopback = new BlockList()
loopback.addSubnet('127.0.0.0', 8, 'ipv4')
loopback.addAddress('::1', 'ipv6')

export function isAuthenticationOn(auth: Config['auth']): boolean {
  return auth.apiKeysFile !== null || auth.jwksUrl !== null || auth.jwtSecret !== null
}

function withoutInjected(environment: Environment, warnings: string[]): Environment {
  const kept: Record<string, string> = {}
  for (const [name, value] of Object.entries(environment)) {
    if (value === undefined) continue
    if (isOwnName(name) && isInjectedByKubernetes(name, value)) {
      warnings.push(`${name} was injected by Kubernetes for a Service and is ignored`)
    } else {
      kept[name] = value
    }
  }
  return kept
}

function findUnknownNames(env: Environment, problems: ConfigProblem[]): void {
  for (const name of Object.keys(env).sort()) {
    if (!isOwnName(name) || knownNames.has(name)) continue
    const meant = nearestName(name, knownNames)
    problems.push({ name, message: `${name} is not a known setting${meant ? `; did you mean ${meant}?` : ''}` })
  }
}

function readTable<T extends SettingsTable>(
  table: T,
  env: Environment,
  sources: Map<string, ConfigSource>,
  problems: ConfigProblem[],
): ValuesOf<T> {
  const groups = Object.entries(table).map(([group, rows]) => {
    const values = Object.entries(rows).map(([key, setting]) => [key, readSetting(setting, env, sources, problems)])
    return [group, Object.fromEntries(values)]
  })
  // The table's rows and their inferred type meet only here: each value was parsed by its own row.
  return Object.fromEntries(groups) as ValuesOf<T>
}

function readSetting(
  setting: Setting,
  env: Environment,
  sources: Map<string, ConfigSource>,
  problems: ConfigProblem[],
): SettingValue {
  const { name, fallbackName } = setting
  const readFrom = env[name] === undefined && fallbackName !== undefined ? fallbackName : name
  const text = env[readFrom]
  sources.set(name, text === undefined ? 'default' : 'environment')
  if (text === undefined) return setting.default
  const value = parseSetting(setting, text)
  if (value !== undefined) return value
  // Empty is not "unset": an empty DATABASE_URL is a secret that failed to arrive, not a request for the embedded server.
  const what = text === '' ? 'is set but empty' : `is ${showRejected(setting, text)}`
  problems.push({ name: readFrom, message: `${readFrom} ${what}; allowed: ${allowedValues(setting)}` })
  return setting.default
}

/** Finds settings that are valid alone but wrong together. Skips those already known to be wrong. */
function findContradictions(config: Config, problems: ConfigProblem[], wrong: ReadonlySet<string>): void {
  const say: Say = (names, message) => {
    if (!names.some((name) => wrong.has(name))) problems.push({ name: names[0] ?? '', message })
  }
  checkAccess(config, say)
  checkPetitions(config.petitions, say)
  checkRouting(config.routing, say)
  checkGeneration(config.generation, say)
  checkLimits(config, say)
}

function checkAccess({ server, auth, store }: Config, say: Say): void {
  const authNames = ['SPILLWAY_API_KEYS', 'SPILLWAY_JWKS_URL', 'SPILLWAY_JWT_SECRET']
  if (!isAuthenticationOn(auth)) {
    if (!isLoopbackHost(server.host)) {
      say(
        ['SPILLWAY_HOST', ...authNames],
        `SPILLWAY_HOST is ${JSON.stringify(server.host)}, which others can reach, but no authentication is configured; set one of ${authNames.join(', ')}, or a loopback host such as 127.0.0.1`,
      )
    }
    if (auth.protectMetrics) {
      say(
        ['SPILLWAY_PROTECT_METRICS', ...authNames],
        `SPILLWAY_PROTECT_METRICS is true, but no authentication is configured; set one of ${authNames.join(', ')}`,
      )
    }
  }
  if (auth.jwksUrl !== null && auth.jwtAudience === null) {
    say(
      ['SPILLWAY_JWKS_URL', 'SPILLWAY_JWT_AUDIENCE'],
      'SPILLWAY_JWKS_URL is set without SPILLWAY_JWT_AUDIENCE: tokens that the same issuer made for other services would be accepted; set it to the audience (aud) of tokens for this server',
    )
  }
  if (store.listenUrl !== null && store.url === null) {
    say(
      ['SPILLWAY_LISTEN_URL', 'DATABASE_URL'],
      'SPILLWAY_LISTEN_URL is set without DATABASE_URL: the embedded server would not be the one that is listened to',
    )
  }
}

function checkLimits({ server, operations }: Config, say: Say): void {
  if (operations.retryBaseMs > operations.retryMaxMs) {
    say(
      ['SPILLWAY_RETRY_BASE_MS', 'SPILLWAY_RETRY_MAX_MS'],
      `SPILLWAY_RETRY_BASE_MS (${operations.retryBaseMs}) is more than SPILLWAY_RETRY_MAX_MS (${operations.retryMaxMs})`,
    )
  }
  if (server.bodyLimitBytes > server.bufferBytesMax / 8) {
    say(
      ['SPILLWAY_BODY_LIMIT_BYTES', 'SPILLWAY_BUFFER_BYTES_MAX'],
      `SPILLWAY_BODY_LIMIT_BYTES (${server.bodyLimitBytes}) is more than an eighth of SPILLWAY_BUFFER_BYTES_MAX (${server.bufferBytesMax}), which is the most that one identity may hold`,
    )
  }
  if (server.headersTimeoutMs > server.requestTimeoutMs) {
    say(
      ['SPILLWAY_HEADERS_TIMEOUT_MS', 'SPILLWAY_REQUEST_TIMEOUT_MS'],
      `SPILLWAY_HEADERS_TIMEOUT_MS (${server.headersTimeoutMs}) is more than SPILLWAY_REQUEST_TIMEOUT_MS (${server.requestTimeoutMs})`,
    )
  }
}

function findDoubtful({ store, auth, routing, alerts, process: { roles } }: Config): string[] {
  const warnings = [...doubtfulRouting(routing, roles), ...doubtfulAlerts(alerts)]
  if (store.delayMs > 0) {
    warnings.push(`SPILLWAY_STORE_DELAY_MS slows every write by ${store.delayMs} ms: for drills, never in production`)
  }
  if (auth.jwtSecret !== null && Buffer.byteLength(auth.jwtSecret) < 32) {
    warnings.push('SPILLWAY_JWT_SECRET is shorter than the 32 bytes that HS256 asks for: it can be guessed')
  }
  if (auth.jwksUrl?.startsWith('http:') && !isLoopbackHost(new URL(auth.jwksUrl).hostname.replace(/^\[|\]$/gu, ''))) {
    warnings.push('SPILLWAY_JWKS_URL is not https: anyone on the network path can replace the keys')
  }
  return warnings
}
