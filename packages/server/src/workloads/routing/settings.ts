import type { Say, Setting, ValuesIn } from '../../config/setting.js'

const count = <const Name extends string, const Default extends number>(
  name: Name,
  byDefault: Default,
  meaning: string,
  unit = 'messages',
) =>
  ({
    ...{ name, type: 'integer', min: 1, max: 100_000_000, default: byDefault, unit, meaning },
  }) as const satisfies Setting

const perMinute = <const Name extends string, const Default extends number>(
  name: Name,
  byDefault: Default,
  meaning: string,
) =>
  ({
    ...{ name, type: 'integer', min: 1, max: 10_000_000, default: byDefault, unit: 'requests', meaning },
  }) as const satisfies Setting

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
  maxDeliver: {
    name: 'ROUTER_MAX_DELIVER',
    type: 'integer',
    min: 1,
    max: 1_000,
    default: 3,
    meaning: 'how often a message is tried before it is dead-lettered',
  },
  concurrency: count('ROUTER_CONCURRENCY', 600, 'messages that a router works on at once'),
  simulateDelayMs: {
    name: 'ROUTER_SIMULATE_DELAY_MS',
    type: 'integer',
    min: 0,
    max: 600_000,
    default: 0,
    unit: 'ms',
    meaning: 'slows each message, for drills; never in production',
  },
  policy: {
    name: 'ROUTER_BACKPRESSURE_POLICY',
    type: 'choice',
    choices: ['any', 'all'],
    default: 'any',
    meaning: 'active when any signal is at overload, or when backlog and latency are together',
  },
  retryAfterSeconds: {
    name: 'ROUTER_BACKPRESSURE_RETRY_AFTER_SECONDS',
    type: 'integer',
    min: 1,
    max: 86_400,
    default: 30,
    unit: 's',
    meaning: 'base of Retry-After while the router is overloaded',
  },
  queueWarn: count('ROUTER_QUEUE_WARN', 10, 'backlog (pending and handed out) worth a look'),
  queueCrit: count('ROUTER_QUEUE_CRIT', 100, 'backlog from which rate limits are reduced'),
  queueOverload: count('ROUTER_QUEUE_OVERLOAD', 1_000, 'backlog from which requests are refused'),
  latencyWarnMs: count('ROUTER_LATENCY_WARN_MS', 500, '95th percentile of arrival to ack worth a look', 'ms'),
  latencyCritMs: count('ROUTER_LATENCY_CRIT_MS', 2_000, 'the same, from which rate limits are reduced', 'ms'),
  latencyOverloadMs: count('ROUTER_LATENCY_OVERLOAD_MS', 5_000, 'the same, from which requests are refused', 'ms'),
  inflightWarn: count('ROUTER_INFLIGHT_WARN', 50, 'messages under way in a router worth a look'),
  inflightCrit: count('ROUTER_INFLIGHT_CRIT', 200, 'the same, from which rate limits are reduced'),
  inflightOverload: count('ROUTER_INFLIGHT_OVERLOAD', 500, 'the same, from which requests are refused'),
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
  checkTimeoutMs: {
    name: 'GATEWAY_BACKPRESSURE_TIMEOUT_MS',
    type: 'integer',
    min: 10,
    max: 60_000,
    default: 1_000,
    unit: 'ms',
    meaning: 'how long it waits for an answer',
  },
  decidePerMinute: perMinute('GATEWAY_RATE_LIMIT_ROUTES_DECIDE_LIMIT', 50, 'decisions per minute and tenant'),
  messagesPerMinute: perMinute('GATEWAY_RATE_LIMIT_MESSAGES_LIMIT', 100, 'messages per minute and tenant'),
  registryPerMinute: perMinute(
    'GATEWAY_RATE_LIMIT_REGISTRY_LIMIT',
    200,
    'changes of the registry per minute and tenant',
  ),
  rateReduction: {
    name: 'BACKPRESSURE_RATE_LIMIT_REDUCTION',
    type: 'number',
    min: 0.01,
    max: 1,
    default: 0.5,
    meaning: 'while the router is under pressure these limits are multiplied by this',
  },
  rateMin: perMinute('BACKPRESSURE_RATE_LIMIT_MIN', 10, 'they are never reduced below this'),
} as const satisfies Readonly<Record<string, Setting>>

type RoutingConfig = ValuesIn<typeof routingSettings>

export function checkRouting(routing: RoutingConfig, say: Say): void {
  for (const [names, values] of ascending(routing)) {
    if (values.some((value, i) => i > 0 && value <= (values[i - 1] ?? 0))) {
      say(names, `${names.join(', ')} are ${values.join(', ')}: each must be more than the one before`)
    }
  }
}

type Ascending = readonly [names: readonly string[], values: readonly number[]]

/** The levels of each router signal: warn, critical, overload. */
function ascending(routing: RoutingConfig): Ascending[] {
  return [
    [
      ['ROUTER_QUEUE_WARN', 'ROUTER_QUEUE_CRIT', 'ROUTER_QUEUE_OVERLOAD'],
      [routing.queueWarn, routing.queueCrit, routing.queueOverload],
    ],
    [
      ['ROUTER_LATENCY_WARN_MS', 'ROUTER_LATENCY_CRIT_MS', 'ROUTER_LATENCY_OVERLOAD_MS'],
      [routing.latencyWarnMs, routing.latencyCritMs, routing.latencyOverloadMs],
    ],
    [
      ['ROUTER_INFLIGHT_WARN', 'ROUTER_INFLIGHT_CRIT', 'ROUTER_INFLIGHT_OVERLOAD'],
      [routing.inflightWarn, routing.inflightCrit, routing.inflightOverload],
    ],
  ]
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
