/**
 * Decides which provider takes a task. Pure: the same policies and the same request always give the same answer.
 *
 *   policy ──► candidates ──► sticky │ best_score │ weighted
 *                   └── none ──► fallback, in order
 *                                    └── none ──► NO_PROVIDER
 *
 * Candidates are enabled, have a weight, accept the task's type, and meet its constraints.
 */
import type {
  DryRunProvider,
  DryRunResult,
  Exclusion,
  Policy,
  PolicySource,
  RouteDecision,
  RouteTask,
  RoutingCode,
} from '@spillway/protocol/wire'
import { bestScored, markOf, type PreparedProvider, preparedProviders, winner } from './decision-score.js'

export interface Undecided {
  code: Extract<RoutingCode, 'POLICY_NOT_FOUND' | 'NO_PROVIDER'>
  message: string
}

/** The members of a task that a decision reads. */
export type DecisionInput = Pick<RouteTask, 'request_id' | 'tenant_id' | 'policy_id' | 'constraints' | 'metadata'> & {
  task: { type: string }
}

/** Ready to decide with. */
export interface PreparedPolicy {
  policy: Policy
  providers: readonly PreparedProvider[]
  fallback: readonly PreparedProvider[]
}

/** The policy for requests that name none. */
export const defaultPolicyId = 'default'

/** Used while there is no policy named `default`, so that a fresh server decides: everything goes to `local`. */
export const builtInPolicy: Policy = {
  policy_id: defaultPolicyId,
  description: 'In force until a policy named default is created',
  strategy: 'weighted',
  providers: [
    { provider_id: 'local', weight: 1, priority: 50, expected_latency_ms: 0, expected_cost: 0, enabled: true },
  ],
  score: { latency_weight: 0.5, cost_weight: 0.5 },
}

export function preparePolicy(policy: Policy): PreparedPolicy {
  const providers = preparedProviders(policy)
  const byId = new Map(providers.map((provider) => [provider.id, provider]))
  const fallback = (policy.fallback ?? []).flatMap((id) => byId.get(id) ?? [])
  return { policy, providers, fallback }
}

const builtIn = preparePolicy(builtInPolicy)

/** The tenant of policies for every tenant, as in the table: no tenant has an empty name. */
export const everyTenant = ''

/** All policies, by tenant and id. A tenant's policy takes precedence over the general one with the same id. */
export class PolicyBook {
  readonly #policies = new Map<string, Map<string, PreparedPolicy>>()

  constructor(policies: Iterable<Policy> = []) {
    for (const policy of policies) this.set(policy)
  }

  get size(): number {
    return [...this.names()].length
  }

  set(policy: Policy): void {
    const { tenant_id: tenant = everyTenant, policy_id: id } = policy
    const policies = this.#policies.get(tenant) ?? new Map<string, PreparedPolicy>()
    this.#policies.set(tenant, policies.set(id, preparePolicy(policy)))
  }

  delete(tenant: string, policyId: string): void {
    const policies = this.#policies.get(tenant)
    policies?.delete(policyId)
    if (policies?.size === 0) this.#policies.delete(tenant)
  }

