/** Which operations a caller may see: its own, or all with `operate` or `view`; a key bound to queues sees only theirs. */
import type { FastifyRequest } from 'fastify'
import { isUuid } from '../core/ids.js'
import type { Store, Ticket, TicketFilter } from '../store/port.js'
import { mayUseQueue } from './queue-names.js'

export const roles = ['submit', 'consume', 'operate', 'view', 'metrics'] as const
export type Role = (typeof roles)[number]

declare module 'fastify' {
  interface FastifyContextConfig {
    /** The principal needs one of these. `operate` may do everything. */
    role?: Role | readonly Role[]
  }
}

export interface Viewer {
  identity: string
  /** Sees and changes everything. */
  operates: boolean
  /** Sees everything, changes nothing. Default: only if it operates. */
  views?: boolean
  /** Patterns of the queues it is bound to (`orders*`); absent: all. */
  queues?: readonly string[]
}

export function defaultViewer(request: FastifyRequest): Viewer {
  const { principal, user, clientAddress } = request as {
    principal?: { identity: string; roles: ReadonlySet<string>; queues?: readonly string[] } | null
    user?: { id?: unknown }
    clientAddress?: string
  }
  if (principal !== undefined && principal !== null) {
    const { identity, roles, queues } = principal
    return { identity, operates: roles.has('operate'), views: roles.has('view'), ...(queues && { queues }) }
  }
  return { identity: user?.id === undefined ? (clientAddress ?? request.ip) : String(user.id), operates: false }
}

export interface TicketAccess {
  /** Null for another's operation, which looks like an unknown one. */
  visible(viewer: Viewer, id: string): Promise<Ticket | null>
  /** Restricts a filter to what the viewer may see. */
  narrow(viewer: Viewer, filter: TicketFilter): TicketFilter
}

/**
 * `namedTypes`: types whose queue the caller names. A key bound to queues also sees the tickets of its own other work, whose
 * lanes the server names.
 */
export function ticketAccess(store: Store, namedTypes: readonly string[]): TicketAccess {
  const isWithin = ({ identity, queues }: Viewer, ticket: Ticket): boolean =>
    mayUseQueue(queues, ticket.queue) || (ticket.identity === identity && !namedTypes.includes(ticket.type))
  const sees = (viewer: Viewer, ticket: Ticket): boolean =>
    (viewer.operates || viewer.views === true || ticket.identity === viewer.identity) && isWithin(viewer, ticket)
  return {
    async visible(viewer, id) {
      const ticket = isUuid(id) ? await store.ticket(id) : null
      return ticket !== null && sees(viewer, ticket) ? ticket : null
    },
    narrow(viewer, filter) {
      const { identity, operates, views, queues } = viewer
      return {
        ...filter,
        ...(!operates && views !== true && { identity }),
        ...(queues !== undefined && { bound: { queues, identity, namedTypes } }),
      }
    },
  }
}
