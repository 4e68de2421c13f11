import Type from 'typebox'
import { limits } from '../wire/limits.js'
import {
  blockStatuses,
  decisionReasons,
  exclusions,
  policySources,
  policyStrategies,
  type RoutingCode,
  routingCodes,
  routingLimits,
  taskVersion,
} from '../wire/routing.js'
import { Name, Timestamp } from './names.js'
import { Problem } from './problem.js'

const closed = { additionalProperties: false } as const
const Uuid = Type.String({ format: 'uuid' })
const Description = Type.String({ maxLength: routingLimits.descriptionCodePoints })
const Open = Type.Record(Type.String(), Type.Unknown())
const Positive = Type.Number({ exclusiveMinimum: 0 })
const NotNegative = Type.Number({ minimum: 0 })
const Cursor = Type.Union([Type.String(), Type.Null()])
const Tenant = Type.String({
  minLength: 1,
  maxLength: limits.nameCodePoints,
  pattern: '\\S',
  description: 'Not blank',
})
const TraceId = Type.String({
  pattern: '^(?:[0-9A-Fa-f]{32}|[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12})$',
  description: '32 hex digits, or a UUID',
})
const codes = Object.keys(routingCodes) as RoutingCode[]

const Constraints = Type.Object(
  {
    max_latency_ms: Type.Optional(Positive),
    max_cost: Type.Optional(NotNegative),
  },
  closed,
)

/** The body of `POST /api/v1/routes/decide` and of `POST /api/v1/messages`, and a message of the subject. */
export const DecideRequest = Type.Object(
  {
    version: Type.Literal(taskVersion),
    request_id: Uuid,
    tenant_id: Tenant,
    task: Type.Object(
      {
        type: Name,
        payload_ref: Type.Optional(Type.String({ minLength: 1, maxLength: routingLimits.payloadRefCharacters })),
        payload: Type.Optional(Type.Unknown({ description: 'Any JSON value; instead of payload_ref' })),
      },
      { ...closed, description: 'Exactly one of payload_ref and payload' },
    ),
    policy_id: Type.Optional(Name),
    constraints: Type.Optional(Constraints),
    metadata: Type.Optional(Open),
    trace_id: Type.Optional(TraceId),
    idempotency_key: Type.Optional(Type.String({ minLength: 1, maxLength: limits.idempotencyKeyCharacters })),
  },
  closed,
)

export const RouteDecision = Type.Object({
  provider_id: Name,
  priority: Type.Integer({ minimum: 0, maximum: routingLimits.providerPriorityMax }),
  expected_latency_ms: NotNegative,
  expected_cost: NotNegative,
  reason: Type.Enum([...decisionReasons]),
})

const Context = Type.Object({ request_id: Type.Optional(Uuid), trace_id: Type.Optional(Type.String()) })

export const DecideAnswer = Type.Object({
  ok: Type.Literal(true),
  decision: RouteDecision,
  context: Context,
})

/** The problem document, with the members that clients of the router read. */
export const RoutingProblem = Type.Object(
  {
    ...Problem.properties,
    ok: Type.Literal(false),
    error: Type.Object({
      code: Type.String({ description: `One of ${codes.join(', ')}, or the code of the problem` }),
      message: Type.String(),
    }),
    context: Type.Optional(Context),
  },
  { additionalProperties: true },
)

const PolicyProvider = Type.Object(
  {
    provider_id: Name,
    weight: Type.Optional(
      Type.Number({
        minimum: 0,
        maximum: routingLimits.providerWeightMax,
        default: 1,
        description: 'Its share among the candidates; 0: a fallback only',
      }),
    ),
    priority: Type.Optional(
      Type.Integer({
        minimum: 0,
        maximum: routingLimits.providerPriorityMax,
        default: routingLimits.providerPriorityDefault,
        description: 'Lower first, where scores are equal',
      }),
    ),
    expected_latency_ms: NotNegative,
    expected_cost: NotNegative,
    task_types: Type.Optional(
      Type.Array(Name, {
        minItems: 1,
        maxItems: routingLimits.taskTypesMax,
        description: 'Names, or beginnings of names with a star behind, as chat.*; absent: all',
      }),
    ),
    enabled: Type.Optional(Type.Boolean({ default: true })),
  },
  closed,
)