  *names(): Iterable<[tenant: string, policyId: string]> {
    for (const [tenant, policies] of this.#policies) for (const id of policies.keys()) yield [tenant, id]
  }

  /** The policy for a request of this tenant. */
  find(tenantId: string, policyId?: string): { prepared: PreparedPolicy; source: PolicySource } | null {
    const id = policyId ?? defaultPolicyId
    const own = this.#policies.get(tenantId)?.get(id)
    if (own !== undefined) return { prepared: own, source: 'tenant' }
    const shared = this.#policies.get(everyTenant)?.get(id)
    if (shared !== undefined) return { prepared: shared, source: 'shared' }
    return id === defaultPolicyId ? { prepared: builtIn, source: 'built_in' } : null
  }
}

export function decide(policies: PolicyBook, task: DecisionInput): RouteDecision | Undecided {
  const found = policies.find(task.tenant_id, task.policy_id)
  return found === null ? policyNotFound(task) : choose(found.prepared, task)
}

function policyNotFound({ policy_id = defaultPolicyId }: DecisionInput): Undecided {
  return { code: 'POLICY_NOT_FOUND', message: `There is no policy ${JSON.stringify(policy_id)} for this tenant.` }
}

function choose(prepared: PreparedPolicy, task: DecisionInput): RouteDecision | Undecided {
  const candidates = prepared.providers.filter((p) => p.weight > 0 && isFit(p, task))
  if (candidates.length === 0) {
    const fallback = prepared.fallback.find((p) => isFit(p, task))
    return fallback === undefined ? noProvider(prepared, task) : toDecision(fallback, 'fallback')
  }
  const key = stickyKey(prepared.policy, task)
  if (key !== null) return chosen(winner(markOf(`sticky\0${key}`), candidates), 'sticky')
  if (prepared.policy.strategy === 'best_score') return chosen(bestScored(candidates), 'best_score')
  // A UUID may be in upper or lower case.
  return chosen(winner(markOf(task.request_id.toLowerCase()), candidates), 'weighted')
}

function chosen(provider: PreparedProvider | null, reason: RouteDecision['reason']): RouteDecision {
  if (provider === null) throw new Error('no winner among candidates')
  return toDecision(provider, reason)
}

const toDecision = (provider: PreparedProvider, reason: RouteDecision['reason']): RouteDecision => ({
  provider_id: provider.id,
  priority: provider.priority,
  expected_latency_ms: provider.latencyMs,
  expected_cost: provider.cost,
  reason,
})

/** Enabled, of the right type, and within the constraints. */
function isFit(provider: PreparedProvider, { task, constraints }: DecisionInput): boolean {
  return (
    provider.isEnabled &&
    provider.takes(task.type) &&
    (constraints?.max_latency_ms === undefined || provider.latencyMs <= constraints.max_latency_ms) &&
    (constraints?.max_cost === undefined || provider.cost <= constraints.max_cost)
  )
}

const metadataPrefix = 'metadata.'

/** Null: the policy has no sticky key, or the request does not carry it as a text, a number or a boolean. */
function stickyKey({ sticky }: Policy, task: DecisionInput): string | null {
  if (sticky === undefined) return null
  if (sticky.by === 'tenant_id') return task.tenant_id
  const name = sticky.by.slice(metadataPrefix.length)
  if (task.metadata === undefined || !Object.hasOwn(task.metadata, name)) return null
  const value = task.metadata[name]
  if (typeof value === 'string') return value === '' ? null : value
  return typeof value === 'number' || typeof value === 'boolean' ? String(value) : null
}

/** All reasons why it is not a candidate. */
function exclusionsOf(provider: PreparedProvider, { task, constraints }: DecisionInput): Exclusion[] {
  const found: Exclusion[] = []
  if (!provider.isEnabled) found.push('disabled')
  if (!provider.takes(task.type)) found.push('task_type')
  if (provider.latencyMs > (constraints?.max_latency_ms ?? Number.POSITIVE_INFINITY)) found.push('max_latency_ms')
  if (provider.cost > (constraints?.max_cost ?? Number.POSITIVE_INFINITY)) found.push('max_cost')
  if (provider.weight === 0) found.push('weight_zero')
  return found
}

const exclusionTexts: Readonly<Record<Exclusion, string>> = {
  disabled: 'disabled',
  task_type: 'not for this task type',
  max_latency_ms: 'slower than max_latency_ms',
  max_cost: 'dearer than max_cost',
  weight_zero: 'with weight 0 and no fallback',
}

function noProvider({ policy, providers, fallback }: PreparedPolicy, task: DecisionInput): Undecided {
  const counts = new Map<Exclusion, number>()
  for (const provider of providers) {
    for (const exclusion of exclusionsOf(provider, task)) {
      // It is still usable as a fallback.
      if (exclusion === 'weight_zero' && fallback.includes(provider)) continue
      counts.set(exclusion, (counts.get(exclusion) ?? 0) + 1)
    }
  }
  const why = [...counts].map(([exclusion, count]) => `${count} ${exclusionTexts[exclusion]}`).join(', ')
  const message = `No provider of policy ${JSON.stringify(policy.policy_id)} fits: of ${providers.length}, ${why}.`
  return { code: 'NO_PROVIDER', message }
}

/** The decision and its reasons for every provider. `given` replaces the active policies. */
export function dryRun(policies: PolicyBook, task: DecisionInput, given?: Policy): DryRunResult {
  const found =
    given === undefined
      ? policies.find(task.tenant_id, task.policy_id)
      : { prepared: preparePolicy(given), source: 'given' as const }
  const outcome = found === null ? policyNotFound(task) : choose(found.prepared, task)
  const decision = 'code' in outcome ? null : outcome
  return {
    request_id: task.request_id,
    policy_id: found?.prepared.policy.policy_id ?? null,
    policy_source: found?.source ?? null,
    decision,
    error: 'code' in outcome ? outcome : null,
    providers: found === null ? [] : explained(found.prepared, task, decision),
  }
}

function explained(prepared: PreparedPolicy, task: DecisionInput, decision: RouteDecision | null): DryRunProvider[] {
  const { policy, providers, fallback } = prepared
  const all = providers.map((provider) => ({ provider, excludedBy: exclusionsOf(provider, task) }))
  const isByScore = policy.strategy === 'best_score' && stickyKey(policy, task) === null
  const weight = all.reduce((sum, { provider, excludedBy }) => sum + (excludedBy.length === 0 ? provider.weight : 0), 0)
  return all.map(({ provider, excludedBy }) => {
    const place = fallback.indexOf(provider)
    const eligible = excludedBy.length === 0
    return {
      provider_id: provider.id,
      eligible,
      excluded_by: excludedBy,
      score: provider.score,
      share: eligible && !isByScore ? provider.weight / weight : null,
      fallback_place: place === -1 ? null : place + 1,
      chosen: provider.id === decision?.provider_id,
    }
  })
}
