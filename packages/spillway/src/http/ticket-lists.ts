/** What the lists of operations and of dead letters share: filter and pages. */
import type { ListOperationsQuery } from '@spillway/protocol/schema'
import { limits } from '@spillway/protocol/wire'
import type { Static } from 'typebox'
import type { TicketFilter } from '../store/port.js'
import { ProblemError } from './faults.js'
import { idOfCursor, invalidCursor } from './pages.js'
import { refuse, type TicketContext } from './ticket-table.js'
import type { Caller } from './viewer.js'

export type ListQuery = Static<typeof ListOperationsQuery>

const listLimitDefault = 50

/** The filter that the query asks for, restricted to what the caller may see. */
export function filterOf(
  { access }: TicketContext,
  caller: Caller,
  query: Omit<ListQuery, 'limit' | 'cursor'>,
): TicketFilter {
  const filter: TicketFilter = {}
  for (const name of ['status', 'type', 'queue', 'partition', 'identity'] as const) {
    const value = query[name]
    if (value !== undefined) Object.assign(filter, { [name]: value })
  }
  if (query.from !== undefined) filter.from = instant('from', query.from)
  if (query.to !== undefined) filter.to = instant('to', query.to)
  return access.narrow(caller, filter)
}

/** A leap second has the form of a timestamp, but a Date cannot express it. */
function instant(name: string, text: string): Date {
  const date = new Date(text)
  if (!Number.isNaN(date.getTime())) return date
  const errors = [{ path: `/${name}`, message: 'is not a point in time' }]
  throw new ProblemError({ code: 'invalid_request', detail: 'The query is not valid.', errors })
}

/** Null: the cursor is invalid. */
export function pageOf(query: Pick<ListQuery, 'limit' | 'cursor'>): { limit: number; before: string | null } | null {
  const limit = Math.min(query.limit ?? listLimitDefault, limits.listItemsMax)
  if (query.cursor === undefined) return { limit, before: null }
  const before = idOfCursor(query.cursor)
  return before === null ? null : { limit, before }
}

export const badCursor = refuse(invalidCursor)
