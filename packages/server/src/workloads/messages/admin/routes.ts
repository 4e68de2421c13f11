/** The operators' routes: reading, configuring, moving, deleting. Pushing and consuming are in push-mount.ts and consume/. */
import type { FastifyLike } from 'spillway/workload'
import { type Route, tableRoutes } from '../../../route-table.js'
import type { Messages } from '../context.js'
import { groupRoutes } from './consumer-groups.js'
import { deadLetterRoutes } from './dead-letters.js'
import { messageRoutes } from './message.js'
import { messageListRoute } from './message-list.js'
import { queueChangeRoutes } from './queue-changes.js'
import { queueRoutes } from './queues.js'
import { type Admin, mayUse } from './route.js'
import { statementsOf } from './statements.js'
import { statusRoutes } from './status.js'
import { Throughput } from './throughput.js'
import { traceRoutes } from './traces.js'

const routes: readonly Route<Admin>[] = [
  ...queueRoutes,
  ...queueChangeRoutes,
  ...statusRoutes,
  ...deadLetterRoutes,
  messageListRoute,
  ...messageRoutes,
  ...traceRoutes,
  ...groupRoutes,
]

export function administrationRoutes(messages: Messages): (app: FastifyLike) => Promise<void> {
  const { intake } = messages
  const admin: Admin = { ...messages, ...statementsOf(intake), throughput: new Throughput() }
  return tableRoutes({ intake, tag: 'messages', errorForm: true }, admin, routes.map(ofUsableQueue))
}

/** For a key that is bound to queues, other queues do not exist. */
function ofUsableQueue(route: Route<Admin>): Route<Admin> {
  if (!route.url.includes(':queue')) return route
  return {
    ...route,
    handle: (admin, request, reply) =>
      mayUse(request, request.params.queue ?? '') ? route.handle(admin, request, reply) : null,
  }
}
