/** What the routing routes share. */
import { RoutingProblem } from '@spillway/protocol/schema'
import {
  type CutRows,
  cursorOf,
  fitPage,
  invalidCursor,
  type PageBounds,
  ProblemError,
  placeOf,
} from 'spillway/workload'
import { type MakeRoute, routeFor } from '../../route-table.js'
import type { RoutingParts } from './context.js'
import type { Gateway } from './gateway.js'

export const listLimitDefault = 50
export const anyone = {} as const
/** Policies, blocks and the broker's dead letters belong to the whole server. */
export const operate = { role: 'operate', wholeServer: true } as const
export const view = { role: 'view', wholeServer: true } as const

/** Of all routes. */
export const tag = 'routing'
export const errorForm = 'object'
export { RoutingProblem as problem }

export interface RoutesContext extends RoutingParts {
  gateway: Gateway
}

export const route: MakeRoute<RoutesContext> = routeFor()

type Names = readonly [first: string, second: string]

/**
 * A page of a list that is sorted by two names: `list` reads the items after these. The cursor is the names of the last item,
 * as one opaque text. Throws ProblemError if it is invalid.
 */
export async function pageByNames<Item>(
  { limit = listLimitDefault, cursor }: { limit?: number; cursor?: string },
  bytesMax: number,
  list: (bounds: PageBounds, after: Names | undefined) => Promise<CutRows<Item>>,
  namesOf: (item: Item) => Names,
): Promise<{ items: Item[]; next_cursor: string | null }> {
  const after = cursor === undefined ? undefined : readCursor(cursor)
  const { rows, isCut } = await list({ limit: limit + 1, bytesMax }, after)
  const { items, end } = fitPage(rows, { limit, bytesMax }, (item) => item, isCut)
  return { items, next_cursor: end === null ? null : cursorOf(JSON.stringify(namesOf(end))) }
}

function readCursor(cursor: string): Names {
  try {
    const names: unknown = JSON.parse(placeOf(cursor))
    if (Array.isArray(names) && names.length === 2 && names.every((name) => typeof name === 'string')) {
      return names as unknown as Names
    }
  } catch {
    // Not JSON: invalid too.
  }
  throw new ProblemError(invalidCursor)
}
