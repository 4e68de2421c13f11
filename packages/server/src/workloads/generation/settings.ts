import { limits } from '@spillway/protocol/wire'
import type { Say, Setting, ValuesIn } from '../../config/setting.js'

const count = (name: string, byDefault: number, max: number, unit: string, meaning: string) =>
  ({ name, type: 'integer', min: 1, max, default: byDefault, unit, meaning }) as const

const seconds = (name: string, byDefault: number, meaning: string) =>
  ({ name, type: 'number', min: 0.1, max: 86_400, default: byDefault, unit: 's', meaning }) as const

const delayMs = (name: string, byDefault: number, meaning: string) =>
  ({ name, type: 'integer', min: 1, max: 3_600_000, default: byDefault, unit: 'ms', meaning }) as const

/** The generation workload, with the variable names that its operators know. */
export const generationSettings = {
  redisUrl: {
    name: 'REDIS_URL',
    type: 'url',
    protocols: ['redis:', 'rediss:'],
    default: null,
    secret: true,
    meaning: 'Redis that keeps the output of streams; unset, PostgreSQL keeps it',
  },
  upstreamUrl: {
    name: 'GENERATION_UPSTREAM_URL',
    type: 'url',
    protocols: ['http:', 'https:'],
    base: true,
    default: null,
    meaning:
      "base URL of an OpenAI-compatible server, as OpenAI's SDKs take it (ends in /v1); unset, a built-in demo model answers",
  },
  upstreamKey: {
    name: 'GENERATION_UPSTREAM_KEY',
    type: 'text',
    pattern: /^[\x21-\x7e]{1,4096}$/u,
    allowed: '1 to 4,096 printable ASCII characters without spaces',
    default: null,
    secret: true,
    meaning: 'key that is sent to the upstream as Bearer',
  },
  concurrency: count(
    'GENERATION_CONCURRENCY',
    64,
    100_000,
    'generations',
    'generations run at once, per process; beside the other operations',
  ),
  demoTokensPerSecond: {
    name: 'GENERATION_DEMO_TOKENS_PER_SECOND',
    type: 'number',
    min: 0.1,
    max: 100_000,
    default: 50,
    unit: 'tokens/s',
    meaning: 'how fast the demo model answers',
  },
  poolPerUser: count(
    'CONNECTION_POOL_MAX_PER_USER',
    3,
    1_000_000,
    'streams',
    'streams of one user that run directly at once, over all instances; more go to the queue, from which as many again may run. Unset, never more than of all',
  ),
  poolGlobal: count(
    'CONNECTION_POOL_MAX_GLOBAL',
    10_000,
    1_000_000,
    'streams',
    'streams of all users together that begin at once, over all instances',
  ),
  failoverEnabled: {
    name: 'QUEUE_FAILOVER_ENABLED',
    type: 'boolean',
    default: true,
    meaning: 'streams that cannot begin at once wait in the queue; if not, they are refused (429 or 503)',
  },
  failoverTimeoutSeconds: seconds(
    'QUEUE_FAILOVER_TIMEOUT_SECONDS',
    30,
    'a stream that has waited this long in the queue for its first token fails',
  ),
  failoverRetriesMax: {
    name: 'QUEUE_FAILOVER_MAX_RETRIES',
    type: 'integer',
    min: 0,
    max: limits.maxRetriesMax,
    default: 5,
    unit: 'retries',
    meaning: 'how often a stream is tried again when the upstream fails before the first token',
  },
  failoverBaseDelayMs: delayMs(
    'QUEUE_FAILOVER_BASE_DELAY_MS',
    100,
    'back-off before the first of these retries; doubles with each. Unset, never more than the longest',
  ),
  failoverMaxDelayMs: delayMs('QUEUE_FAILOVER_MAX_DELAY_MS', 5_000, 'longest back-off between these retries'),
  failoverDepthMax: count(
    'QUEUE_FAILOVER_MAX_DEPTH',
    10_000,
    100_000_000,
    'streams',
    'streams that wait in the queue at most, over all instances; more are refused with 503',
  ),
  firstTokenSeconds: seconds(
    'STREAM_FIRST_TOKEN_SECONDS',
    30,
    'how long the upstream may take for its first token. Unset, never longer than the whole stream',
  ),
  idleSeconds: seconds('STREAM_IDLE_SECONDS', 60, 'how long the upstream may be silent between tokens'),
  totalSeconds: seconds('STREAM_TOTAL_SECONDS', 600, 'how long one generation may last'),
  retentionSeconds: {
    name: 'STREAM_RETENTION_SECONDS',
    type: 'integer',
    min: 1,
    max: 31_536_000,
    default: 3_600,
    unit: 's',
    meaning: 'how long a stream can be resumed and read again',
  },
  detachGraceSeconds: {
    name: 'STREAM_DETACH_GRACE_SECONDS',
    type: 'number',
    min: 0,
    max: 86_400,
    default: 60,
    unit: 's',
    meaning: 'a native stream that nobody reads goes on for so long, and can be resumed',
  },
  stallSeconds: seconds('STREAM_STALL_SECONDS', 30, 'a reader that takes nothing for so long is closed; it can resume'),
  heartbeatSeconds: {
    name: 'STREAM_HEARTBEAT_SECONDS',
    type: 'number',
    min: 1,
    max: 15,
    default: 12,
    unit: 's',
    meaning: 'a silent stream shows so often that it is alive',
  },
} as const satisfies Readonly<Record<string, Setting>>

type GenerationConfig = ValuesIn<typeof generationSettings>

/** Limits inside others, with their environment variables. */
const pairs = (
  [
    ['poolPerUser', 'poolGlobal'],
    ['failoverBaseDelayMs', 'failoverMaxDelayMs'],
    ['firstTokenSeconds', 'totalSeconds'],
  ] as const
).map(([inner, outer]) => {
  return { inner, outer, names: [generationSettings[inner].name, generationSettings[outer].name] as const }
})

/** A lower outer limit lowers the defaults inside it; a value set above it is a contradiction. */
export function completeGeneration(given: GenerationConfig, isDefault: (name: string) => boolean): GenerationConfig {
  const lowered = pairs
    .filter(({ names }) => isDefault(names[0]))
    .map(({ inner, outer }) => [inner, Math.min(given[inner], given[outer])])
  return { ...given, ...Object.fromEntries(lowered) }
}

export function checkGeneration(generation: GenerationConfig, say: Say): void {
  for (const { inner, outer, names } of pairs) {
    const [value, limit] = [generation[inner], generation[outer]]
    if (value > limit) say(names, `${names[0]} (${value}) is more than ${names[1]} (${limit})`)
  }
  if (generation.upstreamKey !== null && generation.upstreamUrl === null) {
    say(
      ['GENERATION_UPSTREAM_KEY', 'GENERATION_UPSTREAM_URL'],
      'GENERATION_UPSTREAM_KEY is set without GENERATION_UPSTREAM_URL: the demo model would answer, and the key be sent to nobody',
    )
  }
}
