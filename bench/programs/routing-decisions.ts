/** The decision itself, as the router takes it, with many policies in memory and many providers in each. Times each decision. */
import { type Policy, routingLimits } from '@spillway/protocol/wire'
import { type DecisionInput, decide, PolicyBook } from '../../packages/server/dist/workloads/routing/decision.js'
import { percentile } from '../statistics.js'
import { bareApp, listen } from './handler-app.js'
import { onMeasure } from './measured.js'
import { requestPrefix, tenants } from './routing-body.js'

const policiesCount = 1_000

const idsOf = (policy: number, count: number): string[] =>
  Array.from({ length: count }, (_, i) => `provider-${policy}-${i}`)

/** Four kinds in turn: by weight, by score, sticky by tenant, and one that only its fallback serves. */
function policyOf(n: number, providersCount: number): Policy {
  const kind = n % 4
  return {
    policy_id: `policy-${n}`,
    strategy: kind === 1 ? 'best_score' : 'weighted',
    providers: idsOf(n, providersCount).map((provider_id, i) => ({
      provider_id,
      weight: kind === 3 ? 0 : 1 + (i % 7),
      priority: 50,
      expected_latency_ms: 50 + ((n * 31 + i * 53) % 400),
      expected_cost: ((n + i * 3) % 10) / 10,
      enabled: i % 9 !== 8,
      task_types: i % 2 === 0 ? ['text.*', 'image.resize'] : ['text.summary', 'audio.*'],
    })),
    score: { latency_weight: 0.5, cost_weight: 0.5 },
    ...(kind === 2 && { sticky: { by: 'tenant_id' } }),
    ...(kind === 3 && { fallback: idsOf(n, Math.min(providersCount, routingLimits.fallbacksMax)) }),
  }
}

function measure(providersCount: number, count: number) {
  const book = new PolicyBook(Array.from({ length: policiesCount }, (_, n) => policyOf(n, providersCount)))
  const prefix = requestPrefix()
  const tookMs: number[] = []
  for (let n = 0; n < count; n++) {
    const task: DecisionInput = {
      request_id: prefix + n.toString(16).padStart(12, '0'),
      tenant_id: `tenant-${n % tenants}`,
      policy_id: `policy-${(n * 7919) % policiesCount}`,
      task: { type: 'text.summary' },
      constraints: { max_latency_ms: 300 },
    }
    const began = performance.now()
    const decided = decide(book, task)
    tookMs.push(performance.now() - began)
    if ('code' in decided) throw new Error(`nothing was decided: ${decided.message}`)
  }
  return { p50Ms: percentile(tookMs, 0.5), p99Ms: percentile(tookMs, 0.99) }
}

const app = bareApp()
onMeasure(app, 'decide', async ({ count, key }) => measure(Number(key), count))
await listen(app)
