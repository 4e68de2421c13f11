/** Pages of lists that are sorted by two names. The cursor of a page is the names of its last item, as one opaque text. */
import { type CutRows, cursorOf, fitPage, type PageBounds, ProblemError, placeOf } from 'spillway/workload'
import { listLimitDefault } from './route-options.js'

type Names = readonly [first: string, second: string]

/** `list` reads the items after these names. Throws ProblemError if the cursor is invalid. */
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
  throw new ProblemError({ code: 'invalid_request', detail: 'The cursor is invalid.' })
}
