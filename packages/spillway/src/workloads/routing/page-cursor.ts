/** Where a page ended: two names, as one opaque text. */
function pageCursor(first: string, second: string): string {
  return Buffer.from(JSON.stringify([first, second])).toString('base64url')
}

/** Null: it is none of ours. */
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

/** Of one more than a page holds, if there are more: `nameOf` says where the next one begins. */
export function pageOf<Item>(
  found: readonly Item[],
  limit: number,
  nameOf: (item: Item) => readonly [first: string, second: string],
): { items: Item[]; next_cursor: string | null } {
  const items = found.slice(0, limit)
  const last = items.at(-1)
  const isMore = found.length > limit && last !== undefined
  return { items, next_cursor: isMore ? pageCursor(...nameOf(last)) : null }
}
