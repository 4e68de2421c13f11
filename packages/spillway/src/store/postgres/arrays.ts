/**
 * Array literals for PostgreSQL. The driver's own encoding quotes and escapes every element; most of ours are numbers,
 * booleans and UUIDs, which need neither (a flush of 64 items has some 1,500 elements).
 */
type Plain = number | boolean | string | null

/** For elements without quotes, backslashes, commas, braces or blanks: numbers, booleans, UUIDs. */
export function plainArray(values: readonly Plain[]): string {
  const first = values[0]
  if (first !== undefined && isUniform(values)) return repeated(first === null ? 'NULL' : String(first), values.length)
  let out = '{'
  for (let i = 0; i < values.length; i++) out += i === 0 ? (values[i] ?? 'NULL') : `,${values[i] ?? 'NULL'}`
  return `${out}}`
}

/** Most columns of a flush have the same value in every row: its type, its timeout. Those are written ten times as fast. */
function isUniform(values: readonly Plain[]): boolean {
  for (let i = 1; i < values.length; i++) if (values[i] !== values[0]) return false
  return true
}

function repeated(element: string, count: number): string {
  return `{${`${element},`.repeat(count - 1)}${element}}`
}

/** For any text. */
export function textArray(values: readonly (string | null)[]): string {
  const first = values[0]
  if (first !== undefined && isUniform(values)) return repeated(textElement(first), values.length)
  let out = '{'
  for (let i = 0; i < values.length; i++) {
    if (i > 0) out += ','
    out += textElement(values[i] ?? null)
  }
  return `${out}}`
}

/** Encodes an array parameter of any type; other values stay unchanged. */
export function arrayOf(value: unknown): unknown {
  if (!Array.isArray(value)) return value
  return value.some((element) => typeof element === 'string') ? textArray(value) : plainArray(value)
}

function textElement(value: string | null): string {
  if (value === null) return 'NULL'
  return needsEscape.test(value) ? `"${value.replace(escaped, '\\$&')}"` : `"${value}"`
}

const needsEscape = /["\\]/
const escaped = /["\\]/g

/** Separates JSON texts in a list: it cannot occur in JSON, inside or outside strings. In SQL E'\\x1e'. */
export const jsonSeparator = '\x1e'
