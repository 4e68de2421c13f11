/**
 * JSON that is passed through: its text stays unchanged. JSON.parse and JSON.stringify would change numbers that a double
 * cannot hold, -0, the order of members named like numbers, and repeated names.
 *
 *   came ──carry(value, text, path)──► the value with a CarriedJson at each place of the path ──jsonOf(value)──► leaves
 */
import { randomUUID } from 'node:crypto'
import { eachElement, eachMember, isNamed, skipSpace, stringAt, valueEnd } from './json-scan.js'

/** A placeholder for a text while JSON.stringify writes the rest. Random: no text from outside can contain it. */
const mark = randomUUID()
const marked = new RegExp(`"${mark}:(\\d+)"`, 'g')
let texts: string[] | null = null

export class CarriedJson {
  readonly text: string

  constructor(text: string) {
    this.text = text
  }

  get value(): unknown {
    return JSON.parse(this.text)
  }

  toJSON(): unknown {
    // The serializer does not know carried texts: use the value, as exact as a double can be.
    if (texts === null) return this.value
    return `${mark}:${texts.push(this.text) - 1}`
  }
}

/** JSON.stringify that writes carried texts unchanged. */
export function jsonOf(value: unknown): string {
  if (value instanceof CarriedJson) return value.text
  const outer = texts
  const found: string[] = []
  texts = found
  try {
    const json = JSON.stringify(value)
    return found.length === 0 ? json : json.replace(marked, (_, index) => found[Number(index)] ?? 'null')
  } finally {
    texts = outer
  }
}

/** In a path: every element of an array. */
export const each = Symbol('each')
export type CarryPath = readonly (string | typeof each)[]

/**
 * Replaces the members at the end of `path` by their texts, in place. `value` is JSON.parse's result for `text`. Both keep
 * the last of several members with one name: here a later one overwrites an earlier one and none is added.
 */
export function carry(value: unknown, text: string, path: CarryPath): void {
  const source = new Source(text)
  descend(value, source, skipSpace(source.bytes, 0), path, 0)
}

/** A text, and its bytes for the scan. */
class Source {
  readonly text: string
  readonly bytes: Buffer
  readonly #isAscii: boolean

  constructor(text: string) {
    this.text = text
    this.bytes = Buffer.from(text)
    this.#isAscii = this.bytes.length === text.length
  }

  slice(from: number, end: number): string {
    return this.#isAscii ? this.text.slice(from, end) : this.bytes.toString('utf8', from, end)
  }
}

function descend(value: unknown, source: Source, at: number, path: CarryPath, depth: number): number {
  const { bytes } = source
  const step = path[depth]
  if (step === each) {
    if (!Array.isArray(value)) return valueEnd(bytes, at)
    return eachElement(bytes, at, (index, element) => descend(value[index], source, element, path, depth + 1))
  }
  if (step === undefined || typeof value !== 'object' || value === null) return valueEnd(bytes, at)
  const members = value as Record<string, unknown>
  return eachMember(bytes, at, (nameAt, nameEnd, member) => {
    if (!isNamed(bytes, nameAt, nameEnd, step) || !Object.hasOwn(members, step)) return valueEnd(bytes, member)
    if (depth < path.length - 1) return descend(members[step], source, member, path, depth + 1)
    const end = valueEnd(bytes, member)
    members[step] = new CarriedJson(source.slice(member, end))
    return end
  })
}

/** An object's text with only the last of members with the same name, as JSON.parse reads it. Mostly the text itself. */
export function withoutRepeated(text: string): string {
  const members = new Map<string, string>()
  let count = 0
  const source = new Source(text)
  const { bytes } = source
  eachMember(bytes, skipSpace(bytes, 0), (nameAt, nameEnd, at) => {
    const end = valueEnd(bytes, at)
    members.set(stringAt(bytes, nameAt, nameEnd), source.slice(nameAt, end))
    count++
    return end
  })
  return members.size === count ? text : `{${[...members.values()].join()}}`
}

/** The texts of an object's members; the last one of those with the same name. */
export function memberTexts(text: string): Map<string, string> {
  const members = new Map<string, string>()
  const source = new Source(text)
  const { bytes } = source
  eachMember(bytes, skipSpace(bytes, 0), (nameAt, nameEnd, at) => {
    const end = valueEnd(bytes, at)
    members.set(stringAt(bytes, nameAt, nameEnd), source.slice(at, end))
    return end
  })
  return members
}
