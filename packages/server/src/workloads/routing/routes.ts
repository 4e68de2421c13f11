/** The routes of contract §5. Low and medium priority are closed while the router is overloaded; reads continue. */
import { setTimeout as delay } from 'node:timers/promises'
import { DecideAnswer, DecideRequest, Executed, Queued } from '@spillway/protocol/schema'
import type { FastifyLike as App, Mount } from 'spillway/workload'
import { mountedRoute, operationView, refuseUntilReady, sendProblem } from 'spillway/workload'
import Type from 'typebox'
import type { AppRequest as Request } from '../../http/app.js'
import { viewsAll } from '../../http/identity.js'
import { addBlocks } from './block-routes.js'
import { addDeadLetters } from './dead-letter-routes.js'
import { isUuid } from './envelope.js'
import type { RoutingWorkload } from './index.js'
import { addPolicies } from './policy-routes.js'
import { anyone, problems, tags } from './route-setting.js'

const decidePath = '/api/v1/routes/decide'
const messagesPath = '/api/v1/messages'
const lookAgainMs = [20, 100]

/** The two high-load routes, for the server's short path. */
export function routingMounts({ gateway }: RoutingWorkload): [url: string, mounted: Mount][] {
  return [
    [decidePath, gateway.decideMount()],
    [messagesPath, gateway.messageMount()],
  ]
}

export function routingRoutes(workload: RoutingWorkload): (app: App) => Promise<void> {
  return async (app) => {
    app.setSerializerCompiler(() => JSON.stringify)
    refuseUntilReady(app, workload.deps.intake.core)
    addTasks(app, workload)
    addDecision(app, workload)
    addPolicies(app, workload)
    addBlocks(app, workload)
    addDeadLetters(app, workload)
  }
}

function addTasks(app: App, { gateway }: RoutingWorkload): void {
  const config = { role: 'submit', errorForm: 'object' } as const
  app.route({
    method: 'POST',
    url: decidePath,
    ...mountedRoute(gateway.decideMount(), DecideRequest),
    schema: {
      ...{ tags, summary: 'Decide which provider takes a task', body: DecideRequest },
      response: { 200: DecideAnswer, 202: Queued, ...problems },
    },
    config,
  })
  app.route({
    method: 'POST',
    url: messagesPath,
    ...mountedRoute(gateway.messageMount(), DecideRequest),
    schema: {
      ...{ tags, summary: 'Hand a task to the router; the decision becomes the result of the ticket' },
      ...{ body: DecideRequest, response: { 201: Executed, 202: Queued, ...problems } },
    },
    config,
  })
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
function addDecision(app: App, { answers, deps }: RoutingWorkload): void {
  const { intake, settings } = deps
  /** With authentication a caller reads its tenant's decisions, or all with the right to; without it, everybody reads all. */
  const tenantOf = ({ principal }: Request): string | null =>
    !settings.isAuthenticated || viewsAll(principal) ? null : principal.identity
  app.get<{ Params: { messageId: string } }>(
    `${decidePath}/:messageId`,
    {
      schema: {
        ...{ tags, summary: 'What was decided, or the operation that will tell' },
        ...{ params: Type.Object({ messageId: Type.String() }), response: { ...problems } },
      },
      config: anyone,
    },
    async (request, reply) => {
      const { messageId } = request.params
      const id = messageId.toLowerCase()
      if (isUuid(id)) {
        const ticket = await intake.core.store.ticket(id)
        const mine = ticket?.identity === request.principal.identity || viewsAll(request.principal)
        if (ticket?.type.startsWith('routing.') === true && mine) return operationView(ticket)
        const found = await findSoon(() => answers.find(tenantOf(request), id))
        if (found !== null) {
          const { decision, traceId } = found
          return { ok: true, decision, context: { request_id: id, trace_id: traceId } }
        }
      }
      return sendProblem(reply, { code: 'not_found', detail: 'There is no such decision.' })
    },
  )
}
