/**
 * What the core needs of a store. One adapter exists (postgres/), for a server of the user's and for the embedded one;
 * `test/store-conformance.ts` is run on both.
 *
 * Every method throws `StoreFault` when the store cannot do its work; expected outcomes are values.
 */
import type { OperationStatus, QueuedReason } from '@spillway/protocol/wire'
import type { StreamLog, StreamRegistry } from '../streams/port.js'
import type { CutRows } from './page-sql.js'

/** A transaction on a connection of its own, as handlers see it. Its shape is node-postgres' `query`. */
export interface Tx {
  query<Row extends Record<string, unknown> = Record<string, unknown>>(
    text: string,
    values?: readonly unknown[],
  ): Promise<{ rows: Row[]; rowCount: number | null }>
}

export interface OpenTx extends Tx {
  commit(): Promise<void>
  /** Ends the transaction without effect; safe to call at any time, also while a query runs. */
  rollback(): Promise<void>
}

export interface RateCheck {
  /** 128 bits, as a UUID text, of what is limited. */
  key: string
  limit: number
  windowMinutes: number
  /** How long its row is kept after it was last used. Default: the window and an hour. */
  keepMinutes?: number
}

export interface AcceptItem {
  id: string
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
   * Why it is queued though its lane may be empty. With `execute`: it may run at once, and its caller gets a ticket with this
   * reason; `still_running` only then, and only if it runs.
   */
  reason: '' | 'requested' | 'system_busy' | 'still_running'
  /** Milliseconds per operation where its lane has no history. */
  paceMs: number
  /** Virtual start time, and its distance from the identity's first item in this flush. */
  stamp: number
  lead: number
  idempotency: { key: string; request: string } | null
  /** Capacity gate that has to have a place. */
  gate: string | null
  /** Scope of the halt that refuses it. */
  halt: string | null
  /** Those of one batch are refused together when the queue is full and one of them would have to wait in it. */
  batch: number
  rates: readonly RateCheck[]
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
  /** It took nothing from its rates: they are told as they are. */
  | { verdict: 'replay'; operationId: string; answer: StoredAnswer; rate: RateState | null }
  | { verdict: 'mismatch' }
  | { verdict: 'in_progress' }

/** What a flush of applied items comes to, by their indices. */
export interface Decided {
  applied: readonly number[]
  /** The places in their lanes of those that are applied. */
  seqs: readonly number[]
}

/**
 * An effect that is a function of the store: `fn(verdicts text[], seqs bigint[], …values) → json[]`. Verdicts as in
 * postgres/sql/functions/accept.sql; it writes what is `apply`, and may keep a record of what is `rate_limited`.
 */
export interface StoreEffect {
  function: string
  /** Arrays with an element per item, in this order of them. */
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
  /** RFC 3339, UTC, milliseconds; of a row that somebody changed, what the database says where that cannot. */
  at: string
  prevHash: string
  hash: string
}

/** What an idempotency key keeps, to be told again. */
export type StoredAnswer =
  | { v: 'queue'; place: number; wait_ms: number; reason: QueuedReason }
  | { v: 'done'; result: unknown }
  | { v: 'failed'; error: string; result?: unknown }
  | { v: 'cancelled' }

export interface AcceptContext {
  worker: string
  /** How long all lanes together are behind, for the estimate of waits. */
  backlogMs: number
  keyTtlMs: number
  /** As many operations wait as may: what would have to join them is refused. For items that are applied. */
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
  /** JSON text, as it came. */
  payload: string
  waitedMs: number
  /** A process died over this lane: its start is to be told before it runs. */
  careful: boolean
  /** False: delayed or paused, to be given back. */
  due: boolean
  attempts: number
  maxAttempts: number
  timeoutMs: number
  traceparent: string
  idempotencyKey: string | null
  gate: string | null
}

/** One operation that leaves its lane. */
export interface Leaving {
  seq: number
  type: string
  status: 'completed' | 'failed' | 'cancelled'
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

/** What became of one lane of a lease. */
export interface Settlement {
  fence: number
  lane: string
  /** Everything up to here had left before. */
  from: number
  leaving: Leaving[]
  /** The next operation comes again after so many milliseconds; the error counts as an attempt, null does not. */
  retry: { delayMs: number; error: string | null } | null
  /** Only for processes that announced this label, and at once; as `retry` says when there is none any more. */
  leaveTo?: string | null
  /** Give the lane up. */
  release: boolean
}

export interface ClaimRequest {
  lanes: number
  /** Operations in all, and at most per lane. */
  budget: number
  each: number
  /** Only levels from this priority on, unless there are none. */
  turn: number
  /** Only lanes whose first operation is of one of these types. Default: all. */
  types?: readonly string[]
  /** Types whose operations take effect together, in one transaction: `each` does not bound them. */
  together?: readonly string[]
  /** Types that run in the store and cannot end this process: those of a process that died need not come one at a time. */
  trusted?: readonly string[]
}

export interface StepResult {
  /** Leases that are lost. Nothing was settled or claimed then. */
  lost: number[]
  claimed: Claimed[]
  /** Operations that the claimed lanes held, together, when they became ready; there may be more by now. */
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
  /** In lists: the bytes of a result that is left out, and of an error text of which only the beginning is given. */
  resultBytes?: number
  errorBytes?: number
}

export interface DeadLetter extends Ticket {
  /** JSON text, as it came; null: left out of a list. */
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
  from?: Date
  to?: Date
  ids?: readonly string[]
  bound?: QueueBound
}

/** Of a caller that is bound to queues: what is in them, and its own work of types whose queue the caller does not name. */
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
  /** Greater than that of any earlier change of this process to the pool. */
  seq: number
  /** After a change of which nobody knows whether it happened: all that the process holds, by identity, before this one. */
  held: ReadonlyMap<string, number> | null
  gives: readonly string[]
  takes: readonly { identity: string; perIdentity: number; total: number }[]
}

/** Where an operation is, in few words. */
export interface OperationReportRow {
  id: string
  status: OperationStatus
  type: string
  place: number | null
  /** Milliseconds per operation of its lane; null when it has no history, or waits no more. */
  paceMs: number | null
  error: string | null
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
  /** Of history outside its partitions. */
  history: number
  keys: number
  rate_rows: number
  lanes: number
  cancels: number
  /** There may be more. */
  isFull: boolean
}

export interface Store {
  /** Makes the schema what this version needs. Safe to call from several processes at once. */
  migrate(): Promise<{ from: number; to: number }>

