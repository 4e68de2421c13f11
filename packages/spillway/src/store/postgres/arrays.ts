/**
 * Arrays as PostgreSQL reads them. The driver's own encoding quotes and escapes every element; most of ours are
 * numbers, booleans and UUIDs, which need neither (a flush of 64 items has some 1,500 elements).
 */
type Plain = number | boolean | string | null

/** For elements without quotes, backslashes, commas, braces or blanks: numbers, booleans, UUIDs. */
export function plainArray(values: readonly Plain[]): string {
  return `{${values.map((value) => (value === null ? 'NULL' : value)).join(',')}}`
}

/** For any text. */
export function textArray(values: readonly (string | null)[]): string {
  let out = '{'
  for (let i = 0; i < values.length; i++) {
    const value = values[i] ?? null
    if (i > 0) out += ','
    if (value === null) out += 'NULL'
    else out += needsEscape.test(value) ? `"${value.replace(escaped, '\\$&')}"` : `"${value}"`
  }
  return `${out}}`
}

const needsEscape = /["\\]/
const escaped = /["\\]/g
