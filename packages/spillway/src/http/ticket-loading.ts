/** The ticket routes need TypeBox, which is an optional package: they are loaded when the first request comes. */
import { check, type Rule } from '../core/options.js'
import type { Intake } from '../intake/intake.js'
import type { TicketRoutesOptions, Tickets } from './tickets.js'
import { requireTypebox } from './validation.js'

type Module = typeof import('./tickets.js')

export interface LoadedTickets extends Pick<Module, 'noTicketPath' | 'queryOf'> {
  tickets: Tickets
  find: Module['findTicketRoute']
}

/** Throws at once if TypeBox is not installed. */
export function loadTickets(intake: Intake, options: TicketRoutesOptions | undefined): () => Promise<LoadedTickets> {
  requireTypebox('a ticket route')
  let loaded: Promise<LoadedTickets> | undefined
  return () => {
    loaded ??= import('./tickets.js').then(({ Tickets, findTicketRoute: find, noTicketPath, queryOf }) => ({
      tickets: new Tickets(intake, options),
      ...{ find, noTicketPath, queryOf },
    }))
    return loaded
  }
}

/** The `Location` of a 202 leads to the ticket routes: below `prefix`, for all routes of this intake. */
export function mountedAt(intake: Intake, prefix = ''): string {
  check('the ticket routes', 'prefix', prefix, isPrefix)
  intake.ticketPrefix = prefix
  return prefix
}

const isPrefix: Rule = (value) =>
  typeof value === 'string' && /^(\/[^/?#\s]+)*$/.test(value) ? null : "a path like '/shop', without a slash at its end"

/** The rest of a path below a prefix; null if it is elsewhere. */
export function pathWithin(prefix: string, path: string): string | null {
  return path.startsWith(prefix) ? path.slice(prefix.length) : null
}
