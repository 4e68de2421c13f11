/** Which operations a caller may see: its own, or all with `operate` or `view`; a key bound to queues sees only theirs. */
import { isUuid } from '../core/ids.js'
import type { IntakeRequest } from '../intake/define.js'
import type { Intake } from '../intake/intake.js'
import type { Ticket, TicketFilter, TicketOwner } from '../store/port.js'
import { identityOf } from './mount.js'
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

/** Who asks for tickets. */
export interface Caller extends Omit<Viewer, 'identity'> {
  /** Its identity for operations of this type: the one that its submissions of the type have. */
  identity(type: string): string
  /** The types whose definition has a function for it. All others have the same identity. */
  ownTypes: readonly string[]
}

/** No definition has this name: the identity for types without a function of their own. */
const anyType = ''

/** With `viewer` one identity for all types; without it, the identity that each definition gives to this request. */
export function callerOf(
  intake: Intake,
  request: IntakeRequest,
  viewer: ((request: IntakeRequest) => Viewer) | undefined,
): Caller {
  if (viewer !== undefined) {
    const { identity, ...rights } = viewer(request)
    return { ...rights, identity: () => identity, ownTypes: [] }
  }
  const { user } = request
  return {
    operates: user?.roles.has('operate') ?? false,
    views: user?.roles.has('view') ?? false,
    ...(user?.queues && { queues: user.queues }),
    identity: (type) => identityOf(intake.find(type)?.options.identity ?? intake.identity, request),
    ownTypes: intake.typesWithIdentity,
  }
}

export interface TicketAccess {
  /** Null for another's operation, which looks like an unknown one. */
  visible(caller: Caller, id: string): Promise<Ticket | null>
  /** Restricts a filter to what the caller may see. */
  narrow(caller: Caller, filter: TicketFilter): TicketFilter
}

export const seesAll = ({ operates, views }: Caller): boolean => operates || views === true

export const owns = (caller: Caller, { type, identity }: Ticket): boolean => caller.identity(type) === identity

/**
 * `namedTypes`: types whose queue the caller names. A key bound to queues also sees the tickets of its own other work, whose
 * lanes the server names.
 */
export function ticketAccess({ store }: Intake, namedTypes: readonly string[]): TicketAccess {
  const isWithin = (caller: Caller, ticket: Ticket): boolean =>
    mayUseQueue(caller.queues, ticket.queue) || (!namedTypes.includes(ticket.type) && owns(caller, ticket))
  return {
    async visible(caller, id) {
      const ticket = isUuid(id) ? await store.ticket(id) : null
      if (ticket === null || !(seesAll(caller) || owns(caller, ticket))) return null
      return isWithin(caller, ticket) ? ticket : null
    },
    narrow(caller, filter) {
      const { queues, identity } = caller
      return {
        ...filter,
        ...(!seesAll(caller) && { owner: ownerOf(caller) }),
        ...(queues !== undefined && { bound: { queues, identity: identity(anyType), namedTypes } }),
      }
    },
  }
}

function ownerOf({ identity, ownTypes }: Caller): TicketOwner {
  const usual = identity(anyType)
  const types = ownTypes.filter((type) => identity(type) !== usual)
  return { identity: usual, types, identities: types.map(identity) }
}