  accept(items: readonly AcceptItem[], context: AcceptContext): Promise<Accepted[]>
  /**
   * The same for items whose effect is rows of this store: `effect` writes those that were given the verdict `apply`
   * in the same transaction, and its answers are kept for their idempotency keys.
   */
  acceptAndApply(
    items: readonly AcceptItem[],
    context: AcceptContext,
    effect: (tx: Tx, decided: Decided) => Promise<readonly StoredAnswer[]>,
  ): Promise<Accepted[]>
  /**
   * The same for an effect that is a function of the store: one round trip, however many items. Its elements are kept for
   * the idempotency keys of what was applied.
   */
  acceptWithEffect(
    items: readonly AcceptItem[],
    context: AcceptContext,
    effect: StoreEffect,
    tx?: Tx,
  ): Promise<{ accepted: Accepted[]; told: unknown[] }>
  /** The effect of operations that were queued. */
  applyWithin(tx: Tx, seqs: readonly number[], effect: StoreEffect): Promise<unknown[]>
  /** Inside the caller's own transaction; nothing is executed at once. */
  acceptWithin(tx: Tx, items: readonly AcceptItem[], context: AcceptContext): Promise<Accepted[]>

  step(
    worker: string,
    part: number,
    settlements: readonly Settlement[],
    claim: ClaimRequest | null,
  ): Promise<StepResult>
  /**
   * Takes the locks of the settlements that are to follow in this transaction, so that effects that lock rows which others
   * lock behind a lane can be written before them. Per lane: false when the lease is lost.
   */
  holdWithin(
    tx: Tx,
    worker: string,
    held: readonly { fence: number; lane: string; keys: readonly string[] }[],
  ): Promise<readonly boolean[]>
  /** Settles inside a transaction of `begin`; answers whether the leases still held. */
  settleWithin(tx: Tx, worker: string, ...settlements: readonly Settlement[]): Promise<boolean>
  /** After a commit that was not confirmed: did the operation leave its lane? Waits for that transaction to end. */
  confirm(worker: string, fence: number, lane: string, seq: number): Promise<'left' | 'pending' | 'lost'>
  mark(
    worker: string,
    started: readonly { fence: number; lane: string; seq: number; startedMsAgo: number }[],
  ): Promise<void>
  /**
   * No statement, and no pause between two, may last longer than `timeoutMs`. Those of an operator have connections of
   * their own: they are short, and must not wait behind handlers.
   */
  begin(timeoutMs: number, of?: 'handlers' | 'operators'): Promise<OpenTx>
  /** Keeps the answer for the key of an operation whose caller was told to come back. */
  answerKey(key: string, operationId: string, answer: StoredAnswer): Promise<void>
  /** The key is as if it had not been used, if it is that operation's. */
  forgetKey(key: string, operationId: string): Promise<void>

