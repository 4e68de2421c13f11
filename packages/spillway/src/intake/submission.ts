import type { TSchema } from 'typebox'
import type { AcceptFlush } from '../accept/accepting.js'
import type { BoundGate, RateTier } from '../gates/gate.js'
import type { AcceptItem } from '../store/port.js'
import type { Slots } from '../work/slot-groups.js'
import type { DefineOptions, IntakeRequest } from './define.js'

/** A submission after identify and parse. */
export interface Submission {
  body: unknown
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
}

/** A definition with its gates bound and its labels looked up. */
export interface Bound {
  readonly type: string
  readonly options: DefineOptions<TSchema, unknown>
  readonly gates: readonly BoundGate<unknown>[]
  readonly flush: AcceptFlush
  /** The slots that run its operations. */
  readonly slots: Slots
}

/** An item on its way through a flush, with data that only this process has. */
export interface PendingItem {
  item: AcceptItem
  body: unknown
  /** The tiers of its rates, in the order of the store's check. */
  tiers: readonly RateTier[]
  result?: unknown
  /** Members for the problem document, from the transaction that refused it. */
  told?: Readonly<Record<string, unknown>>
}
