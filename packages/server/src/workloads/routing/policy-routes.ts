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
import type { FastifyLike as App } from 'spillway/workload'
import { sendProblem } from 'spillway/workload'
import Type, { type Static } from 'typebox'
import type { AppReply as Reply } from '../../app.js'
import { dryRun } from './decision.js'
import type { RoutingWorkload } from './index.js'
import { pageByNames } from './name-pages.js'
import { checkPolicy } from './policies.js'
import { operate, problems, tags, view } from './route-options.js'

const path = '/api/v1/policies'
const Params = Type.Object({ policyId: Type.String() })
const notFound = { code: 'policy_not_found', detail: 'There is no such policy.' } as const

export function addPolicies(app: App, workload: RoutingWorkload): void {
  addChanges(app, workload)
  addReads(app, workload)
  addDryRun(app, workload)
}

function addChanges(app: App, { policies, gateway }: RoutingWorkload): void {
  app.post<{ Body: unknown }>(
    path,
    {
      schema: {
        ...{ tags, summary: 'Create or replace a policy', body: PutPolicy },
        response: { 200: PolicyView, 201: PolicyView, ...problems },
      },
      // Validated below, together with rules that a schema cannot express.
      validatorCompiler: () => () => true,
      config: operate,
    },
    async (request, reply) => {
      const overload = gateway.overload()
      if (overload !== null) return sendProblem(reply, overload)
      const checked = checkPolicy(request.body)
      if (!checked.ok) return invalid(reply, checked.errors)
      const outcome = await policies.put(checked.policy)
      if (outcome.kind === 'full') {
        const detail = `There are ${outcome.limit} policies already; remove one first.`
        return sendProblem(reply, { code: 'conflict', detail })
      }
      reply.code(outcome.kind === 'created' ? 201 : 200)
      return outcome.policy
    },
  )
  app.delete<{ Params: { policyId: string }; Querystring: Static<typeof PolicyQuery> }>(
    `${path}/:policyId`,
    { schema: { tags, summary: 'Remove a policy', params: Params, querystring: PolicyQuery }, config: operate },
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

function addReads(app: App, { policies, deps }: RoutingWorkload): void {
  const bytesMax = deps.settings.pageBytesMax
  app.get<{ Querystring: Static<typeof ListPoliciesQuery> }>(
    path,
    {
      schema: {
        ...{ tags, summary: 'Policies, those for every tenant first', querystring: ListPoliciesQuery },
        response: { 200: PolicyPage, ...problems },
      },
      config: view,
    },
    async ({ query }) =>
      pageByNames(
        query,
        bytesMax,
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
    {
      schema: {
        ...{ tags, summary: 'A policy', params: Params, querystring: PolicyQuery },
        response: { 200: PolicyView, ...problems },
      },
      config: view,
    },
    async (request, reply) => {
      const policy = await policies.get({ policyId: request.params.policyId, tenantId: request.query.tenant_id })
      return policy ?? sendProblem(reply, notFound)
    },
  )
}

/** It shows policies, so it requires the permission to read them. */
function addDryRun(app: App, { policies, gateway }: RoutingWorkload): void {
  app.post<{ Body: Static<typeof DryRunRequest> }>(
    `${path}/dry-run`,
    {
      schema: {
        ...{ tags, summary: 'What would be decided, and why, provider by provider', body: DryRunRequest },
        response: { 200: DryRunAnswer, ...problems },
      },
      config: view,
    },
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
