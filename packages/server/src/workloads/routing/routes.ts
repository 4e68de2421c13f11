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
import { addDeadLetters } from './dead-letter-routes.js'
import { isUuid } from './envelope.js'
import type { RoutingWorkload } from './index.js'
import { addPolicies } from './policy-routes.js'
import { anyone, problems, tags } from './route-options.js'

const decidePath = '/api/v1/routes/decide'
const messagesPath = '/api/v1/messages'
const lookAgainMs = [20, 100]

export function routingRoutes(workload: RoutingWorkload): (app: App) => Promise<void> {
  return async (app) => {
    app.setSerializerCompiler(() => JSON.stringify)
    refuseUntilReady(app, workload.deps.intake)
    addDecision(app, workload)
    addPolicies(app, workload)
    addBlocks(app, workload)
    addDeadLetters(app, workload)
  }
}

/** The two routes that submit. */
export function taskRoutes({ gateway }: RoutingWorkload): MountedRoute[] {
  const errorForm = 'object'
  return [
    {
      url: decidePath,
      mount: gateway.decideMount(),
      schema: {
        ...{ tags, summary: 'Decide which provider takes a task', body: DecideRequest },
        response: { 200: DecideAnswer, 202: Queued, ...problems },
      },
      errorForm,
    },
    {
      url: messagesPath,
      mount: gateway.messageMount(),
      schema: {
        ...{ tags, summary: 'Hand a task to the router; the decision becomes the result of the ticket' },
        ...{ body: DecideRequest, response: { 201: Executed, 202: Queued, ...problems } },
      },
      errorForm,
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
function addDecision(app: App, { decisions, deps }: RoutingWorkload): void {
  const { intake, settings } = deps
  /** With authentication a caller reads its tenant's decisions, or all with the right to; without it, everybody reads all. */
  const tenantOf = ({ principal }: Request): string | null =>
    !settings.isAuthenticated || viewsAll(principal) ? null : principal.identity
  app.get<{ Params: { messageId: string } }>(
    `${decidePath}/:messageId`,
    {
      schema: {
        ...{ tags, summary: 'The decision, or the operation that will have it' },
        ...{ params: Type.Object({ messageId: Type.String() }), response: { ...problems } },
      },
      config: anyone,
    },
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
