/** The ticket routes need TypeBox, which is an optional package: they are loaded when the first request comes. */
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

/** The rest of a path below a prefix; null if it is elsewhere. */
export function pathWithin(prefix: string, path: string): string | null {
  return path.startsWith(prefix) ? path.slice(prefix.length) : null
}
