/** What the core and the store exchange. The store itself, with its methods, is postgres/store.ts. */
import type { OperationStatus, QueuedReason } from '@spillway/protocol/wire'
import type { postgresStore } from './postgres/store.js'

/** A transaction on its own connection, as handlers see it. Its shape is node-postgres' `query`. */
export interface Tx {
  query<Row extends Record<string, unknown> = Record<string, unknown>>(
    text: string,
    values?: readonly unknown[],
  ): Promise<{ rows: Row[]; rowCount: number | null }>
}

export interface OpenTx extends Tx {
  commit(): Promise<void>
  /** Rolls back; safe to call at any time, also while a query runs. */
  rollback(): Promise<void>
}

export interface RateCheck {
  /** 128 bits of the limited key, as a UUID text. */
  key: string
  limit: number
  /** At most `limit` in any window of this length. */
  windowSeconds: number
  /** Instead, count in clock minutes: this many of them, the present one included. */
  clockMinutes?: number
  /** How long its row is kept after its last use. Default: the window and an hour. */
  keepMinutes?: number
}

export interface AcceptItem {
  id: string
  /** The operation's own id if it is parallel. */
  lane: string
  queue: string
  partition: string
  type: string
  priority: number
  identity: string
  /** JSON text. */
  payload: string
  delayMs: number
  maxAttempts: number
  timeoutMs: number
  traceparent: string
  /** Run it here and now if its lane is empty. */
  execute: boolean
  /**
   * Why it is queued although its lane may be empty. With `execute`: it may run at once, and its caller gets a ticket with
   * this reason; `still_running` only then, and only if it runs.
   */
  reason: '' | 'requested' | 'system_busy' | 'still_running'
  /** Milliseconds per operation, for a lane without history. */
  paceMs: number
  /** Virtual start time, and its distance from the identity's first item in this flush. */
  stamp: number
  lead: number
  idempotency: { key: string; request: string } | null
  /** Capacity gate that must have room. */
  gate: string | null
  /** Scope of the halt that refuses it. */
  halt: string | null
  /** Items of one batch are refused together when the queue is full and one of them would have to wait in it. */
  batch: number
  rates: readonly RateCheck[]
  /** Of a parallel one: at most so many of this key run at a time. */
  turns?: { key: string; most: number } | null
  /** It may not start later than this after its acceptance. */
  expiresMs?: number | null
}

export interface RateState {
  /** Index into the item's `rates`: the tier that refused, or the one with the least left. */
  tier: number
  left: number
  resetMs: number
  /** The same as an instant: epoch milliseconds of the store's clock. */
  resetAtMs: number
}

export type Accepted =
  | { verdict: 'execute'; fence: number; seq: number; stamp: number; rate: RateState | null }
  | { verdict: 'apply'; seq: number; stamp: number; rate: RateState | null }
  | {
      verdict: 'queue'
      seq: number
      place: number
      waitMs: number
      reason: QueuedReason
      stamp: number
      rate: RateState | null
    }
  | { verdict: 'refuse'; by: 'capacity' | 'halt' | 'depth'; rate: null }
  | { verdict: 'refuse'; by: 'rate'; rate: RateState }
  /** It used none of its rates; they are reported unchanged. */
  | { verdict: 'replay'; operationId: string; answer: StoredAnswer; rate: RateState | null }
  | { verdict: 'mismatch' }
  | { verdict: 'in_progress' }

/** A request that only passes gates; no operation is written. */
export type AdmitItem = Pick<AcceptItem, 'halt' | 'rates'>

export type Admitted =
  | { verdict: 'admit'; rate: RateState | null }
  | { verdict: 'refuse'; by: 'halt'; rate: null }
  | { verdict: 'refuse'; by: 'rate'; rate: RateState }

/** The decision on a flush of applied items, by their indices. */
export interface Decided {
  applied: readonly number[]
  /** The sequence numbers, in their lanes, of the applied items. */
  seqs: readonly number[]
}

/**
 * An effect that is a function in the store: `fn(verdicts text[], seqs bigint[], …values) → json[]`. Verdicts as in
 * postgres/sql/functions/accept.sql; it writes the `apply` items, and may keep a record of the `rate_limited` ones.
 */
