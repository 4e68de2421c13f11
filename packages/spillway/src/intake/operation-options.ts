/** What one submission may say of its operation. It overrides what the definition says. */
import { limits } from '@spillway/protocol/wire'
import { type Duration, isDuration, millisecondsOf } from '../core/duration.js'
import { isLaneName, type LaneName } from '../core/ids.js'
import { checkOptions, isString, OptionError, type Rule, timerMsMax } from '../core/options.js'
import { delayMsMax, numberRules } from './define-rules.js'

export interface OperationOptions {
  /** Who submits it: for quotas, fairness and tickets. Default `local`. */
  identity?: string
  /** The same key and the same body give the stored answer again. */
  idempotencyKey?: string
  /** The text that the key identifies, if not the body: another text with the same key is a mistake. */
  keyedOn?: string
  /** Start it this much later: milliseconds, or a text such as `10s`, `15m` or `1h`. */
  delay?: Duration
  /** Start it then, and at once if that is past. */
  runAt?: Date
  /** If it has not started this long after its acceptance, it fails with the code `expired`. As `delay`. */
  expiresAfter?: Duration
  /** 1 (first) to 10. */
  priority?: number
  /** A queue, or a queue and a partition: its operations run one after the other. */
  lane?: LaneName
  /** For one attempt: milliseconds, or a text such as `30s`. */
  timeout?: Duration
  maxRetries?: number
}

function isIdentity(value: unknown): string | null {
  const most = limits.identityCharacters
  return typeof value === 'string' && value !== '' && value.length <= most && !value.includes('\0')
    ? null
    : `a text of 1 to ${most} characters, without NUL`
}

export const operationRules: Record<keyof OperationOptions, Rule> = {
  identity: isIdentity,
  idempotencyKey: (value) =>
    typeof value === 'string' && value !== '' && value.length <= limits.idempotencyKeyCharacters
      ? null
      : `a text of 1 to ${limits.idempotencyKeyCharacters} characters`,
  keyedOn: isString,
  delay: isDuration(0, delayMsMax),
  expiresAfter: isDuration(1, delayMsMax),
  runAt: (value) =>
    value instanceof Date && value.getTime() - Date.now() <= delayMsMax
      ? null
      : 'a valid Date within the next 366 days',
  priority: numberRules.priority,
  lane: isLaneName,
  timeout: isDuration(1, timerMsMax),
  maxRetries: numberRules.maxRetries,
}

/** The part of them that changes the operation's row. */
export interface OwnOptions {
  lane?: LaneName
  priority?: number
  delayMs?: number
  expiresMs?: number
  timeoutMs?: number
  maxRetries?: number
}

/** After their rules. */
export function ownOptions(call: string, options: OperationOptions): OwnOptions | undefined {
  const { delay, runAt, expiresAfter, priority, lane, timeout, maxRetries } = options
  if (delay !== undefined && runAt !== undefined) {
    throw new OptionError(`${call}: delay and runAt exclude each other; remove one of them`)
  }
  const delayMs =
    delay !== undefined ? millisecondsOf(delay) : runAt && Math.max(0, Math.round(runAt.getTime() - Date.now()))
  const own = {
    ...{ lane, priority, delayMs, maxRetries },
    timeoutMs: timeout && millisecondsOf(timeout),
    expiresMs: expiresAfter && millisecondsOf(expiresAfter),
  }
  const given = Object.entries(own).filter(([, value]) => value !== undefined)
  return given.length === 0 ? undefined : (Object.fromEntries(given) as OwnOptions)
}

/** For many bodies at once: each option is a value for all of them, or a function that gives it for each. */
export type EachOptions<Body> = {
  [Name in keyof OperationOptions]?:
    | OperationOptions[Name]
    | ((body: Body, index: number) => OperationOptions[Name] | undefined)
}

const callable =
  (rule: Rule): Rule =>
  (value) =>
    typeof value === 'function' ? null : or(rule(value))
const or = (allowed: string | null): string | null =>
  allowed === null ? null : `${allowed}, or a function of the body`

export const eachRules = Object.fromEntries(
  Object.entries(operationRules).map(([name, rule]) => [name, callable(rule)]),
) as Record<keyof OperationOptions, Rule>

/** The options of one of many bodies. A key that is one text for all is the key of the call: each has its own, made from it. */
export function optionsFor<Body>(
  call: string,
  options: EachOptions<Body>,
  body: Body,
  index: number,
): OperationOptions {
  const own: Record<string, unknown> = {}
  let calls = false
  for (const name of Object.keys(operationRules) as (keyof OperationOptions)[]) {
    const value = options[name]
    if (value === undefined) continue
    calls ||= typeof value === 'function'
    own[name] = typeof value === 'function' ? value(body, index) : value
  }
  if (calls) checkOptions(`${call}: item ${index}`, own, operationRules)
  if (typeof options.idempotencyKey === 'string') own.idempotencyKey = keyOfItem(options.idempotencyKey, index)
  return own
}

export const keyOfItem = (key: string, index: number): string => `${key}\0${index}`
