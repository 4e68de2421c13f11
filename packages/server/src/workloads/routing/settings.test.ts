import { describe, expect, it } from 'vitest'
import { describeConfig } from '../../config/describe.js'
import { ConfigError, type Environment, loadConfig } from '../../config/load.js'

const problemsOf = (env: Environment): string[] => {
  try {
    loadConfig(env)
    return []
  } catch (fault) {
    if (!(fault instanceof ConfigError)) throw fault
    return fault.problems.map(({ message }) => message)
  }
}

describe('the settings of routing', () => {
  it('have the defaults that callers build on', () => {
    expect(loadConfig({}).config.routing).toEqual({
      ...{ natsUrls: null, maxDeliver: 3, concurrency: 600, simulateDelayMs: 0, policy: 'any', retryAfterSeconds: 30 },
      ...{ queueWarn: 10, queueCrit: 100, queueOverload: 1_000 },
      ...{ latencyWarnMs: 500, latencyCritMs: 2_000, latencyOverloadMs: 5_000 },
      ...{ inflightWarn: 50, inflightCrit: 200, inflightOverload: 500 },
      ...{ metricsUrls: null, checkIntervalSeconds: 5, checkTimeoutMs: 1_000 },
      ...{ decidePerMinute: 50, messagesPerMinute: 100, registryPerMinute: 200, rateReduction: 0.5, rateMin: 10 },
    })
    expect(loadConfig({}).config.alerts).toEqual({ webhookUrl: null, webhookSecret: null })
  })

  it.each<[string, string, string, unknown]>([
    ['NATS_URL', 'nats://a:4222,nats://b:4222', 'natsUrls', ['nats://a:4222', 'nats://b:4222']],
    ['ROUTER_MAX_DELIVER', '7', 'maxDeliver', 7],
    ['ROUTER_CONCURRENCY', '5', 'concurrency', 5],
    ['ROUTER_SIMULATE_DELAY_MS', '100', 'simulateDelayMs', 100],
    ['ROUTER_BACKPRESSURE_POLICY', 'all', 'policy', 'all'],
    ['ROUTER_BACKPRESSURE_RETRY_AFTER_SECONDS', '9', 'retryAfterSeconds', 9],
    ['ROUTER_QUEUE_WARN', '11', 'queueWarn', 11],
    ['ROUTER_QUEUE_CRIT', '101', 'queueCrit', 101],
    ['ROUTER_QUEUE_OVERLOAD', '1001', 'queueOverload', 1_001],
    ['ROUTER_LATENCY_WARN_MS', '501', 'latencyWarnMs', 501],
    ['ROUTER_LATENCY_CRIT_MS', '2001', 'latencyCritMs', 2_001],
    ['ROUTER_LATENCY_OVERLOAD_MS', '5001', 'latencyOverloadMs', 5_001],
    ['ROUTER_INFLIGHT_WARN', '51', 'inflightWarn', 51],
    ['ROUTER_INFLIGHT_CRIT', '201', 'inflightCrit', 201],
    ['ROUTER_INFLIGHT_OVERLOAD', '501', 'inflightOverload', 501],
    ['GATEWAY_ROUTER_METRICS_URL', 'http://a/m, http://b/m', 'metricsUrls', ['http://a/m', 'http://b/m']],
    ['GATEWAY_BACKPRESSURE_CHECK_INTERVAL_SECONDS', '0.5', 'checkIntervalSeconds', 0.5],
    ['GATEWAY_BACKPRESSURE_TIMEOUT_MS', '200', 'checkTimeoutMs', 200],
    ['GATEWAY_RATE_LIMIT_ROUTES_DECIDE_LIMIT', '5', 'decidePerMinute', 5],
    ['GATEWAY_RATE_LIMIT_MESSAGES_LIMIT', '6', 'messagesPerMinute', 6],
    ['GATEWAY_RATE_LIMIT_REGISTRY_LIMIT', '7', 'registryPerMinute', 7],
    ['BACKPRESSURE_RATE_LIMIT_REDUCTION', '0.25', 'rateReduction', 0.25],
    ['BACKPRESSURE_RATE_LIMIT_MIN', '3', 'rateMin', 3],
  ])('%s=%s is read', (name, text, key, value) => {
    expect(loadConfig({ [name]: text }).config.routing).toMatchObject({ [key]: value })
  })

  it.each<[string, string, string]>([
    ['ALERT_WEBHOOK_URL', 'https://hooks.example/x', 'webhookUrl'],
    ['ALERT_WEBHOOK_SECRET', 'long enough', 'webhookSecret'],
  ])('%s=%s is read, for alerts', (name, text, key) => {
    expect(loadConfig({ [name]: text }).config.alerts).toMatchObject({ [key]: text })
  })

  it.each([
    ['NATS_URL', 'http://a'],
    ['ROUTER_MAX_DELIVER', '0'],
    ['ROUTER_CONCURRENCY', '0'],
    ['ROUTER_SIMULATE_DELAY_MS', '-1'],
    ['ROUTER_BACKPRESSURE_POLICY', 'some'],
    ['GATEWAY_ROUTER_METRICS_URL', 'ftp://a'],
    ['GATEWAY_ROUTER_METRICS_URL', ','],
    ['GATEWAY_BACKPRESSURE_TIMEOUT_MS', '9'],
    ['BACKPRESSURE_RATE_LIMIT_REDUCTION', '0'],
    ['BACKPRESSURE_RATE_LIMIT_REDUCTION', '1.5'],
    ['ALERT_WEBHOOK_SECRET', 'short'],
  ])('%s=%s is refused', (name, text) => {
    expect(problemsOf({ [name]: text })).toEqual([expect.stringContaining(name)])
  })

  it.each<Environment>([
    { ROUTER_QUEUE_WARN: '100' },
    { ROUTER_QUEUE_CRIT: '1000' },
    { ROUTER_LATENCY_OVERLOAD_MS: '2000' },
    { ROUTER_INFLIGHT_CRIT: '40' },
  ])('levels that do not rise are refused: %j', (env) => {
    expect(problemsOf(env)).toEqual([expect.stringContaining('each must be more than the one before')])
  })

  it('shows no secret', () => {
    const shown = JSON.stringify(
      describeConfig(
        loadConfig({
          NATS_URL: 'nats://token-one@a',
          ALERT_WEBHOOK_URL: 'https://hooks.example/token-two',
          ALERT_WEBHOOK_SECRET: 'token-three',
        }),
      ),
    )
    expect(shown).not.toMatch(/token-/)
  })

  it.each<[Environment, RegExp]>([
    [{ ROUTER_SIMULATE_DELAY_MS: '5' }, /ROUTER_SIMULATE_DELAY_MS slows every message by 5 ms/],
    [{ ALERT_WEBHOOK_SECRET: 'long enough' }, /no alert is sent anywhere/],
    [{ SPILLWAY_ROLES: 'gateway,router' }, /the role router without NATS_URL does nothing here/],
    [{ NATS_URL: 'nats://a', SPILLWAY_ROLES: 'gateway' }, /cannot know when the routers are overloaded/],
  ])('%j is said loudly', (env, warning) => {
    expect(loadConfig(env).warnings).toEqual([expect.stringMatching(warning)])
  })
})
