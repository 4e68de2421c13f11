/** Pages of lists: they end at a number of items or of bytes, whichever comes first, and have at least one item. */
import { isUuid } from '../core/ids.js'
import { jsonOf } from './carried-json.js'
import type { Problem } from './problem.js'

export interface PageBounds {
  limit: number
  /** For the items as JSON, with the commas between them. */
  bytesMax: number
}

export interface Page<Row, View> {
  items: View[]
  /** The last row of the page, if there are more after it. */
  end: Row | null
}

/** `rows` are those of the page and, if there are more, at least one after it; `isCut`: there are more after `rows`. */
export function fitPage<Row, View>(
  rows: readonly Row[],
  { limit, bytesMax }: PageBounds,
  viewOf: (row: Row) => View,
  isCut = false,
): Page<Row, View> {
  const items: View[] = []
  let bytes = 0
  for (const row of rows) {
    if (items.length >= limit) break
    const view = viewOf(row)
    bytes += Buffer.byteLength(jsonOf(view)) + (items.length === 0 ? 0 : 1)
    if (bytes > bytesMax && items.length > 0) break
    items.push(view)
  }
  return { items, end: isCut || rows.length > items.length ? (rows[items.length - 1] ?? null) : null }
}

/** A page of rows ordered by id. */
export function pageById<Row extends { id: string }, View>(
  rows: readonly Row[],
  bounds: PageBounds,
  viewOf: (row: Row) => View,
): { items: View[]; next_cursor: string | null } {
  const { items, end } = fitPage(rows, bounds, viewOf)
  return { items, next_cursor: end === null ? null : cursorOf(end.id) }
}

export const invalidCursor: Problem = {
  code: 'invalid_request',
  detail: 'The cursor is invalid.',
  errors: [{ path: '/cursor', message: 'take next_cursor of the previous page' }],
}

export const cursorOf = (place: string): string => Buffer.from(place).toString('base64url')

export const placeOf = (cursor: string): string => Buffer.from(cursor, 'base64url').toString()

/** The id in a cursor of `pageById`; null: the cursor is invalid. */
export function idOfCursor(cursor: string): string | null {
  const id = placeOf(cursor)
  return isUuid(id) ? id : null
}

/** For lists paged by offset: where the next page starts. */
export interface Pagination {
  limit: number
  offset: number
  /** Null: this is the last page. */
  nextOffset: number | null
}

export function paginationOf<Row, View>(limit: number, offset: number, { items, end }: Page<Row, View>): Pagination {
  return { limit, offset, nextOffset: end === null ? null : offset + items.length }
}
