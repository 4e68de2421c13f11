import { type ProblemCode, problems } from './codes.js'

/** The only task version. */
export const taskVersion = '1'

export const routingLimits = {
  payloadRefCharacters: 2_048,
  descriptionCodePoints: 1_000,
  policiesMax: 10_000,
  /** For a policy, as JSON with its defaults. */
  policyBytes: 65_536,
  providersMax: 100,
  providerWeightMax: 1_000_000,
  providerPriorityMax: 100,
  providerPriorityDefault: 50,
  taskTypesMax: 100,
  fallbacksMax: 20,
  dryRunTasksMax: 100,
  blocksMax: 10_000,
  blockVersionCharacters: 64,
  /** For a block's input schema, and for its metadata, as JSON. */
  blockPartBytes: 65_536,
  capabilitiesMax: 100,
} as const

/** The values of `error.code`, and the problem code of the same meaning. Closed; a code never changes its meaning. */
export const routingCodes = {
  SCHEMA_VALIDATION_FAILED: 'schema_validation_failed',
  VERSION_UNSUPPORTED: 'version_unsupported',
  CORRELATION_FIELDS_INVALID: 'correlation_fields_invalid',
  PAYLOAD_TOO_SMALL: 'payload_too_small',
  PAYLOAD_TOO_LARGE: 'payload_too_large',
  TENANT_FORBIDDEN: 'tenant_forbidden',
  POLICY_NOT_FOUND: 'policy_not_found',
  IDEMPOTENCY_VIOLATION: 'idempotency_violation',
  NO_PROVIDER: 'no_provider',
  DEADLINE_EXPIRED: 'deadline_expired',
  service_overloaded: 'service_overloaded',
  store_unavailable: 'store_unavailable',
} as const satisfies Record<string, ProblemCode>

export type RoutingCode = keyof typeof routingCodes

/** The problem code of an `error.code`. An unknown one is our defect, never a success. */
export function routingProblemCode(code: string): ProblemCode {
  return Object.hasOwn(routingCodes, code) ? routingCodes[code as RoutingCode] : 'internal_error'
}

/** The HTTP status of an `error.code`; 500 for an unknown one. */
export function routingStatus(code: string): number {
  return problems[routingProblemCode(code)].status
}

/** A task to be routed. */
export interface RouteTask {
  version: typeof taskVersion
  /** A UUID; the same request always gets the same decision. */
  request_id: string
  tenant_id: string
  /** Exactly one of `payload_ref` and `payload`. */
  task: { type: string; payload_ref?: string; payload?: unknown }
  policy_id?: string
  constraints?: RouteConstraints
  metadata?: Record<string, unknown>
  /** 32 hex digits, or a UUID. */
  trace_id?: string
  idempotency_key?: string
}

export interface RouteConstraints {
  max_latency_ms?: number
  max_cost?: number
}

export const decisionReasons = ['weighted', 'sticky', 'fallback', 'best_score'] as const
export type DecisionReason = (typeof decisionReasons)[number]

export interface RouteDecision {
  provider_id: string
  priority: number
  expected_latency_ms: number
  expected_cost: number
  reason: DecisionReason
}

export interface RouteContext {
  request_id?: string
  trace_id?: string
}

export interface DecideAnswer {
  ok: true
  decision: RouteDecision
  context: RouteContext
}

/** The refusal of a task: as it is over the broker, with the members of the problem document over HTTP. */
export interface RouteRefusal {
  ok: false
  error: { code: RoutingCode | 'internal_error'; message: string }
  context: RouteContext
}

export const policyStrategies = ['weighted', 'best_score'] as const
export type PolicyStrategy = (typeof policyStrategies)[number]

export interface PolicyProvider {
  provider_id: string
  /** Its share among the candidates. 0: a fallback only. */
  weight: number
  /** Lower first, where scores are equal. */
  priority: number
  expected_latency_ms: number
  expected_cost: number
  /** Names, or prefixes of names followed by a star; absent: all. */
  task_types?: string[]
  enabled: boolean
}

/** With its defaults. */
export interface Policy {
  policy_id: string
  /** Absent: for every tenant. */
  tenant_id?: string
  description?: string
  strategy: PolicyStrategy
  providers: PolicyProvider[]
  /** `tenant_id`, or `metadata.` and a member's name. */
  sticky?: { by: string }
  /** Provider ids, first choice first. */
  fallback?: string[]
  score: { latency_weight: number; cost_weight: number }
}

export interface PolicyView extends Policy {
  /** 1 when it is created, one more with each replacement. */
  version: number
  updated_at: string
}

export const policySources = ['given', 'tenant', 'shared', 'built_in'] as const
export type PolicySource = (typeof policySources)[number]

export const exclusions = ['disabled', 'task_type', 'max_latency_ms', 'max_cost', 'weight_zero'] as const
/** Why a provider is not a candidate. */
export type Exclusion = (typeof exclusions)[number]

export interface DryRunProvider {
  provider_id: string
  eligible: boolean
  /** Empty when it is eligible. */
  excluded_by: Exclusion[]
  /** 0 to 1, the higher the better: what `best_score` compares. */
  score: number
  /** Of all keys that would go to it; null when it is not eligible, or when the policy uses only the score. */
  share: number | null
  /** Its position among the fallbacks, from 1 on. */
  fallback_place: number | null
  chosen: boolean
}

export interface DryRunResult {
  request_id: string
  policy_id: string | null
  policy_source: PolicySource | null
  decision: RouteDecision | null
  error: { code: RoutingCode; message: string } | null
  providers: DryRunProvider[]
}

export const blockStatuses = ['active', 'deprecated'] as const
export type BlockStatus = (typeof blockStatuses)[number]

/** With its defaults. */
export interface Block {
  type: string
  version: string
  description?: string
  input_schema?: Record<string, unknown>
  capabilities?: string[]
  metadata?: Record<string, unknown>
  status: BlockStatus
}

export interface BlockView extends Block {
  created_at: string
  updated_at: string
}

export const alertNames = [
  'router_intake_backpressure_active',
  'router_intake_queue_depth_high',
  'router_intake_latency_high',
  'router_intake_inflight_high',
  'spillway_operation_stuck',
] as const
export type AlertName = (typeof alertNames)[number]
export const alertSeverities = ['warning', 'critical'] as const
export type AlertSeverity = (typeof alertSeverities)[number]
export const alertStatuses = ['firing', 'resolved'] as const
export type AlertStatus = (typeof alertStatuses)[number]

/** As sent to the webhook; `GET /api/v1/alerts` lists it with more. */
export interface Alert {
  alert_name: AlertName
  severity: AlertSeverity
  message: string
  labels: Record<string, string>
  annotations: Record<string, number | string>
  status: AlertStatus
  timestamp: string
}

export const objectiveNames = ['availability', 'latency', 'depth'] as const
export type ObjectiveName = (typeof objectiveNames)[number]

export interface Objective {
  name: ObjectiveName
  /** 0 to 1. */
  target: number
  window: '1h' | '30d'
  /** 0 to 1; null when nothing was counted. */
  sli: number | null
  good: number
  total: number
  /** 1: all of it, 0: none, negative: overspent. */
  error_budget_left: number
  /** For the last hour: 1 spends the budget exactly within the window. */
  burn_rate: number
  met: boolean
}