/** The body of `POST /api/v1/policies`. */
export const PutPolicy = Type.Object(
  {
    policy_id: Name,
    tenant_id: Type.Optional(Tenant),
    description: Type.Optional(Description),
    strategy: Type.Optional(Type.Enum([...policyStrategies], { default: 'weighted' })),
    providers: Type.Array(PolicyProvider, { minItems: 1, maxItems: routingLimits.providersMax }),
    sticky: Type.Optional(
      Type.Object(
        {
          by: Type.String({
            pattern: '^(?:tenant_id|metadata\\.[\\s\\S]+)$',
            maxLength: limits.nameCodePoints,
            description: 'tenant_id, or metadata. and the name of a member',
          }),
        },
        closed,
      ),
    ),
    fallback: Type.Optional(
      Type.Array(Name, {
        minItems: 1,
        maxItems: routingLimits.fallbacksMax,
        description: 'Ids of providers of this policy, first choice first',
      }),
    ),
    score: Type.Optional(
      Type.Object(
        {
          latency_weight: Type.Optional(Type.Number({ minimum: 0, default: 0.5 })),
          cost_weight: Type.Optional(Type.Number({ minimum: 0, default: 0.5 })),
        },
        closed,
      ),
    ),
  },
  closed,
)

export const PolicyView = Type.Object({
  ...PutPolicy.properties,
  version: Type.Integer({ minimum: 1 }),
  updated_at: Timestamp,
})

export const PolicyPage = Type.Object({ items: Type.Array(PolicyView), next_cursor: Cursor })

/** The query of lists that filter by name only. */
const page = {
  limit: Type.Optional(Type.Integer({ minimum: 1, maximum: limits.listItemsMax })),
  cursor: Type.Optional(Type.String({ minLength: 1, maxLength: 4_096 })),
}

export const ListPoliciesQuery = Type.Object({ tenant_id: Type.Optional(Name), ...page }, closed)

/** For paths and queries that name one policy. Without a tenant: the policy for all tenants. */
export const PolicyQuery = Type.Object({ tenant_id: Type.Optional(Name) }, closed)

const DryRunTask = Type.Object(
  {
    ...DecideRequest.properties,
    version: Type.Optional(Type.Literal(taskVersion)),
    request_id: Type.Optional(Uuid),
  },
  closed,
)

/** The body of `POST /api/v1/policies/dry-run`. */
export const DryRunRequest = Type.Object(
  {
    policy: Type.Optional(PutPolicy),
    tasks: Type.Array(DryRunTask, {
      minItems: 1,
      maxItems: routingLimits.dryRunTasksMax,
      description: 'As for decide, but version, request_id and the payload may be absent',
    }),
  },
  closed,
)

const Nullable = Type.Null()

export const DryRunAnswer = Type.Object({
  results: Type.Array(
    Type.Object({
      request_id: Uuid,
      policy_id: Type.Union([Name, Nullable]),
      policy_source: Type.Union([Type.Enum([...policySources]), Nullable]),
      decision: Type.Union([RouteDecision, Nullable]),
      error: Type.Union([Type.Object({ code: Type.Enum(codes), message: Type.String() }), Nullable]),
      providers: Type.Array(
        Type.Object({
          provider_id: Name,
          eligible: Type.Boolean(),
          excluded_by: Type.Array(Type.Enum([...exclusions])),
          score: Type.Number({ minimum: 0, maximum: 1 }),
          share: Type.Union([Type.Number({ minimum: 0, maximum: 1 }), Nullable]),
          fallback_place: Type.Union([Type.Integer({ minimum: 1 }), Nullable]),
          chosen: Type.Boolean(),
        }),
      ),
    }),
  ),
})

const BlockVersion = Type.String({
  pattern: '^\\d+(?:\\.\\d+){0,2}(?:-[0-9A-Za-z.-]+)?(?:\\+[0-9A-Za-z.-]+)?$',
  maxLength: routingLimits.blockVersionCharacters,
  description: 'One to three numbers with dots between, as 1.4.0; then, if any, -pre.release and +build',
})

/** The body of `POST /api/v1/registry/blocks`. */
export const CreateBlock = Type.Object(
  {
    type: Name,
    version: BlockVersion,
    description: Type.Optional(Description),
    input_schema: Type.Optional(Open),
    capabilities: Type.Optional(Type.Array(Name, { maxItems: routingLimits.capabilitiesMax })),
    metadata: Type.Optional(Open),
    status: Type.Optional(Type.Enum([...blockStatuses], { default: 'active' })),
  },
  closed,
)

/** The body of `PUT /api/v1/registry/blocks/:type/:version`; type and version, if given, are those of the path. */
export const PutBlock = Type.Object(
  { ...CreateBlock.properties, type: Type.Optional(Name), version: Type.Optional(BlockVersion) },
  closed,
)

export const BlockView = Type.Object({ ...CreateBlock.properties, created_at: Timestamp, updated_at: Timestamp })

export const BlockPage = Type.Object({ items: Type.Array(BlockView), next_cursor: Cursor })

export const ListBlocksQuery = Type.Object({ type: Type.Optional(Name), ...page }, closed)
