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
import { ProblemError } from 'spillway/workload'
import { dryRun } from './decision.js'
import type { Gateway } from './gateway.js'
import { checkPolicy } from './policies.js'
import { operate, pageByNames, route, view } from './route-options.js'

const path = '/api/v1/policies'

function shedWhileOverloaded(gateway: Gateway): void {
  const overload = gateway.overload()
  if (overload !== null) throw new ProblemError(overload)
}

const notFound = (): ProblemError => new ProblemError({ code: 'policy_not_found', detail: 'There is no such policy.' })

const invalid = (errors: readonly { path: string; message: string }[]): ProblemError =>
  new ProblemError({ code: 'schema_validation_failed', detail: 'The policy is not valid.', errors })

export const policyRoutes = [
  route('POST', path, operate, {
    summary: 'Create or replace a policy',
    body: PutPolicy,
    // Together with rules that a schema cannot express.
    isBodyDescribed: true,
    answer: PolicyView,
    otherAnswers: { 201: PolicyView },
    async handle({ policies, gateway }, { body }, reply) {
      shedWhileOverloaded(gateway)
      const checked = checkPolicy(body)
      if (!checked.ok) throw invalid(checked.errors)
      const outcome = await policies.put(checked.policy)
      if (outcome.kind === 'full') {
        const detail = `There are ${routingLimits.policiesMax} policies already; remove one first.`
        throw new ProblemError({ code: 'conflict', detail })
      }
      return reply.code(outcome.kind === 'created' ? 201 : 200).send(outcome.policy)
    },
  }),
  route('DELETE', `${path}/:policyId`, operate, {
    summary: 'Remove a policy',
    query: PolicyQuery,
    async handle({ policies, gateway }, { params: { policyId }, query }, reply) {
      shedWhileOverloaded(gateway)
      if (!(await policies.remove({ policyId, tenantId: query.tenant_id }))) throw notFound()
      return reply.code(204).send()
    },
  }),
  route('GET', path, view, {
    summary: 'Policies, those for every tenant first',
    query: ListPoliciesQuery,
    answer: PolicyPage,
    handle: ({ policies, config }, { query }) =>
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
  }),
  route('GET', `${path}/:policyId`, view, {
    summary: 'A policy',
    query: PolicyQuery,
    answer: PolicyView,
    async handle({ policies }, { params: { policyId }, query }) {
      const policy = await policies.get({ policyId, tenantId: query.tenant_id })
      if (policy === null) throw notFound()
      return policy
    },
  }),
  // It shows policies, so it requires the permission to read them.
  route('POST', `${path}/dry-run`, view, {
    summary: 'What would be decided, and why, provider by provider',
    body: DryRunRequest,
    answer: DryRunAnswer,
    handle({ policies, gateway }, { body: { policy, tasks } }) {
      shedWhileOverloaded(gateway)
      const given = policy === undefined ? undefined : checkPolicy(policy)
      if (given?.ok === false) throw invalid(given.errors)
      const results = tasks.map((task) =>
        dryRun(policies.book, { ...task, request_id: task.request_id ?? randomUUID() }, given?.policy),
      )
      return { results }
    },
  }),
]
