/** The routes of routing (docs/reference/http.md). Low and medium priority are closed while the router is overloaded; reads continue. */
import { setTimeout as delay } from 'node:timers/promises'
import { DecideAnswer, DecideRequest, Executed, Queued } from '@spillway/protocol/schema'
import type { FastifyLike as App } from 'spillway/workload'
import { operationView } from 'spillway/workload'
import { viewsAll } from '../../auth/identity.js'
import { tableRoutes } from '../../route-table.js'
import type { MountedRoute } from '../../workload.js'
import { addBlockChanges, blockRoutes } from './block-routes.js'
import type { RoutingParts } from './context.js'
import { deadLetterRoutes } from './dead-letter-routes.js'
import { isUuid } from './envelope.js'
import type { Gateway } from './gateway.js'
import { policyRoutes } from './policy-routes.js'
import { Registry } from './registry.js'
import { anyone, errorForm, problem, route, tag } from './route-options.js'

const decidePath = '/api/v1/routes/decide'
const messagesPath = '/api/v1/messages'
const lookAgainMs = [20, 100]

export function routingRoutes(parts: RoutingParts, gateway: Gateway): (app: App) => Promise<void> {
  const registry = new Registry(parts)
  const rows = [decisionRoute, ...policyRoutes, ...blockRoutes(registry), ...deadLetterRoutes]
  const addRows = tableRoutes({ intake: parts.intake, tag, errorForm, problem }, { ...parts, gateway }, rows)
  return async (app) => {
    await addRows(app)
    addBlockChanges(app, registry, gateway)
  }
}

/** The two routes that submit. */
export function taskRoutes(gateway: Gateway): MountedRoute[] {
  const body = DecideRequest
  const problems = { '4xx': problem, '5xx': problem }
  const decideAnswers = { 200: DecideAnswer, 202: Queued, ...problems }
  const messageAnswers = { 201: Executed, 202: Queued, ...problems }
  const messageSummary = 'Hand a task to the router; the decision becomes the result of the ticket'
  return [
    {
      ...{ url: decidePath, mount: gateway.decideMount(), errorForm },
      schema: { tags: [tag], summary: 'Decide which provider takes a task', body, response: decideAnswers },
    },
    {
      ...{ url: messagesPath, mount: gateway.messageMount(), errorForm },
      schema: { tags: [tag], summary: messageSummary, body, response: messageAnswers },
    },
  ]
}

/** A decision is answered before it is stored, one flush later: a caller that reads it at once must not get "not found". */
async function findSoon<Found>(find: () => Promise<Found | null>): Promise<Found | null> {
  for (const waitMs of lookAgainMs) {
    const found = await find()
    if (found !== null) return found
    await delay(waitMs)
  }
  return find()
}

/** By the request id of decide, or the operation id of a message. */
const decisionRoute = route('GET', `${decidePath}/:messageId`, anyone, {
  summary: 'The decision, or the operation that will have it',
  missing: 'decision',
  async handle({ decisions, intake, isAuthenticated }, { params, principal }) {
    const id = params.messageId.toLowerCase()
    if (!isUuid(id)) return null
    const mayAll = viewsAll(principal)
    const ticket = await intake.store.ticket(id)
    const isMine = ticket?.identity === principal.identity || mayAll
    if (ticket?.type.startsWith('routing.') === true && isMine) return operationView(ticket)
    // With authentication a caller reads its tenant's decisions, or all with the right to; without it, everybody reads all.
    const tenant = !isAuthenticated || mayAll ? null : principal.identity
    const found = await findSoon(() => decisions.find(tenant, id))
    if (found === null) return null
    return { ok: true, decision: found.decision, context: { request_id: id, trace_id: found.traceId } }
  },
})
