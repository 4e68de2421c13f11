/** Where a page ended: two names, as one opaque text. */
export function pageCursor(first: string, second: string): string {
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