export interface StoreEffect {
  function: string
  /** Arrays with one element per item, in the given order. */
  values(order: readonly number[]): readonly unknown[]
}

/** An event to be witnessed. */
export interface LedgerEvent {
  type: string
  actor: string
  traceId: string
  /** In RFC 8785 form. */
  payload: string
}

export interface LedgerRow extends LedgerEvent {
  seq: number
  /** RFC 3339, UTC, milliseconds; for a row that somebody changed, the database's own text if that is not possible. */
  at: string
  prevHash: string
  hash: string
}

/** The answer that an idempotency key stores, for replay. */
export type StoredAnswer =
  | { v: 'queue'; place: number; wait_ms: number; reason: QueuedReason }
  | { v: 'done'; result: unknown }
  | { v: 'failed'; error: string; result?: unknown; code?: string; status?: number }
  | { v: 'cancelled' }

export interface AcceptContext {
  worker: string
  /** The time that all lanes together are behind, for estimating waits. */
  backlogMs: number
  /** How many operations wait for the same slots: the place of a parallel one. Default 0. */
  ahead?: number
  keyTtlMs: number
  /** The limit on waiting operations is reached: an item that would have to wait is refused. For applied items. */
  isFull?: boolean
}

/** One operation as a worker gets it. */
export interface Claimed {
  fence: number
  lane: string
  seq: number
  id: string
  type: string
  queue: string
  partition: string
  priority: number
  identity: string
  /** JSON text, unchanged. */
  payload: string
  waitedMs: number
  /** A process died while running this lane: the start is recorded before the handler runs. */
  careful: boolean
  /** False: delayed or paused; it is given back. */
  due: boolean
  attempts: number
  maxAttempts: number
  timeoutMs: number
  traceparent: string
  idempotencyKey: string | null
  gate: string | null
  /** When the claim was made: milliseconds until it may not start any more. Null: it always may. */
  expiresInMs?: number | null
}

/** One operation that leaves its lane. */
export interface Leaving {
  seq: number
  type: string
  /**
   * `answered`: failed, and a caller was answered with it. `expired`: failed because it did not start in time. Neither leaves a
   * dead letter.
   */
  status: 'completed' | 'failed' | 'answered' | 'expired' | 'cancelled'
  /** JSON text, or null for none. */
  result: string | null
  error: string | null
  startedMsAgo: number
  /** Whether its last delivery counts as an attempt. */
  counted: boolean
  gate: string | null
  idempotencyKey: string | null
  answer: StoredAnswer | null
}

/** The last error of an operation. */
export interface Failure {
  id: string
  /** Which attempt it ended. */
  attempt: number
  /** For the caller, with FailOperation; null: an error that the handler did not expect. */
  said: { code: string; status: number } | null
  /** A dead letter stays, although a caller was answered. */
  keepLetter: boolean
  /** For operators. */
  stack: string
}

/** The outcome of one lane of a lease. */
export interface Settlement {
  fence: number
  lane: string
  /** Everything up to here has left already. */
  from: number
  leaving: Leaving[]
  /** Of the operations that failed, also of one that is retried. */
  failures?: readonly Failure[]
  /** The next operation is retried after this many milliseconds; the error counts as an attempt, null does not. */
  retry: { delayMs: number; error: string | null } | null
  /** Only for processes that announced this label, and at once; as `retry` says when there are none left. */
  leaveTo?: string | null
  /** Release the lane. */
  release: boolean
}

export interface ClaimRequest {
  lanes: number
  /** Operations in total, and at most per lane. */
  budget: number
  each: number
  /** Only levels from this priority on, unless there are none. */
  turn: number
  /** Only lanes whose first operation is of one of these types. Default: all. */
  types?: readonly string[]
  /** Types whose operations are applied together, in one transaction: `each` does not limit them. */
  together?: readonly string[]
  /** Types that run in the store and cannot crash this process: after a process died, they need not come one at a time. */
  trusted?: readonly string[]
}

export interface StepResult {
  /** Lost leases. If there are any, nothing was settled or claimed. */
  lost: number[]
  claimed: Claimed[]
  /** Operations in the claimed lanes, together, when they became ready; there may be more by now. */
  depth: number
}

