/** Policies: put, read, delete and dry run. Low priority: closed while the router is overloaded, except reads. */
import { randomUUID } from 'node:crypto'
import {
  DryRunAnswer,
  DryRunRequest,
  ListPoliciesQuery,
  PolicyPage,
  PolicyQuery,
  PolicyView,
  PutPolicy,
} from '@spillway/protocol/schema'
import { routingLimits } from '@spillway/protocol/wire'
import type { FastifyLike as App } from 'spillway/workload'
import { sendProblem } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import type { AppReply as Reply } from '../../app.js'
import type { RoutingParts } from './context.js'
import { dryRun } from './decision.js'
import type { Gateway } from './gateway.js'
import { checkPolicy } from './policies.js'
import { operate, options, pageByNames, view } from './route-options.js'

const path = '/api/v1/policies'
const Params = Type.Object({ policyId: Type.String() })
const notFound = { code: 'policy_not_found', detail: 'There is no such policy.' } as const

export function addPolicies(app: App, parts: RoutingParts, gateway: Gateway): void {
  addChanges(app, parts, gateway)
  addReads(app, parts)
  addDryRun(app, parts, gateway)
}

function addChanges(app: App, { policies }: RoutingParts, gateway: Gateway): void {
  app.post<{ Body: unknown }>(
    path,
    {
      ...options(operate, 'Create or replace a policy', { body: PutPolicy }, { 200: PolicyView, 201: PolicyView }),
      // Validated below, together with rules that a schema cannot express.
      validatorCompiler: () => () => true,
    },
    async (request, reply) => {
      const overload = gateway.overload()
      if (overload !== null) return sendProblem(reply, overload)
      const checked = checkPolicy(request.body)
      if (!checked.ok) return invalid(reply, checked.errors)
      const outcome = await policies.put(checked.policy)
      if (outcome.kind === 'full') {
        const detail = `There are ${routingLimits.policiesMax} policies already; remove one first.`
        return sendProblem(reply, { code: 'conflict', detail })
      }
      reply.code(outcome.kind === 'created' ? 201 : 200)
      return outcome.policy
    },
  )
  app.delete<{ Params: { policyId: string }; Querystring: Static<typeof PolicyQuery> }>(
    `${path}/:policyId`,
    options(operate, 'Remove a policy', { params: Params, querystring: PolicyQuery }),
    async (request, reply) => {
      const overload = gateway.overload()
      if (overload !== null) return sendProblem(reply, overload)
      const { policyId } = request.params
      const removed = await policies.remove({ policyId, tenantId: request.query.tenant_id })
      if (!removed) return sendProblem(reply, notFound)
      return reply.code(204).send()
    },
  )
}

function addReads(app: App, { policies, config }: RoutingParts): void {
  app.get<{ Querystring: Static<typeof ListPoliciesQuery> }>(
    path,
    options(view, 'Policies, those for every tenant first', { querystring: ListPoliciesQuery }, { 200: PolicyPage }),
    async ({ query }) =>
      pageByNames(
        query,
        config.server.pageBytesMax,
        (bounds, from) =>
          policies.list(bounds, {
            tenantId: query.tenant_id,
            after: from && { tenantId: from[0], policyId: from[1] },
          }),
        ({ tenant_id = '', policy_id }) => [tenant_id, policy_id],
      ),
  )
  app.get<{ Params: { policyId: string }; Querystring: Static<typeof PolicyQuery> }>(
    `${path}/:policyId`,
    options(view, 'A policy', { params: Params, querystring: PolicyQuery }, { 200: PolicyView }),
    async (request, reply) => {
      const policy = await policies.get({ policyId: request.params.policyId, tenantId: request.query.tenant_id })
      return policy ?? sendProblem(reply, notFound)
    },
  )
}

/** It shows policies, so it requires the permission to read them. */
function addDryRun(app: App, { policies }: RoutingParts, gateway: Gateway): void {
  const summary = 'What would be decided, and why, provider by provider'
  app.post<{ Body: Static<typeof DryRunRequest> }>(
    `${path}/dry-run`,
    options(view, summary, { body: DryRunRequest }, { 200: DryRunAnswer }),
    async (request, reply) => {
      const overload = gateway.overload()
      if (overload !== null) return sendProblem(reply, overload)
      const { policy, tasks } = request.body
      const given = policy === undefined ? undefined : checkPolicy(policy)
      if (given?.ok === false) return invalid(reply, given.errors)
      const results = tasks.map((task) =>
        dryRun(policies.book, { ...task, request_id: task.request_id ?? randomUUID() }, given?.policy),
      )
      return { results }
    },
  )
}

function invalid(reply: Reply, errors: readonly { path: string; message: string }[]): Reply {
  return sendProblem(reply, { code: 'schema_validation_failed', detail: 'The policy is not valid.', errors })
}
