import type { Say, Setting, ValuesIn } from '../../config/setting.js'

const integer = <const Name extends string>(
  name: Name,
  byDefault: number,
  meaning: string,
  { unit, min = 1, max = 100_000_000 }: { unit?: string; min?: number; max?: number } = {},
) => ({ name, type: 'integer', min, max, default: byDefault, ...(unit !== undefined && { unit }), meaning }) as const

const messages = { unit: 'messages' }
const milliseconds = { unit: 'ms' }
const perMinute = { unit: 'requests', max: 10_000_000 }

/** The routing workload, gateway and router, with the variable names that their operators know. */
export const routingSettings = {
  natsUrls: {
    name: 'NATS_URL',
    type: 'urls',
    protocols: ['nats:', 'tls:'],
    default: null,
    secret: true,
    meaning:
      'NATS with JetStream, the intake of the routers (servers of a cluster separated by commas); unset, the operation queue plays that part',
  },
  maxDeliver: integer('ROUTER_MAX_DELIVER', 3, 'how often a message is tried before it is dead-lettered', {
    max: 1_000,
  }),
  concurrency: integer('ROUTER_CONCURRENCY', 600, 'messages that a router works on at once', messages),
  simulateDelayMs: integer('ROUTER_SIMULATE_DELAY_MS', 0, 'slows each message, for drills; never in production', {
    ...{ unit: 'ms', min: 0, max: 600_000 },
  }),
  policy: {
    name: 'ROUTER_BACKPRESSURE_POLICY',
    type: 'choice',
    choices: ['any', 'all'],
    default: 'any',
    meaning: 'active when any signal is at overload, or when backlog and latency are together',
  },
  retryAfterSeconds: integer(
    'ROUTER_BACKPRESSURE_RETRY_AFTER_SECONDS',
    30,
    'base of Retry-After while the router is overloaded',
    { unit: 's', max: 86_400 },
  ),
  queueWarn: integer('ROUTER_QUEUE_WARN', 10, 'backlog (pending and handed out) worth a look', messages),
  queueCrit: integer('ROUTER_QUEUE_CRIT', 100, 'backlog from which rate limits are reduced', messages),
  queueOverload: integer('ROUTER_QUEUE_OVERLOAD', 1_000, 'backlog from which requests are refused', messages),
  latencyWarnMs: integer('ROUTER_LATENCY_WARN_MS', 500, '95th percentile of arrival to ack worth a look', milliseconds),
  latencyCritMs: integer('ROUTER_LATENCY_CRIT_MS', 2_000, 'the same, from which rate limits are reduced', milliseconds),
  latencyOverloadMs: integer(
    'ROUTER_LATENCY_OVERLOAD_MS',
    5_000,
    'the same, from which requests are refused',
    milliseconds,
  ),
  inflightWarn: integer('ROUTER_INFLIGHT_WARN', 50, 'messages under way in a router worth a look', messages),
  inflightCrit: integer('ROUTER_INFLIGHT_CRIT', 200, 'the same, from which rate limits are reduced', messages),
  inflightOverload: integer('ROUTER_INFLIGHT_OVERLOAD', 500, 'the same, from which requests are refused', messages),
  metricsUrls: {
    name: 'GATEWAY_ROUTER_METRICS_URL',
    type: 'urls',
    protocols: ['http:', 'https:'],
    default: null,
    meaning: "the routers' metrics, for a gateway in another process; several separated by commas: the worst counts",
  },
  checkIntervalSeconds: {
    name: 'GATEWAY_BACKPRESSURE_CHECK_INTERVAL_SECONDS',
    type: 'number',
    min: 0.1,
    max: 3_600,
    default: 5,
    unit: 's',
    meaning: 'how often the gateway asks for them; three in a row without an answer are unknown, handled as warning',
  },
  checkTimeoutMs: integer('GATEWAY_BACKPRESSURE_TIMEOUT_MS', 1_000, 'how long it waits for an answer', {
    ...{ unit: 'ms', min: 10, max: 60_000 },
  }),
  decidePerMinute: integer('GATEWAY_RATE_LIMIT_ROUTES_DECIDE_LIMIT', 50, 'decisions per minute and tenant', perMinute),
  messagesPerMinute: integer('GATEWAY_RATE_LIMIT_MESSAGES_LIMIT', 100, 'messages per minute and tenant', perMinute),
  registryPerMinute: integer(
    'GATEWAY_RATE_LIMIT_REGISTRY_LIMIT',
    200,
    'changes of the registry per minute and tenant',
    perMinute,
  ),
  rateReduction: {
    name: 'BACKPRESSURE_RATE_LIMIT_REDUCTION',
    type: 'number',
    min: 0.01,
    max: 1,
    default: 0.5,
    meaning: 'while the router is under pressure these limits are multiplied by this',
  },
  rateMin: integer('BACKPRESSURE_RATE_LIMIT_MIN', 10, 'they are never reduced below this', perMinute),
} as const satisfies Readonly<Record<string, Setting>>

type RoutingConfig = ValuesIn<typeof routingSettings>

/** The levels of each router signal: warn, critical, overload. */
const ascending = [
  ['queueWarn', 'queueCrit', 'queueOverload'],
  ['latencyWarnMs', 'latencyCritMs', 'latencyOverloadMs'],
  ['inflightWarn', 'inflightCrit', 'inflightOverload'],
] as const

export function checkRouting(routing: RoutingConfig, say: Say): void {
  for (const levels of ascending) {
    const names = levels.map((level) => routingSettings[level].name)
    const values = levels.map((level) => routing[level])
    if (values.some((value, i) => i > 0 && value <= (values[i - 1] ?? 0))) {
      say(names, `${names.join(', ')} are ${values.join(', ')}: each must be more than the one before`)
    }
  }
}

export function doubtfulRouting(routing: RoutingConfig, roles: readonly string[]): string[] {
  const warnings: string[] = []
  if (routing.simulateDelayMs > 0) {
    warnings.push(
      `ROUTER_SIMULATE_DELAY_MS slows every message by ${routing.simulateDelayMs} ms: for drills, never in production`,
    )
  }
  const isRouter = roles.includes('router')
  if (routing.natsUrls === null && isRouter && !roles.includes('worker')) {
    warnings.push('the role router without NATS_URL does nothing here: the operation queue is worked on by workers')
  }
  if (routing.natsUrls !== null && !isRouter && roles.includes('gateway') && routing.metricsUrls === null) {
    warnings.push(
      'this gateway has no router in its process and no GATEWAY_ROUTER_METRICS_URL: it cannot know when the routers are overloaded',
    )
  }
  return warnings
}
