/**
 * JSON that is only carried: its text stays as it came. JSON.parse and JSON.stringify would change numbers that a double
 * cannot hold, -0, the order of members named like numbers, and repeated names.
 *
 *   came ──carry(value, text, path)──► the value with a CarriedJson at each place of the path ──jsonOf(value)──► leaves
 */
import { randomUUID } from 'node:crypto'
import { eachElement, eachMember, skipSpace, valueEnd } from './json-scan.js'

/** Stands for a text while JSON.stringify writes what is around it. Random: no text from outside can contain it. */
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
    // Written by somebody who does not know of carried texts: what it means, as far as a double can say it.
    if (texts === null) return this.value
    return `${mark}:${texts.push(this.text) - 1}`
  }
}

/** JSON.stringify, with carried texts as they are. */
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
 * Replaces the members at the end of `path` by their texts, in place. `value` is what JSON.parse made of `text`: of members
 * with one name it has the last, and so has this, because a later one overwrites an earlier one and none is added.
 */
export function carry(value: unknown, text: string, path: CarryPath): void {
  descend(value, text, skipSpace(text, 0), path, 0)
}

function descend(value: unknown, text: string, at: number, path: CarryPath, depth: number): number {
  const step = path[depth]
  if (step === each) {
    if (!Array.isArray(value)) return valueEnd(text, at)
    return eachElement(text, at, (index, element) => descend(value[index], text, element, path, depth + 1))
  }
  if (step === undefined || typeof value !== 'object' || value === null) return valueEnd(text, at)
  const members = value as Record<string, unknown>
  return eachMember(text, at, (name, member) => {
    if (name !== step || !Object.hasOwn(members, name)) return valueEnd(text, member)
    if (depth < path.length - 1) return descend(members[name], text, member, path, depth + 1)
    const end = valueEnd(text, member)
    members[name] = new CarriedJson(text.slice(member, end))
    return end
  })
}

/** An object's text with the last of members that have one name, as JSON.parse reads it. Mostly the text itself. */
export function withoutRepeated(text: string): string {
  const members = new Map<string, string>()
  let count = 0
  eachMember(text, skipSpace(text, 0), (name, at, nameAt) => {
    const end = valueEnd(text, at)
    members.set(name, text.slice(nameAt, end))
    count++
    return end
  })
  return members.size === count ? text : `{${[...members.values()].join()}}`
}

/** The texts of an object's members; of those with one name the last. */
export function memberTexts(text: string): Map<string, string> {
  const members = new Map<string, string>()
  eachMember(text, skipSpace(text, 0), (name, at) => {
    const end = valueEnd(text, at)
    members.set(name, text.slice(at, end))
    return end
  })
  return members
}
