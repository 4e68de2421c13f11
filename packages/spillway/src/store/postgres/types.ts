/** How the texts of the server become values. All our statements are read so, on the user's connections too. */
import pg from 'pg'

/**
 * BIGINT as number: sequences, counts and fences stay far below 2^53 (a million a second for 285 years). A larger one is a
 * broken invariant, better thrown than rounded.
 */
export function parseInt8(text: string): number {
  const value = Number(text)
  if (!Number.isSafeInteger(value)) throw new RangeError(`the bigint ${text} is not a safe integer`)
  return value
}

const textArrayOid = 1009

const getTypeParser: typeof pg.types.getTypeParser = (oid: number, format?: 'text' | 'binary') => {
  if (format === 'binary') return pg.types.getTypeParser(oid, 'binary')
  return parsers.get(oid) ?? pg.types.getTypeParser(oid, 'text')
}

export const types = {
  getTypeParser: (oid: number, format?: 'text' | 'binary') => getTypeParser(oid as never, format as never),
}

/**
 * A flush returns a dozen arrays. The driver reads them character by character, which cost more than the rest of the answer
 * together.
 */
const parsers = new Map<number, (text: string) => unknown>([
  [pg.types.builtins.INT8, parseInt8],
  [1005, parseInt8Array], // smallint[]
  [1007, parseInt8Array], // int[]
  [1016, parseInt8Array], // bigint[]
  [textArrayOid, parseTextArray],
])

/** Drops the bounds; braces become brackets. */
function parseAnyInt8Array(text: string): (number | null)[] {
  const list = text.slice(text.indexOf('{')).replaceAll('{', '[').replaceAll('}', ']').replaceAll('NULL', 'null')
  return JSON.parse(list, (_, value) => (typeof value === 'number' ? parseInt8(String(value)) : value))
}

/** For integers of any size: `{1,2,NULL}`. Nested arrays stay nested, whatever the type says. */
export function parseInt8Array(text: string): (number | null)[] {
  if (!isFlat(text)) return parseAnyInt8Array(text)
  const list = `[${text.slice(1, -1)}]`
  const values: (number | null)[] = JSON.parse(list.includes('N') ? list.replaceAll('NULL', 'null') : list)
  for (const value of values) {
    if (value !== null && !Number.isSafeInteger(value))
      throw new RangeError(`a bigint of ${text} is not a safe integer`)
  }
  return values
}

const parseAnyTextArray: (text: string) => (string | null)[] = pg.types.getTypeParser(textArrayOid as never, 'text')

/** Handlers may query anything: `{{1,2},{3,4}}`, or `[0:1]={1,2}` with its own bounds. */
const isFlat = (text: string): boolean => text[0] === '{' && text[1] !== '{'

/** `{a,"b c",NULL}`; without quotes, there is nothing to unescape. */
export function parseTextArray(text: string): (string | null)[] {
  if (text.includes('"') || !isFlat(text)) return parseAnyTextArray(text)
  const inner = text.slice(1, -1)
  if (inner === '') return []
  const values: (string | null)[] = inner.split(',')
  return inner.includes('NULL') ? values.map((value) => (value === 'NULL' ? null : value)) : values
}
