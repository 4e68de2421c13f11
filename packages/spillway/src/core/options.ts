/**
 * Checks the options of public calls. A wrong option is a programming mistake: it throws at once, and the message names the
 * call, the option, the value, and what is allowed.
 */
import { inspect } from 'node:util'

export class OptionError extends TypeError {
  override readonly name = 'OptionError'
  readonly code = 'invalid_option'

  constructor(message: string, options?: { cause?: unknown }) {
    super(message, options)
  }
}

/** Null if the value is allowed; else what is, as in "must be …". */
export type Rule = (value: unknown) => string | null

/** Options without a rule are unknown. An option that is undefined counts as absent. */
export function checkOptions(call: string, options: unknown, rules: Readonly<Record<string, Rule>>): void {
  if (typeof options !== 'object' || options === null || Array.isArray(options)) {
    throw new OptionError(`${call}: the options must be an object; given: ${shown(options)}`)
  }
  for (const [name, value] of Object.entries(options)) {
    const rule = rules[name]
    if (rule === undefined) throw new OptionError(unknownOption(call, name, Object.keys(rules)))
    if (value !== undefined) check(call, name, value, rule)
  }
}

/** After `checkOptions`: these options have no default. */
export function checkRequired<Options extends object>(
  call: string,
  options: Options,
  ...names: readonly (keyof Options & string)[]
): void {
  const missing = names.find((name) => options[name] === undefined)
  if (missing !== undefined) throw new OptionError(`${call}: ${missing} is missing`)
}

/** Checks one value, for example what a function of the user returned. */
export function check(call: string, name: string, value: unknown, rule: Rule): void {
  const allowed = rule(value)
  if (allowed !== null) throw new OptionError(`${call}: ${name} must be ${allowed}; given: ${shown(value)}`)
}

function unknownOption(call: string, name: string, known: readonly string[]): string {
  const near = known.find((other) => distance(name.toLowerCase(), other.toLowerCase()) <= 2)
  const hint = near === undefined ? `the options are ${known.join(', ')}` : `did you mean ${near}?`
  return `${call}: unknown option ${JSON.stringify(name)}; ${hint}`
}

/** A short form of any value, on one line, without the password of an address. */
export function shown(value: unknown): string {
  if (typeof value === 'function') return value.name === '' ? 'a function' : `the function ${value.name}`
  const text = inspect(value, {
    depth: 1,
    breakLength: Number.POSITIVE_INFINITY,
    maxStringLength: 100,
    maxArrayLength: 5,
  })
  const safe = text.replaceAll(/(:\/\/[^:@/\s'"]*):[^@\s'"]*@/g, '$1:…@')
  return safe.length > 120 ? `${safe.slice(0, 117)}…` : safe
}

export const isFunction: Rule = (value) => (typeof value === 'function' ? null : 'a function')
export const isBoolean: Rule = (value) => (typeof value === 'boolean' ? null : 'true or false')
export const isString: Rule = (value) => (typeof value === 'string' ? null : 'a text')
export const isText: Rule = (value) => (typeof value === 'string' && value !== '' ? null : 'a text that is not empty')

export function wholeNumber(least: number, most: number = Number.MAX_SAFE_INTEGER): Rule {
  const range = most === Number.MAX_SAFE_INTEGER ? `of at least ${least}` : `from ${least} to ${most}`
  return (value) =>
    Number.isInteger(value) && Number(value) >= least && Number(value) <= most ? null : `a whole number ${range}`
}

export const isSeconds: Rule = (value) =>
  typeof value === 'number' && value > 0 && value <= 31_536_000 ? null : 'a number of seconds above 0'

/** Members of a problem document. */
export const isProblem: Rule = (value) =>
  typeof value === 'object' && value !== null ? null : 'an object { detail, … }'

/** Milliseconds. The largest is what a timer can take: 24.8 days. */
export const timerMsMax = 2_147_483_647

export function oneOf(...allowed: readonly (string | boolean)[]): Rule {
  return (value) =>
    allowed.includes(value as string | boolean) ? null : allowed.map((one) => JSON.stringify(one)).join(' or ')
}

/** Allowed by any of the rules. */
export function either(...rules: readonly Rule[]): Rule {
  return (value) => {
    const wanted = rules.map((rule) => rule(value))
    return wanted.includes(null) ? null : wanted.join(', or ')
  }
}

/** An object with these members, for example `{ log: methods('debug', 'info', 'warn', 'error') }`. */
export function methods(...names: readonly string[]): Rule {
  return (value) =>
    typeof value === 'object' && value !== null && names.every((name) => typeof Reflect.get(value, name) === 'function')
      ? null
      : `an object with the methods ${names.join(', ')}`
}

/** Levenshtein's distance. Option names are short. */
function distance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, i) => i)
  for (let i = 1; i <= a.length; i++) {
    const next = [i]
    for (let j = 1; j <= b.length; j++) {
      const replaced = (row[j - 1] ?? 0) + (a[i - 1] === b[j - 1] ? 0 : 1)
      next.push(Math.min(replaced, (row[j] ?? 0) + 1, (next[j - 1] ?? 0) + 1))
    }
    row = next
  }
  return row[b.length] ?? 0
}
