import { limits } from '@spillway/protocol/wire'
import type { AcceptFlush } from '../accept/accepting.js'
import { checkOptions, isBoolean, isText, type Rule, timerMsMax, wholeNumber } from '../core/options.js'
import type { BoundGate, RateTier } from '../gates/gate.js'
import type { AcceptItem } from '../store/port.js'
import type { Slots } from '../work/slot-groups.js'
import type { BodySchema, DefineOptions, IntakeRequest, Rejection } from './define.js'

export interface SubmitOptions {
  identity?: string
  idempotencyKey?: string
  /** The text that the key identifies, if not the body: another text with the same key is a mistake. */
  keyedOn?: string
  /** Queue it, do not run it now. */
  respondAsync?: boolean
  /**
   * Wait this long for a queued one, then answer as if it had run now. 0, for a `run` definition: if a slot is free run it
   * here, and answer with its ticket at once (`queued`, reason `still_running`); else queue it, with another reason.
   */
  waitMs?: number
  traceparent?: string
  signal?: AbortSignal
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

const submitRules: Record<keyof SubmitAllOptions, Rule> = {
  identity: isText,
  idempotencyKey: (value) =>
    typeof value === 'string' && value !== '' && value.length <= limits.idempotencyKeyCharacters
      ? null
      : `a text of 1 to ${limits.idempotencyKeyCharacters} characters`,
  keyedOn: (value) => (typeof value === 'string' ? null : 'a text'),
  respondAsync: isBoolean,
  waitMs: wholeNumber(0, timerMsMax),
  traceparent: (value) => (typeof value === 'string' ? null : 'a text'),
  signal: (value) => (value instanceof AbortSignal ? null : 'an AbortSignal'),
  texts: (value) => (Array.isArray(value) ? null : 'a list of JSON texts'),
}

export function checkSubmitOptions(call: string, options: SubmitAllOptions): void {
  checkOptions(call, options, submitRules)
}

/** The submission of a call, without HTTP. */
export function submissionOf(body: unknown, options: SubmitOptions, text?: string): Submission {
  return {
    body,
    ...(text !== undefined && { text }),
    identity: options.identity ?? 'local',
    request: localRequest(options),
    ...(options.idempotencyKey !== undefined && { idempotencyKey: options.idempotencyKey }),
    ...(options.keyedOn !== undefined && { keyedOn: options.keyedOn }),
    ...(options.respondAsync !== undefined && { respondAsync: options.respondAsync }),
    ...(options.waitMs !== undefined && { waitMs: options.waitMs }),
    ...(options.signal && { signal: options.signal }),
  }
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
