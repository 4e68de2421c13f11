import { limits } from '@spillway/protocol/wire'
import { generationSettings } from './generation-settings.js'
import { messageSettings } from './message-settings.js'
import { petitionSettings } from './petition-settings.js'
import { routingSettings } from './routing-settings.js'

/** Common to all settings, whatever their type. */
interface Described {
  /** The environment variable. */
  readonly name: string
  /** A second name that is read when the first is not set. */
  readonly fallbackName?: string
  readonly meaning: string
  readonly unit?: string
  /** A secret is never shown: not in `spillway config`, not in an error. */
  readonly secret?: true
}

export type Setting = Described &
  (
    | {
        readonly type: 'integer' | 'number'
        readonly min: number
        readonly max: number
        readonly default: number | null
      }
    | { readonly type: 'boolean'; readonly default: boolean }
    | { readonly type: 'choice'; readonly choices: readonly string[]; readonly default: string }
    | { readonly type: 'choices'; readonly choices: readonly string[]; readonly default: readonly string[] }
    | {
        readonly type: 'text'
        readonly pattern: RegExp
        /** The pattern in words, for the error message. */
        readonly allowed: string
        readonly default: string | null
      }
    | {
        readonly type: 'url'
        readonly protocols: readonly string[]
        /** Paths are appended to it: no query, no fragment; trailing slashes are dropped. */
        readonly base?: true
        readonly default: string | null
      }
    | { readonly type: 'urls'; readonly protocols: readonly string[]; readonly default: readonly string[] | null }
    | { readonly type: 'origins'; readonly wildcard?: true; readonly default: readonly string[] | null }
    | { readonly type: 'hosts'; readonly default: readonly string[] }
    | { readonly type: 'networks'; readonly default: readonly string[] }
    | { readonly type: 'names'; readonly default: readonly string[] | null }
  )

export type SettingsTable = Readonly<Record<string, Readonly<Record<string, Setting>>>>

type Nullable<S, T> = S extends { readonly default: null } ? T | null : T

/** The type of a setting's parsed value, read off its row. */
export type ValueOf<S> = S extends { readonly type: 'integer' | 'number' }
  ? Nullable<S, number>
  : S extends { readonly type: 'boolean' }
    ? boolean
    : S extends { readonly type: 'choice'; readonly choices: readonly (infer C)[] }
      ? C
      : S extends { readonly type: 'choices'; readonly choices: readonly (infer C)[] }
        ? readonly C[]
        : S extends { readonly type: 'origins' | 'hosts' | 'networks' | 'names' | 'urls' }
          ? Nullable<S, readonly string[]>
          : Nullable<S, string>

export type ValuesOf<T extends SettingsTable> = {
  readonly [G in keyof T]: { readonly [K in keyof T[G]]: ValueOf<T[G][K]> }
}

const noNul = /^[^\0]+$/u
const hostName = /^(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?)$/u
// Lower case only, so that the name means the same quoted and unquoted; pg_ is PostgreSQL's own prefix.
const schemaName = /^(?!pg_|information_schema$)[a-z_][a-z0-9_]{0,62}$/u

const dayMs = 86_400_000

