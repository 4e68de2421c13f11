import type { AcceptFlush } from '../accept/accepting.js'
import {
  check,
  checkOptions,
  isBoolean,
  isString,
  OptionError,
  type Rule,
  timerMsMax,
  wholeNumber,
} from '../core/options.js'
import type { BoundGate, RateTier } from '../gates/gate.js'
import type { AcceptItem, Tx } from '../store/port.js'
import type { Slots } from '../work/slot-groups.js'
import type { BodySchema, DefineOptions, IntakeRequest, Rejection } from './define.js'
import {
  type EachOptions,
  eachRules,
  type OperationOptions,
  type OwnOptions,
  operationRules,
  optionsFor,
  ownOptions,
} from './operation-options.js'

export interface SubmitOptions extends OperationOptions {
  traceparent?: string
  /** Queue it, do not run it now. */
  respondAsync?: boolean
  /**
   * Wait this long for a queued one, then answer as if it had run now. 0, for a `run` definition: if a slot is free run it
   * here, and answer with its ticket at once (`queued`, reason `still_running`); else queue it, with another reason.
   */
  waitMs?: number
  signal?: AbortSignal
}

/** Each option is for all items, or a function `(body, index) => …` that gives it for each. */
export interface SubmitManyOptions<Body> extends EachOptions<Body> {
  traceparent?: string
}

/** In a transaction of the caller: nobody waits for the run. */
export interface EnqueueOptions extends Pick<SubmitOptions, keyof OperationOptions | 'traceparent'> {
  /** A node-postgres client inside a transaction, or the `tx` of `intake.transaction`. */
  tx: Tx
}

export interface EnqueueManyOptions<Body> extends SubmitManyOptions<Body> {
  tx: Tx
}

export interface SubmitAllOptions extends SubmitOptions {
  /** The bodies as JSON, if the caller has them. */
  texts?: readonly string[]
}

/** A submission after identify and parse. */
export interface Submission<Body = unknown> {
  body: Body
  /** The original body as JSON text, if the caller has it. */
  text?: string
  /** `digestUuid` of the original body, if its text is not known. */
  digest?: string
  identity: string
  request: IntakeRequest
  idempotencyKey?: string
  /** The text that the key identifies, if not the body. */
  keyedOn?: string
  /** What this submission says itself, in place of its definition. */
  own?: OwnOptions
  respondAsync?: boolean
  /** Wait this long for a queued one, then answer as if it had run now. 0: run it now, and answer with its ticket at once. */
  waitMs?: number
  signal?: AbortSignal
  /** A signal that fires when the caller leaves; made only if it waits for a slot. */
  leaving?: () => AbortSignal
}

export type ParsedBody = { ok: true; value: unknown } | { ok: false; problem: Rejection }

/** The gates of a definition, or of an admission. */
export interface BoundGates {
  /** The definition's type, or the admission's name. */
  readonly type: string
  readonly gates: readonly BoundGate<unknown>[]
  readonly options: Pick<DefineOptions<BodySchema, unknown>, 'identity' | 'respond' | 'run' | 'whenBusy'>
  readonly flush: Pick<AcceptFlush, 'isFull' | 'expectedMs'>
  /** The slots that run its operations. */
  readonly slots: Slots
}

/** A definition with its gates bound. */
export interface Bound extends BoundGates {
  /** Validates a body: the schema, then `check`. The one validation, for HTTP and for calls. */
  parse(body: unknown, request: IntakeRequest): ParsedBody | Promise<ParsedBody>
  readonly options: DefineOptions<BodySchema, unknown>
  readonly flush: AcceptFlush
}

/** An item on its way through a flush, with data that only this process has. */
export interface PendingItem {
  item: AcceptItem
  body: unknown
  /** The tiers of its rates, in the order of the store's check. */
  tiers: readonly RateTier[]
  result?: unknown
  /** Members for the problem document, from the transaction that refused it. */
  limited?: Readonly<Record<string, unknown>>
}

export const traceparentRule = isString

const submitRules: Record<keyof SubmitAllOptions, Rule> = {
  ...operationRules,
  traceparent: traceparentRule,
  respondAsync: isBoolean,
  waitMs: wholeNumber(0, timerMsMax),
  signal: (value) => (value instanceof AbortSignal ? null : 'an AbortSignal'),
  texts: (value) => (Array.isArray(value) ? null : 'a list of JSON texts'),
}

export function checkSubmitOptions(call: string, options: SubmitAllOptions): void {
  checkOptions(call, options, submitRules)
}

/** Checked where it is used (intake/own-transaction.ts). */
const tx: Rule = () => null
const enqueueRules: Record<keyof EnqueueOptions, Rule> = { ...operationRules, traceparent: traceparentRule, tx }

export function checkEnqueueOptions(call: string, options: unknown): void {
  if (typeof options === 'object' && options !== null && 'query' in options) {
    throw new OptionError(`${call}: the third argument is { tx: client }, not the client itself`)
  }
  checkOptions(call, options, enqueueRules)
}

const manyRules: Record<keyof SubmitManyOptions<unknown>, Rule> = { ...eachRules, traceparent: traceparentRule }

/** A call that would take more takes the process's memory; the next call may follow at once. */
export const manyMax = 10_000

export function checkMany(call: string, bodies: unknown, options: unknown, inTransaction = false): void {
  check(call, 'the second argument', bodies, isManyBodies)
  checkOptions(call, options, inTransaction ? { ...manyRules, tx } : manyRules)
}

const isManyBodies: Rule = (bodies) =>
  Array.isArray(bodies) && bodies.length <= manyMax ? null : `a list of at most ${manyMax} bodies`

/** The submission of a call, without HTTP. */
export function submissionOf(call: string, body: unknown, options: SubmitOptions, text?: string): Submission {
  const own = ownOptions(call, options)
  return {
    body,
    ...(text !== undefined && { text }),
    identity: options.identity ?? 'local',
    request: localRequest(options),
    ...(options.idempotencyKey !== undefined && { idempotencyKey: options.idempotencyKey }),
    ...(options.keyedOn !== undefined && { keyedOn: options.keyedOn }),
    ...(own && { own }),
    ...(options.respondAsync !== undefined && { respondAsync: options.respondAsync }),
    ...(options.waitMs !== undefined && { waitMs: options.waitMs }),
    ...(options.signal && { signal: options.signal }),
  }
}

/** The submissions of many bodies. Nothing is sent before all options are known to be right. */
export function submissionsOf<Body>(
  call: string,
  bodies: readonly Body[],
  options: SubmitManyOptions<Body>,
  respondAsync: boolean,
): Submission[] {
  const common = options.traceparent === undefined ? {} : { traceparent: options.traceparent }
  return bodies.map((body, index) => ({
    ...submissionOf(call, body, { ...common, ...optionsFor(call, options, body, index) }),
    respondAsync,
  }))
}

function localRequest(options: SubmitOptions): IntakeRequest {
  return {
    method: 'POST',
    path: '/',
    headers: {},
    query: new URLSearchParams(),
    params: {},
    clientAddress: 'local',
    user: options.identity === undefined ? null : { id: options.identity, roles: new Set() },
    traceparent: options.traceparent ?? '',
  }
}
