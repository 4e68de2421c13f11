/**
 * Where things are in a JSON text that JSON.parse has accepted. Strings are skipped by the engine's own search, so that a
 * long text costs little; nothing is decoded but member names with escapes.
 *
 * Callers bound the nesting before they descend.
 */
const quote = 0x22
const backslash = 0x5c
const comma = 0x2c
const openBracket = 0x5b
const openBrace = 0x7b
const closeBrace = 0x7d
/** '[' and '{' are one bit apart, as are ']' and '}'. */
const caseBit = 0x20
const space = 0x20
const nearCharacters = 32

/** The first position from `at` on that is no white space. */
export function skipSpace(text: string, at: number): number {
  let next = at
  while (text.charCodeAt(next) <= space) next++
  return next
}

/** Behind the string whose opening quote is at `at`. */
function stringEnd(text: string, at: number): number {
  // Most strings are shorter than the call that would look for their end.
  const near = Math.min(text.length, at + nearCharacters)
  let end = at + 1
  while (end < near && text.charCodeAt(end) !== quote) end++
  if (end === near) end = text.indexOf('"', end)
  while (isEscaped(text, end)) end = text.indexOf('"', end + 1)
  if (end < 0) throw new SyntaxError('a string without an end')
  return end + 1
}

function isEscaped(text: string, at: number): boolean {
  let first = at
  while (text.charCodeAt(first - 1) === backslash) first--
  return (at - first) % 2 === 1
}

/** Behind the value that begins at `at`. */
export function valueEnd(text: string, at: number): number {
  const first = text.charCodeAt(at)
  if (first === quote) return stringEnd(text, at)
  let depth = 0
  let next = at
  if ((first | caseBit) !== openBrace) {
    // A number or a word ends where a comma, a bracket, white space or the end of the text is.
    for (; next < text.length; next++) {
      const code = text.charCodeAt(next)
      if (code <= space || code === comma || (code | caseBit) === closeBrace) break
    }
    return next
  }
  while (next < text.length) {
    const code = text.charCodeAt(next)
    if (code === quote) {
      next = stringEnd(text, next)
      continue
    }
    next++
    if ((code | caseBit) === openBrace) depth++
    else if ((code | caseBit) === closeBrace && --depth === 0) return next
  }
  throw new SyntaxError('a value without an end')
}

/** The string from its opening quote at `from` to `end`, as it is meant. */
export function stringAt(text: string, from: number, end: number): string {
  const inner = text.slice(from + 1, end - 1)
  return inner.includes('\\') ? (JSON.parse(text.slice(from, end)) as string) : inner
}

/** Called with a value's place; answers where it ends, which `valueEnd` knows. */
export type VisitMember = (name: string, at: number, nameAt: number) => number
export type VisitElement = (index: number, at: number) => number

/** All members in order, repeated ones too. Of anything but an object: none. Answers where the value ends. */
export function eachMember(text: string, at: number, visit: VisitMember): number {
  if (text.charCodeAt(at) !== openBrace) return valueEnd(text, at)
  let next = skipSpace(text, at + 1)
  while (text.charCodeAt(next) === quote) {
    const nameAt = next
    const nameEnd = stringEnd(text, nameAt)
    const colon = skipSpace(text, nameEnd)
    const end = visit(stringAt(text, nameAt, nameEnd), skipSpace(text, colon + 1), nameAt)
    next = skipSpace(text, end)
    if (text.charCodeAt(next) !== comma) break
    next = skipSpace(text, next + 1)
  }
  return next + 1
}

/** All elements in order. Of anything but an array: none. Answers where the value ends. */
export function eachElement(text: string, at: number, visit: VisitElement): number {
  if (text.charCodeAt(at) !== openBracket) return valueEnd(text, at)
  let next = skipSpace(text, at + 1)
  for (let index = 0; (text.charCodeAt(next) | caseBit) !== closeBrace; index++) {
    next = skipSpace(text, visit(index, next))
    if (text.charCodeAt(next) !== comma) break
    next = skipSpace(text, next + 1)
  }
  return next + 1
}
