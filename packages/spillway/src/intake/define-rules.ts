/** What `define` allows for its options. */
import { limits } from '@spillway/protocol/wire'
import { isDuration } from '../core/duration.js'
import {
  check,
  checkOptions,
  either,
  isBoolean,
  isFunction,
  isText,
  OptionError,
  oneOf,
  type Rule,
  timerMsMax,
  wholeNumber,
} from '../core/options.js'
import { gateOrder } from '../gates/gate.js'
import type { BodySchema, DefineOptions } from './define.js'
import { isWhenBusy } from './when-busy.js'

/** The schema is checked where it is compiled (http/validation.ts). */
const any: Rule = () => null

export const delayMsMax = 366 * 86_400_000

export const numberRules = {
  priority: wholeNumber(limits.priorityMin, limits.priorityMax),
  timeoutMs: wholeNumber(1, timerMsMax),
  maxRetries: wholeNumber(0, 1_000_000),
  delayMs: wholeNumber(0, delayMsMax),
} satisfies Record<string, Rule>

/** How many operations of a key may run at a time. */
const isLimit = wholeNumber(1, 1_000_000)

const common: Record<string, Rule> = {
  body: any,
  lane: isFunction,
  identity: isFunction,
  gates: isGateList,
  check: isFunction,
  priority: either(numberRules.priority, isFunction),
  timeoutMs: either(numberRules.timeoutMs, isFunction),
  maxRetries: either(numberRules.maxRetries, isFunction),
  delayMs: isFunction,
  expiresAfter: isDuration(1, delayMsMax),
  retry: isBackoff,
  onAnswer: isFunction,
  respond: isFunction,
  whenBusy: isWhenBusy,
}

const forRun: Record<string, Rule> = {
  ...common,
  lane: isLane,
  run: isFunction,
  abortable: isBoolean,
  slots: isSlots,
  ready: isFunction,
  announces: isFunction,
}

const forApply: Record<string, Rule> = {
  ...common,
  whenBusy: oneOf('queue', 'refuse'),
  apply: isEffect,
  pendingMax: wholeNumber(0),
}

export function checkDefinition(call: string, options: DefineOptions<BodySchema, unknown>): void {
  checkOptions(call, options, { ...forApply, ...forRun })
  if (options.run === undefined && options.apply === undefined) {
    throw new OptionError(`${call}: run is missing: the function that does the work, run: async (body, context) => …`)
  }
  if (options.run !== undefined && options.apply !== undefined) {
    throw new OptionError(`${call}: run and apply exclude each other; remove one of them`)
  }
  const [kind, rules] = options.run === undefined ? ['apply', forApply] : ['run', forRun]
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined) continue
    const rule = rules[name]
    if (rule === undefined) throw new OptionError(`${call}: ${name} cannot be used together with ${kind}`)
    check(call, name, value, rule)
  }
  for (const kind of ['capacity', 'halt', 'connections'] as const) {
    if ((options.gates ?? []).filter((gate) => gate.kind === kind).length > 1) {
      throw new OptionError(`${call}: gates has two ${kind} gates; one operation can be held by one of them only`)
    }
  }
}

export function isGateList(value: unknown): string | null {
  if (!Array.isArray(value)) return 'a list of gates, as in [pressure(), rate({ limit: 10, per: "1m" })]'
  const wrong = value.findIndex((gate) => !isGate(gate))
  if (wrong < 0) return null
  const given: unknown = value[wrong]
  const isUncalled = typeof given === 'function' && (gateOrder as readonly string[]).includes(given.name)
  return `a list of gates; its item ${wrong} is ${isUncalled ? `the function ${given.name}: call it, ${given.name}(…)` : 'not a gate'}`
}

function isGate(value: unknown): boolean {
  return typeof value === 'object' && value !== null && typeof Reflect.get(value, 'bind') === 'function'
}

function isBackoff(value: unknown): string | null {
  const wanted = 'an object { baseMs, maxMs } with whole numbers, 1 ≤ baseMs ≤ maxMs'
  if (typeof value !== 'object' || value === null) return wanted
  const { baseMs, maxMs, ...unknown } = value as Record<string, unknown>
  const isRange = wholeNumber(1, timerMsMax)(baseMs) === null && wholeNumber(Number(baseMs), timerMsMax)(maxMs) === null
  return isRange && Object.keys(unknown).length === 0 ? null : wanted
}

function isLane(value: unknown): string | null {
  if (typeof value === 'function') return null
  const wanted = 'a function (body, request) => lane, or an object { key, concurrency }'
  if (typeof value !== 'object' || value === null) return wanted
  const { key, concurrency, ...unknown } = value as Record<string, unknown>
  const isFine = isFunction(key) === null && isLimit(concurrency) === null && Object.keys(unknown).length === 0
  return isFine ? null : `${wanted}: key is a function, and concurrency ${isLimit(null)}`
}

function isSlots(value: unknown): string | null {
  const wanted = 'an object { name, concurrency } with a text and a whole number of at least 1'
  if (typeof value !== 'object' || value === null) return wanted
  const { name, concurrency, ...unknown } = value as Record<string, unknown>
  const isFine = isText(name) === null && wholeNumber(1)(concurrency) === null && Object.keys(unknown).length === 0
  return isFine ? null : wanted
}

function isEffect(value: unknown): string | null {
  const isSqlEffect =
    typeof value === 'object' &&
    value !== null &&
    'function' in value &&
    typeof Reflect.get(value, 'values') === 'function'
  return typeof value === 'function' || isSqlEffect ? null : 'a function (tx, items) => results, or a SqlEffect'
}

/** What a function of a definition returned for one body. */
export function checkReturned(type: string, name: keyof typeof numberRules, value: unknown): void {
  check(`the operation type ${type}`, `what ${name} returns`, value, numberRules[name])
}