/** Every setting of the server. `spillway config` prints this table; nothing else reads the environment. */
export const settings = {
  store: {
    url: {
      name: 'DATABASE_URL',
      type: 'url',
      protocols: ['postgres:', 'postgresql:'],
      default: null,
      meaning: 'PostgreSQL 15 or newer; unset, an embedded server is started in SPILLWAY_DATA_DIR',
    },
    listenUrl: {
      name: 'SPILLWAY_LISTEN_URL',
      type: 'url',
      protocols: ['postgres:', 'postgresql:'],
      default: null,
      meaning: 'direct address of the same database for LISTEN, if DATABASE_URL leads to a pooler in transaction mode',
    },
    schema: {
      name: 'SPILLWAY_DB_SCHEMA',
      type: 'text',
      pattern: schemaName,
      allowed: '1 to 63 of a-z, 0-9 and _, not starting with a digit or pg_',
      default: 'spillway',
      meaning: 'schema of our tables, so that several installations can share one database',
    },
    dataDir: {
      name: 'SPILLWAY_DATA_DIR',
      type: 'text',
      pattern: noNul,
      allowed: 'a folder path',
      default: './.spillway',
      meaning: 'folder of the embedded server',
    },
    poolMax: {
      name: 'SPILLWAY_POOL_MAX',
      type: 'integer',
      min: 2,
      max: 1_000,
      default: 10,
      unit: 'connections',
      meaning: 'connections to the store, per process',
    },
    timeoutMs: {
      name: 'SPILLWAY_STORE_TIMEOUT_MS',
      type: 'integer',
      min: 10,
      max: 600_000,
      default: 2_000,
      unit: 'ms',
      meaning: 'a store call that takes longer counts as failed',
    },
    delayMs: {
      name: 'SPILLWAY_STORE_DELAY_MS',
      type: 'integer',
      min: 0,
      max: 60_000,
      default: 0,
      unit: 'ms',
      meaning: 'slows each write, for overload drills only',
    },
  },
  server: {
    host: {
      name: 'SPILLWAY_HOST',
      type: 'text',
      pattern: hostName,
      allowed: 'an IP address or a host name',
      default: '127.0.0.1',
      meaning: 'address to listen on; other than loopback needs authentication',
    },
    port: {
      name: 'SPILLWAY_PORT',
      fallbackName: 'PORT',
      type: 'integer',
      min: 0,
      max: 65_535,
      default: 7_745,
      meaning: 'port to listen on; 0 takes a free one; PORT is read when this is not set',
    },
    bodyLimitBytes: {
      name: 'SPILLWAY_BODY_LIMIT_BYTES',
      type: 'integer',
      min: 1_024,
      max: 268_435_456,
      default: limits.bodyBytes,
      unit: 'bytes',
      meaning: 'a larger request body is answered 413',
    },
    pageBytesMax: {
      name: 'SPILLWAY_PAGE_BYTES_MAX',
      type: 'integer',
      min: limits.pageBytesMin,
      max: 268_435_456,
      default: limits.pageBytes,
      unit: 'bytes',
      meaning: 'a page of a list, and the payloads of a pop, end at this size; at least one item is sent',
    },
    requestTimeoutMs: {
      name: 'SPILLWAY_REQUEST_TIMEOUT_MS',
      type: 'integer',
      min: 100,
      max: 3_600_000,
      default: 30_000,
      unit: 'ms',
      meaning: 'time to receive a whole request',
    },
    headersTimeoutMs: {
      name: 'SPILLWAY_HEADERS_TIMEOUT_MS',
      type: 'integer',
      min: 100,
      max: 3_600_000,
      default: 10_000,
      unit: 'ms',
      meaning: "time to receive a request's headers",
    },
    connectionsMax: {
      name: 'SPILLWAY_CONNECTIONS_MAX',
      type: 'integer',
      min: 1,
      max: 1_000_000,
      default: 20_000,
      unit: 'connections',
      meaning: 'open client connections; more are closed at once',
    },
    bufferBytesMax: {
      name: 'SPILLWAY_BUFFER_BYTES_MAX',
      type: 'integer',
      min: 8 * 1_048_576,
      max: 64 * 1_073_741_824,
      default: 256 * 1_048_576,
      unit: 'bytes',
      meaning:
        'request bodies and unsent answers held at most, per process; beyond it 503. An eighth is the most that one identity may hold',
    },
    drainSeconds: {
      name: 'SPILLWAY_DRAIN_SECONDS',
      type: 'integer',
      min: 0,
      max: 3_600,
      default: 20,
      unit: 's',
      meaning: 'time that running work gets to finish when the server is stopped',
    },
    trustedProxies: {
      name: 'SPILLWAY_TRUSTED_PROXIES',
      type: 'networks',
      default: [],
      meaning: 'networks whose X-Forwarded-For counts',
    },
    corsOrigins: {
      name: 'SPILLWAY_CORS_ORIGINS',
      type: 'origins',
      wildcard: true,
      default: [],
      meaning: 'web origins that browsers may call from',
    },
    allowedHosts: {
      name: 'SPILLWAY_ALLOWED_HOSTS',
      type: 'hosts',
      default: [],
      meaning:
        'names of this server beside loopback ones, such as that of a proxy; with authentication off, a request for another Host is answered 421',
    },
  },
  process: {
    roles: {
      name: 'SPILLWAY_ROLES',
      type: 'choices',
      choices: ['gateway', 'router', 'worker'],
      default: ['gateway', 'router', 'worker'],
      meaning: 'what this process does',
    },
    logLevel: {
      name: 'SPILLWAY_LOG_LEVEL',
      type: 'choice',
      choices: ['trace', 'debug', 'info', 'warn', 'error', 'fatal', 'silent'],
      default: 'info',
      meaning: 'least severe log line that is written; debug also shows stacks',
    },
  },
  auth: {
    apiKeysFile: {
      name: 'SPILLWAY_API_KEYS',
      type: 'text',
      pattern: noNul,
      allowed: 'the path of a JSON file',
      default: null,
      meaning: 'JSON file of hashed API keys; turns authentication on',
    },
    jwksUrl: {
      name: 'SPILLWAY_JWKS_URL',
      type: 'url',
      protocols: ['https:', 'http:'],
      default: null,
      meaning: 'key set that verifies Bearer JWTs; turns authentication on',
    },
    jwtSecret: {
      name: 'SPILLWAY_JWT_SECRET',
      type: 'text',
      pattern: noNul,
      allowed: 'a shared secret, best 32 bytes or longer',
      default: null,
      secret: true,
      meaning: 'shared secret that verifies Bearer JWTs; turns authentication on',
    },
    jwtIssuer: {
      name: 'SPILLWAY_JWT_ISSUER',
      type: 'text',
      pattern: noNul,
      allowed: 'the iss claim of your identity provider, e.g. https://id.example.com',
      default: null,
      meaning: 'issuer that Bearer JWTs must have; unset: any',
    },
    jwtAudience: {
      name: 'SPILLWAY_JWT_AUDIENCE',
      type: 'text',
      pattern: noNul,
      allowed: 'the aud claim that your identity provider gives to tokens for this server',
      default: null,
      meaning: 'audience that Bearer JWTs must name; required with SPILLWAY_JWKS_URL',
    },
    jwtMaxAgeSeconds: {
      name: 'SPILLWAY_JWT_MAX_AGE_SECONDS',
      type: 'integer',
      min: 1,
      max: 31_536_000,
      default: 86_400,
      unit: 's',
      meaning: 'longest time from iat to exp of a Bearer JWT; exp is always required',
    },
    protectMetrics: {
      name: 'SPILLWAY_PROTECT_METRICS',
      type: 'boolean',
      default: false,
      meaning: 'metrics need the role metrics; health stays open, for probes',
    },
  },
  operations: {
    pendingMax: {
      name: 'SPILLWAY_OPERATIONS_MAX',
      type: 'integer',
      min: 1,
      max: 1_000_000_000,
      default: 1_000_000,
      unit: 'operations',
      meaning: 'pending operations held at most; more are refused with queue_full',
    },
    concurrency: {
      name: 'SPILLWAY_CONCURRENCY',
      type: 'integer',
      min: 1,
      max: 10_000,
      default: 64,
      unit: 'operations',
      meaning: 'operations run at once, per process',
    },
    leaseSeconds: {
      name: 'SPILLWAY_LEASE_SECONDS',
      type: 'integer',
      min: 1,
      max: 3_600,
      default: 15,
      unit: 's',
      meaning: 'a worker that is silent for this long loses its lanes',
    },
    retryBaseMs: {
      name: 'SPILLWAY_RETRY_BASE_MS',
      type: 'integer',
      min: 1,
      max: dayMs,
      default: 1_000,
      unit: 'ms',
      meaning: 'back-off before the first retry; doubles with each',
    },
    retryMaxMs: {
      name: 'SPILLWAY_RETRY_MAX_MS',
      type: 'integer',
      min: 1,
      max: dayMs,
      default: 60_000,
      unit: 'ms',
      meaning: 'longest back-off',
    },
    directWaitMs: {
      name: 'SPILLWAY_DIRECT_WAIT_MS',
      type: 'integer',
      min: 0,
      max: 600_000,
      default: 5_000,
      unit: 'ms',
      meaning: 'a direct run that lasts longer is answered 202 and goes on',
    },
    retentionSeconds: {
      name: 'SPILLWAY_OPERATION_RETENTION_SECONDS',
      type: 'integer',
      min: 60,
      max: 31_536_000,
      default: 3_600,
      unit: 's',
      meaning: 'how long finished operations and their results are kept',
    },
    idempotencyTtlHours: {
      name: 'SPILLWAY_IDEMPOTENCY_TTL_HOURS',
      type: 'integer',
      min: 1,
      max: 8_760,
      default: 24,
      unit: 'h',
      meaning: 'how long an Idempotency-Key is remembered',
    },
    forwardAllow: {
      name: 'SPILLWAY_FORWARD_ALLOW',
      type: 'origins',
      default: null,
      meaning:
        'origins that http.request may call; unset, a server on loopback allows its own; empty allows none; of the own origin only /demo/echo',
    },
  },
  admission: {
    acceptWaitBudgetMs: {
      name: 'SPILLWAY_ACCEPT_WAIT_BUDGET_MS',
      type: 'integer',
      min: 1,
      max: 60_000,
      default: 250,
      unit: 'ms',
      meaning:
        'age of the oldest waiting write that counts as fully busy; a turn of the event loop may last a quarter of it',
    },
    busyQueueAbove: {
      name: 'SPILLWAY_BUSY_QUEUE_ABOVE',
      type: 'number',
      min: 0,
      max: 1,
      default: 0.7,
      unit: 'share',
      meaning: 'busier than this, work is queued instead of run at once',
    },
    pressureLoopDelayMs: {
      name: 'SPILLWAY_PRESSURE_LOOP_DELAY_MS',
      type: 'integer',
      min: 10,
      max: 60_000,
      default: 500,
      unit: 'ms',
      meaning: 'event-loop delay at which pressure is active',
    },
    pressureInflightMax: {
      name: 'SPILLWAY_PRESSURE_INFLIGHT_MAX',
      type: 'integer',
      min: 1,
      max: 1_000_000,
      default: 10_000,
      unit: 'requests',
      meaning: 'requests in flight at which pressure is active',
    },
  },
  petitions: petitionSettings,
  routing: routingSettings,
  messages: messageSettings,
  generation: generationSettings,
} as const satisfies SettingsTable

/** What the `ops` and `dead-letters` commands need to reach a running server. */
export const clientSettings = {
  client: {
    url: {
      name: 'SPILLWAY_URL',
      type: 'url',
      protocols: ['https:', 'http:'],
      default: 'http://127.0.0.1:7745',
      meaning: 'server that ops and dead-letters speak to',
    },
    apiKey: {
      name: 'SPILLWAY_API_KEY',
      type: 'text',
      pattern: /^[\x21-\x7e]+$/u,
      allowed: 'an API key or a JWT: printable ASCII without spaces',
      default: null,
      secret: true,
      meaning: 'credential that ops and dead-letters send',
    },
  },
} as const satisfies SettingsTable

export type LogLevel = (typeof settings.process.logLevel.choices)[number]
