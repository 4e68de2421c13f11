import type { TSchema } from 'typebox'
import type { AcceptFlush } from '../accept/accepting.js'
import type { BoundGate, RateTier } from '../gates/gate.js'
import type { AcceptItem } from '../store/port.js'
import type { Slots } from '../work/slot-groups.js'
import type { DefineOptions, IntakeRequest } from './define.js'

/** A submission after identify and parse. */
export interface Submission {
  body: unknown
  /** The body as JSON, as it came, if the caller has it. */
  text?: string
  /** `digestUuid` of the body as it came, where its text is not known. */
  digest?: string
  identity: string
  request: IntakeRequest
  idempotencyKey?: string
  /** What the key is about, where that is not the body. */
  keyedOn?: string
  respondAsync?: boolean
  /** Wait so long for a queued one, then answer as if it had run now. 0: run it now, and answer with its ticket at once. */
  waitMs?: number
  signal?: AbortSignal
}

/** A definition with its gates bound and its labels looked up. */
export interface Bound {
  readonly type: string
  readonly options: DefineOptions<TSchema, unknown>
  readonly gates: readonly BoundGate<unknown>[]
  readonly flush: AcceptFlush
  /** Where what is run, or waits, is run. */
  readonly slots: Slots
}

/** An item on its way through a flush, with what only this process knows of it. */
export interface PendingItem {
  item: AcceptItem
  body: unknown
  /** The tiers of its rates, in the order in which the store is asked. */
  tiers: readonly RateTier[]
  result?: unknown
  /** Members for the problem document, from the transaction that refused it. */
  told?: Readonly<Record<string, unknown>>
}