  /** `announced`: what of a type it may run, where that is not all, by label: the type, a space and a digest. */
  enlist(worker: string, name: string, leaseMs: number, announced?: Readonly<Record<string, string>>): Promise<void>
  /** What live processes announced, by label; and the store's clock. */
  announced(): Promise<{ nowMs: number; by: Record<string, string> }>
  pulse(worker: string, leaseMs: number, running: Record<string, number>): Promise<Pulse>
  /** Why nothing can be accepted right now; null when it can. The last known state: it asks nothing. */
  acceptFault(): Error | null
  /** Ends one process whose lease ran out; null when there is none. */
  recover(): Promise<{ worker: string; name: string; lanes: number } | null>
  retire(worker: string): Promise<number>
  /** Gives back leases whose claim was never answered. */
  disown(worker: string, knownFences: readonly number[]): Promise<number>
  /** Removes a batch of what has expired; the next one begins where a full one ended. */
  sweep(retentionMs: number): Promise<SweptRows>
  /** The turn to sweep, of one process at a time. 0: it is this one's, for `holdMs` unless it says more; else the milliseconds to wait. */
  takeSweepTurn(holdMs: number): Promise<number>
  /** Ends the turn: nobody sweeps for so long. */
  endSweepTurn(restMs: number): Promise<void>
  audit(): Promise<string[]>

  ticket(id: string): Promise<Ticket | null>
  /** Those of `ids` that are finished. */
  finished(ids: readonly string[]): Promise<Ticket[]>
  /** Those of `ids` that are known; for many at once. */
  statusOf(ids: readonly string[]): Promise<OperationReportRow[]>
  /** Unfinished operations of each lane. */
  laneDepths(lanes: readonly string[]): Promise<number[]>
  /** Newest first, without long results and errors. */
  tickets(filter: TicketFilter, limit: number, before: string | null): Promise<Ticket[]>
  stats(bound?: QueueBound): Promise<StatRow[]>
  cancel(id: string, abortable: readonly string[], why: string): Promise<CancelOutcome>
  /** Newest first, without long results, errors and payloads. */
  deadLetters(filter: TicketFilter, limit: number, before: string | null): Promise<DeadLetter[]>
  /** One of them, whole. */
  deadLetter(id: string): Promise<DeadLetter | null>
  /** Up to `limit` ids of dead letters that match, oldest first, from behind `after` on. */
  deadLetterIds(filter: TicketFilter, limit: number, after: string | null): Promise<string[]>
  redrive(ids: readonly string[]): Promise<{ moved: number; skipped: number }>
  purge(ids: readonly string[]): Promise<number>
  /** With no queue (''): the type `partition`, in whatever lane it comes first. */
  pause(queue: string, partition: string | null): Promise<void>
  resume(queue: string, partition: string | null): Promise<void>
  /** What holds it back now: its whole queue, before the partition alone; null: nothing. */
  pausedBy(queue: string, partition: string | null): Promise<'queue' | 'partition' | null>

  /** Appends in the caller's transaction, behind all other locks that it takes; answers the last number. */
  ledgerAppend(tx: Tx, events: readonly LedgerEvent[]): Promise<number>
  /** Null: somebody removed it. `lastRow` is the greatest number, 0 when there is none. */
  ledgerHead(): Promise<{ head: { seq: number; hash: string } | null; lastRow: number }>
  ledgerRows(after: number, limit: number, bytesMax: number): Promise<CutRows<LedgerRow>>
  /** Looks at the `rows` rows behind `after`, whose hash is `prevHash`. */
  ledgerCheck(
    after: number,
    prevHash: string,
    rows: number,
  ): Promise<{ seen: number; lastSeq: number | null; lastHash: string | null; brokenAt: number | null }>

  /** Reads of tables of one's own. */
  read: Tx['query']
  /** Prepared once per connection, so that there must be few of them. */
  readonly statements: { take: Tx['query']; release: Tx['query'] }
  registerGate(name: string, fullAt: number, resumeBelow: number): Promise<void>
  releaseGate(tx: Tx, name: string, count: number): Promise<void>
  /** False when it was halted already. With `tx`: inside that transaction. */
  halt(scope: string, reason: string, tx?: Tx): Promise<boolean>
  unhalt(scope: string, tx?: Tx): Promise<boolean>
  /**
   * Changes what a process holds of a pool's places; answers for each that it takes. Null: a later change of the same process
   * was there before it, nothing happened.
   */
  changeConnections(
    worker: string,
    pool: string,
    change: ConnectionChange,
  ): Promise<('granted' | 'identity_full' | 'pool_full')[] | null>

  /** The streams kept here; for one user. `longestMs`: how long a stream may last; `retentionMs`: how long it is kept then. */
  streams(options: { retentionMs: number; longestMs: number }): { log: StreamLog; registry: StreamRegistry }

  /** Tells other processes that there is work; a hint, the pulse is the truth. */
  wake(kind: 'ready' | 'cancel'): Promise<void>
  /** `onMissed`: whatever was sent meanwhile may not have been heard; each second where nothing can be. */
  listen(onWake: (kind: string) => void, onMissed?: () => void): Promise<void>
  poolState(): PoolState
  /** Milliseconds between this process's clock and the store's. */
  ping(): Promise<{ skewMs: number }>
  close(): Promise<void>
}
