import { isUtf8 } from 'node:buffer'
import { limits } from '@spillway/protocol/wire'
import { pointerStep, presentablePointer, type RequestFault } from './json-pointer.js'
import { eachElement, eachMember, skipSpace, stringAt, valueEnd } from './json-scan.js'

/**
 * JSON that the store can keep: valid UTF-8, bounded nesting, finite numbers, no `__proto__`, no NUL, no lone surrogate.
 *
 * Ordinary bodies pay one pass over the bytes and JSON.parse, no walk over the text, because each fault leaves a trace in
 * the text. NUL and lone surrogates can only come from a \u escape (JSON.parse and the UTF-8 check refuse raw ones), a
 * number can only overflow through an exponent or a run of 200 digits and more, and a member named `__proto__` is either
 * written out or escaped. The nesting is measured before parsing, so that a hostile body costs a scan that stops at the 65th
 * bracket.
 *
 * The walk is over the text, not over the parsed value: payloads are passed on as text, including members that JSON.parse
 * drops for a later one of the same name.
 */
export type StrictJson =
  /** `text`: unchanged. */
  { ok: true; value: unknown; text: string } | { ok: false; reason: StrictJsonReason; fault: RequestFault }

export type StrictJsonReason = 'encoding' | 'syntax' | 'nesting' | 'number' | 'member' | 'character'

const quote = 0x22
const backslash = 0x5c
const letterU = 0x75
const letterE = 0x65
/** '[' is 0x5b and '{' is 0x7b: one bit apart, as are ']' and '}'. */
const opening = 0x7b
const openingBracket = 0x5b
const minus = 0x2d
const closing = 0x7d
const caseBit = 0x20
/** With a two-digit exponent (≤ 99) a number needs 209 digits or more to exceed 1.8e308. */
const suspiciousDigits = 200

enum Scan {
  plain = 0,
  /** A \u escape. */
  escape = 1,
  /** A number that may overflow. */
  number = 2,
  tooDeep = 4,
}

/** NUL, a surrogate, or a letter of `__proto__`, escaped. */
const suspiciousEscape = /\\u(?:0000|d[89a-f]|00(?:5f|6f|7[024]))/i

function isDigit(byte: number | undefined): boolean {
  return byte !== undefined && byte >= 0x30 && byte <= 0x39
}

/** Skips one string; `start` is the byte after its opening quote. The sign of the result says whether it has a \u escape. */
function endOfString(bytes: Uint8Array, start: number): number {
  let escaped = false
  let at = start
  for (; at < bytes.length; at++) {
    const byte = bytes[at]
    if (byte === quote) break
    if (byte === backslash) {
      at++
      if (bytes[at] === letterU) escaped = true
    }
  }
  return escaped ? -at : at
}

function scan(bytes: Uint8Array, depthMax: number): Scan {
  let depth = 0
  let seen = Scan.plain
  for (let at = 0; at < bytes.length; at++) {
    const byte = bytes[at] as number
    if (byte === quote) {
      const end = endOfString(bytes, at + 1)
      if (end < 0) seen |= Scan.escape
      at = end < 0 ? -end : end
    } else if ((byte | caseBit) === opening) {
      depth++
      if (depth > depthMax) return Scan.tooDeep
    } else if ((byte | caseBit) === closing) {
      depth--
    } else if ((byte | caseBit) === letterE) {
      if (isDigit(bytes[at - 1])) seen |= Scan.number
    } else if (isDigit(byte)) {
      const first = at
      while (isDigit(bytes[at + 1])) at++
      if (at - first >= suspiciousDigits) seen |= Scan.number
    }
  }
  return seen
}

function refuse(reason: StrictJsonReason, path: string, message: string): StrictJson {
  return { ok: false, reason, fault: { path: presentablePointer(path), message } }
}

/** Whether a text has characters that PostgreSQL's text and jsonb cannot store. */
export function isUnstorable(text: string): boolean {
  // With the u flag a pair is one code point, so only lone surrogates match.
  return text.includes('\0') || /\p{Surrogate}/u.test(text)
}

interface Found {
  reason: StrictJsonReason
  message: string
  /** Steps from the fault up to the root. */
  steps: (string | number)[]
}

/** Finds the first fault of a body, hidden members included. Recursion is safe: the scan has limited the nesting. */
class Walk {
  readonly #bytes: Buffer
  fault: Found | undefined

  constructor(bytes: Buffer) {
    this.#bytes = bytes
  }

  /** Returns where the value at `at` ends; after a fault, the end of the body, which ends the walk. */
  value(at: number): number {
    const bytes = this.#bytes
    const first = bytes[at]
    if (first === opening) return eachMember(bytes, at, this.#member)
    if (first === openingBracket) return eachElement(bytes, at, this.#element)
    const end = valueEnd(bytes, at)
    if (first === quote) this.#string(at, end)
    else if (first === minus || isDigit(first)) this.#number(bytes.toString('latin1', at, end))
    return this.#next(end)
  }

  readonly #member = (nameAt: number, nameEnd: number, at: number): number => {
    const name = stringAt(this.#bytes, nameAt, nameEnd)
    if (name === '__proto__') this.#found('member', 'a member must not be named __proto__')
    else if (isUnstorable(name)) this.#character('a member name')
    return this.#inside(name, at)
  }

  readonly #element = (index: number, at: number): number => this.#inside(index, at)

  #inside(step: string | number, at: number): number {
    const end = this.fault === undefined ? this.value(at) : at
    this.fault?.steps.push(step)
    return this.#next(end)
  }

  #string(at: number, end: number): void {
    // Raw ones were refused before.
    if (!this.#bytes.subarray(at, end).includes(backslash)) return
    if (isUnstorable(stringAt(this.#bytes, at, end))) this.#character('a string')
  }

  #number(text: string): void {
    if (!Number.isFinite(Number(text))) this.#found('number', 'the number is not finite in double precision')
  }

  #character(what: string): void {
    this.#found('character', `${what} must not contain a NUL character or a lone surrogate`)
  }

  #found(reason: StrictJsonReason, message: string): void {
    this.fault = { reason, message, steps: [] }
  }

  #next(end: number): number {
    return this.fault === undefined ? end : this.#bytes.length
  }
}

export function parseStrictJson(body: Buffer, depthMax: number = limits.nestingDepth): StrictJson {
  if (!isUtf8(body)) return refuse('encoding', '', 'the body is not valid UTF-8')
  const scanned = scan(body, depthMax)
  if (scanned === Scan.tooDeep) return refuse('nesting', '', `the body is nested deeper than ${depthMax}`)
  const text = body.toString('utf8')
  let value: unknown
  try {
    value = JSON.parse(text)
  } catch {
    // The parser's own message quotes the body and differs between engines.
    return refuse('syntax', '', 'the body is not well-formed JSON')
  }
  const isSuspicious =
    (scanned & Scan.number) !== 0 ||
    ((scanned & Scan.escape) !== 0 && suspiciousEscape.test(text)) ||
    text.includes('__proto__')
  if (!isSuspicious) return { ok: true, value, text }
  const walk = new Walk(body)
  walk.value(skipSpace(body, 0))
  const found = walk.fault
  if (found === undefined) return { ok: true, value, text }
  const pointer = found.steps.reverse().map(pointerStep).join('')
  return refuse(found.reason, pointer, found.message)
}
