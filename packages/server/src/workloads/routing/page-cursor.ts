import type { CutRows } from 'spillway/workload'
import { fitPage, type PageBounds } from 'spillway/workload'

/** The end of a page: two names as one opaque text. */
function pageCursor(first: string, second: string): string {
  return Buffer.from(JSON.stringify([first, second])).toString('base64url')
}

/** Null: invalid. */
export function readPageCursor(text: string): readonly [first: string, second: string] | null {
  try {
    const value: unknown = JSON.parse(Buffer.from(text, 'base64url').toString())
    if (!Array.isArray(value) || value.length !== 2) return null
    const [first, second] = value as unknown[]
    return typeof first === 'string' && typeof second === 'string' ? [first, second] : null
  } catch {
    return null
  }
}

/** Cuts the items to one page; `nameOf` says where the next one begins. */
export function pageOf<Item>(
  { rows, isCut }: CutRows<Item>,
  bounds: PageBounds,
  nameOf: (item: Item) => readonly [first: string, second: string],
): { items: Item[]; next_cursor: string | null } {
  const { items, end } = fitPage(rows, bounds, (item) => item, isCut)
  return { items, next_cursor: end === null ? null : pageCursor(...nameOf(end)) }
}
