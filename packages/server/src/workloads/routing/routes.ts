/** The routes of routing (docs/reference/http.md). Low and medium priority are closed while the router is overloaded; reads continue. */
import { setTimeout as delay } from 'node:timers/promises'
import { DecideAnswer, DecideRequest, Executed, Queued } from '@spillway/protocol/schema'
import type { FastifyLike as App } from 'spillway/workload'
import { operationView, refuseUntilReady, sendProblem } from 'spillway/workload'
import Type from 'typebox'
import type { AppRequest as Request } from '../../app.js'
import { viewsAll } from '../../auth/identity.js'
import type { MountedRoute } from '../../workload.js'
import { addBlocks } from './block-routes.js'
import type { RoutingParts } from './context.js'
import { addDeadLetters } from './dead-letter-routes.js'
import { isUuid } from './envelope.js'
import type { Gateway } from './gateway.js'
import { addPolicies } from './policy-routes.js'
import { anyone, options, problems, tags } from './route-options.js'

const decidePath = '/api/v1/routes/decide'
const messagesPath = '/api/v1/messages'
const lookAgainMs = [20, 100]

export function routingRoutes(parts: RoutingParts, gateway: Gateway): (app: App) => Promise<void> {
  return async (app) => {
    app.setSerializerCompiler(() => JSON.stringify)
    refuseUntilReady(app, parts.intake)
    addDecision(app, parts)
    addPolicies(app, parts, gateway)
    addBlocks(app, parts, gateway)
    addDeadLetters(app, parts)
  }
}

/** The two routes that submit. */
export function taskRoutes(gateway: Gateway): MountedRoute[] {
  const errorForm = 'object'
  const body = DecideRequest
  const decideAnswers = { 200: DecideAnswer, 202: Queued, ...problems }
  const messageAnswers = { 201: Executed, 202: Queued, ...problems }
  const messageSummary = 'Hand a task to the router; the decision becomes the result of the ticket'
  return [
    {
      ...{ url: decidePath, mount: gateway.decideMount(), errorForm },
      schema: { tags, summary: 'Decide which provider takes a task', body, response: decideAnswers },
    },
    {
      ...{ url: messagesPath, mount: gateway.messageMount(), errorForm },
      schema: { tags, summary: messageSummary, body, response: messageAnswers },
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
function addDecision(app: App, { decisions, intake, isAuthenticated }: RoutingParts): void {
  /** With authentication a caller reads its tenant's decisions, or all with the right to; without it, everybody reads all. */
  const tenantOf = ({ principal }: Request): string | null =>
    !isAuthenticated || viewsAll(principal) ? null : principal.identity
  const params = Type.Object({ messageId: Type.String() })
  app.get<{ Params: { messageId: string } }>(
    `${decidePath}/:messageId`,
    options(anyone, 'The decision, or the operation that will have it', { params }, {}),
    async (request, reply) => {
      const { messageId } = request.params
      const id = messageId.toLowerCase()
      if (isUuid(id)) {
        const ticket = await intake.store.ticket(id)
        const mine = ticket?.identity === request.principal.identity || viewsAll(request.principal)
        if (ticket?.type.startsWith('routing.') === true && mine) return operationView(ticket)
        const found = await findSoon(() => decisions.find(tenantOf(request), id))
        if (found !== null) {
          const { decision, traceId } = found
          return { ok: true, decision, context: { request_id: id, trace_id: traceId } }
        }
      }
      return sendProblem(reply, { code: 'not_found', detail: 'There is no such decision.' })
    },
  )
}
