/**
 * RFC 8785 (JSON Canonicalization Scheme): members sorted by their UTF-16 code units, no spaces, texts and numbers as
 * ECMAScript writes them. Equal values have the same text, as a hash needs.
 */
export function canonicalJson(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join(',')}]`
  if (typeof value === 'object' && value !== null) {
    const members = value as Readonly<Record<string, unknown>>
    // The default order of `sort` is that of UTF-16 code units.
    const names = Object.keys(members).filter((name) => members[name] !== undefined)
    return `{${names
      .sort()
      .map((name) => `${JSON.stringify(name)}:${canonicalJson(members[name])}`)
      .join(',')}}`
  }
  if (typeof value === 'number' && !Number.isFinite(value)) throw new TypeError(`JSON has no ${value}`)
  const text = JSON.stringify(value)
  if (text === undefined) throw new TypeError(`JSON cannot say a ${typeof value}`)
  return text
}
