import { isUtf8 } from 'node:buffer'
import { limits } from '@spillway/protocol/wire'
import { pointerStep, presentablePointer, type RequestFault } from './json-pointer.js'

/**
 * JSON as the store can keep it: valid UTF-8, bounded nesting, finite numbers, no `__proto__`, no NUL, no lone surrogate.
 *
 * Ordinary bodies pay one pass over the bytes and JSON.parse, no walk over the values: what the walk looks for leaves a
 * trace in the text. NUL and lone surrogates can only come from a \u escape (raw ones are refused by JSON.parse and by
 * the UTF-8 check), a number can only overflow through an exponent or a run of 200 digits and more, and a member named
 * `__proto__` is either written out or escaped. The nesting is measured before parsing, so that a hostile body costs a
 * scan that stops at the 65th bracket.
 */
export type StrictJson =
  /** `text`: as it came. */
  { ok: true; value: unknown; text: string } | { ok: false; reason: StrictJsonReason; fault: RequestFault }

export type StrictJsonReason = 'encoding' | 'syntax' | 'nesting' | 'number' | 'member' | 'character'

const quote = 0x22
const backslash = 0x5c
const letterU = 0x75
const letterE = 0x65
/** '[' is 0x5b and '{' is 0x7b: one bit apart, as are ']' and '}'. */
const opening = 0x7b
const closing = 0x7d
const caseBit = 0x20
/** With a two-digit exponent (≤ 99) a number needs 209 digits or more to exceed 1.8e308. */
const suspiciousDigits = 200

enum Scan {
  plain,
  suspicious,
  tooDeep,
}

function isDigit(byte: number | undefined): boolean {
  return byte !== undefined && byte >= 0x30 && byte <= 0x39
}

/** Skips one string; `start` is the byte after its opening quote. The sign tells whether a \u escape was seen. */
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
  let suspicious = false
  for (let at = 0; at < bytes.length; at++) {
    const byte = bytes[at] as number
    if (byte === quote) {
      const end = endOfString(bytes, at + 1)
      if (end < 0) suspicious = true
      at = end < 0 ? -end : end
    } else if ((byte | caseBit) === opening) {
      depth++
      if (depth > depthMax) return Scan.tooDeep
    } else if ((byte | caseBit) === closing) {
      depth--
    } else if ((byte | caseBit) === letterE) {
      if (isDigit(bytes[at - 1])) suspicious = true
    } else if (isDigit(byte)) {
      const first = at
      while (isDigit(bytes[at + 1])) at++
      if (at - first >= suspiciousDigits) suspicious = true
    }
  }
  return suspicious ? Scan.suspicious : Scan.plain
}

function refuse(reason: StrictJsonReason, path: string, message: string): StrictJson {
  return { ok: false, reason, fault: { path: presentablePointer(path), message } }
}

/** Whether a text holds what PostgreSQL's text and jsonb cannot. */
export function isUnstorable(text: string): boolean {
  // With the u flag a pair is one code point, so that only surrogates without their other half match.
  return text.includes('\0') || /\p{Surrogate}/u.test(text)
}

interface Found {
  reason: StrictJsonReason
  message: string
  /** Steps from the faulty place up to the root. */
  steps: (string | number)[]
}

function characterFault(text: string, what: string): Found | undefined {
  if (!isUnstorable(text)) return undefined
  return {
    reason: 'character',
    message: `${what} must not contain a NUL character or a lone surrogate`,
    steps: [],
  }
}

/** Recursion is safe: the scan has bounded the nesting. */
function findFault(value: unknown): Found | undefined {
  if (typeof value === 'string') return characterFault(value, 'a string')
  if (typeof value === 'number') {
    return Number.isFinite(value)
      ? undefined
      : { reason: 'number', message: 'the number is not finite in double precision', steps: [] }
  }
  if (typeof value !== 'object' || value === null) return undefined
  const entries: Iterable<[string | number, unknown]> = Array.isArray(value) ? value.entries() : Object.entries(value)
  for (const [key, member] of entries) {
    let found: Found | undefined
    if (typeof key === 'string') {
      found =
        key === '__proto__'
          ? { reason: 'member', message: 'a member must not be named __proto__', steps: [] }
          : characterFault(key, 'a member name')
    }
    found ??= findFault(member)
    if (found !== undefined) {
      found.steps.push(key)
      return found
    }
  }
  return undefined
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
  if (scanned === Scan.plain && !text.includes('__proto__')) return { ok: true, value, text }
  const found = findFault(value)
  if (found === undefined) return { ok: true, value, text }
  const pointer = found.steps.reverse().map(pointerStep).join('')
  return refuse(found.reason, pointer, found.message)
}