export interface Pulse {
  alive: boolean
  waiting: boolean
  nextDueMs: number | null
  oldestMs: number
  held: Record<string, number>
  running: Record<string, number>
  deadLetters: number
  gates: { name: string; held: number; full_at: number; overflowing: boolean }[]
  halts: { scope: string; reason: string }[]
  cancels: string[]
  lostWorkers: number
}

export interface Ticket {
  id: string
  type: string
  queue: string
  partition: string
  priority: number
  identity: string
  status: OperationStatus
  createdAt: Date
  startedAt: Date | null
  finishedAt: Date | null
  attempts: number
  maxAttempts: number
  error: string | null
  result: unknown
  place: number | null
  trace: string
  /** Why it failed: `expired`, or (not in lists) what its handler said with FailOperation, if its last attempt ended so. */
  said?: { code: string; status: number }
  /** Not in lists: what its handler said last, while that attempt runs. */
  progress?: { value: number; note: string | null; at: Date }
  /** Not in lists: the last error with its stack, for operators. */
  stack?: string
  /** In lists: the bytes of a result that is left out, and of an error text that is shortened. */
  resultBytes?: number
  errorBytes?: number
}

export interface DeadLetter extends Ticket {
  /** JSON text, unchanged; null: left out of a list. */
  payload: string | null
  /** In lists: the bytes of a payload that is left out. */
  payloadBytes?: number
}

export interface TicketFilter {
  status?: OperationStatus
  type?: string
  queue?: string
  partition?: string
  identity?: string
  owner?: TicketOwner
  from?: Date
  to?: Date
  ids?: readonly string[]
  bound?: QueueBound
}

/** Operations of `identity`; for `types`, those of the identity at the same index of `identities` instead. */
export interface TicketOwner {
  identity: string
  types: readonly string[]
  identities: readonly string[]
}

/** For a caller bound to queues: the operations in them, and its own work of types whose queue the caller does not name. */
export interface QueueBound {
  /** Names, `orders*` for a prefix. */
  queues: readonly string[]
  identity: string
  namedTypes: readonly string[]
}

export interface StatRow {
  type: string
  priority: number
  status: OperationStatus
  count: number
  oldest: Date
  newest: Date
  averageLatencySeconds: number | null
}

export type CancelOutcome = 'cancelled' | 'asked' | 'running' | 'gone'

export interface ConnectionChange {
  /** Greater than in any earlier change of this process to the pool. */
  seq: number
  /** After a change with an unknown outcome: all permits that the process holds, by identity, before this one. */
  held: ReadonlyMap<string, number> | null
  gives: readonly string[]
  takes: readonly { identity: string; perIdentity: number; total: number }[]
}

/** The status of an operation, in brief. */
export interface OperationReportRow {
  id: string
  status: OperationStatus
  type: string
  place: number | null
  /** Milliseconds per operation of its lane; null when it has no history, or no longer waits. */
  paceMs: number | null
  error: string | null
  /** It waits for a slot alone, and its place is among all that do. */
  isParallel: boolean
  /** How many of its lane or key may run at a time. */
  abreast: number
}

/** A lane that holds operations, with its first one. */
export interface LaneRow {
  id: string
  queue: string
  partition: string
  depth: number
  /** A pause of its queue, its own, or one of the type of its first operation. */
  pausedBy: 'queue' | 'partition' | 'type' | null
  /** It waits to be claimed. Neither ready nor parked: a process has claimed it. */
  isReady: boolean
  /** It was left to the processes that announced this label. */
  label: string | null
  parkedFor: 'delay' | 'retry' | 'pause' | 'turn' | null
  /** When it is no longer parked, and how long until then; null: it is not parked, or paused. */
  dueAt: Date | null
  dueMs: number | null
  /** Since its first operation was accepted. */
  ageMs: number
  head: string
  type: string
  isStarted: boolean
  attempts: number
  maxAttempts: number
}

export interface PoolState {
  max: number
  busy: number
  idle: number
  waiting: number
}

export interface SweptRows {
  partitions_made: number
  partitions_dropped: number
  /** Rows of history outside its partitions. */
  history: number
  keys: number
  rate_rows: number
  lanes: number
  cancels: number
  /** There may be more. */
  isFull: boolean
}

/** Tests override single methods of it. */
export type Store = ReturnType<typeof postgresStore>
