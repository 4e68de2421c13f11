import type { ProblemCode } from '@spillway/protocol/wire'
import type { Static, TSchema } from 'typebox'
import type { BackoffOptions } from '../core/backoff.js'
import type { LaneName } from '../core/lane.js'
import type { Gate } from '../gates/gate.js'
import type { Tx } from '../store/port.js'
import type { Answer } from './answer.js'

/** One normalized request, the same in both bindings. */
export interface IntakeRequest {
  method: string
  /** Path without query. */
  path: string
  /** Lower-case names; repeated headers joined by ", ". */
  headers: Readonly<Record<string, string | undefined>>
  query: URLSearchParams
  params: Readonly<Record<string, string>>
  clientAddress: string
  /** The authenticated subject, where the host has one. */
  user: IntakeUser | null
  traceparent: string
}

export interface IntakeUser {
  id: string
  roles: ReadonlySet<string>
  /** Patterns of the queues it may use (`orders*`); absent: all. */
  queues?: readonly string[]
}

/** What a handler gets beside the body. */
export interface RunContext {
  /** The operation's id: the ticket, and the idempotency key for effects elsewhere. */
  readonly id: string
  readonly type: string
  readonly identity: string
  readonly queue: string
  readonly partition: string
  /** 1 for the first. */
  readonly attempt: number
  readonly maxAttempts: number
  /** To hand on: the trace goes through the queue. */
  readonly traceparent: string
  /** Fires on timeout, cancellation, loss of the lease and shutdown. */
  readonly signal: AbortSignal
  /**
   * A transaction on the store, opened at the first query. What it writes and the completion of the operation are one
   * commit: both happen, once, or neither.
   */
  readonly tx: Tx
}

export interface ApplyItem<Body> {
  id: string
  identity: string
  body: Body
  /** The body as JSON, as it came: what is only carried keeps its numbers there. */
  text: string
  queue: string
  partition: string
  seq: number
  traceparent: string
}

/** One that a rate refused, inside the transaction that did. */
export interface LimitedItem<Body> {
  identity: string
  body: Body
  traceparent: string
  /** The tier that refused. */
  name: string
  limit: number
  windowMinutes: number
  /** Until a slot is free. */
  resetMs: number
  /** When that is: epoch milliseconds of the store's clock. */
  resetAtMs: number
}

/** Told instead of accepting: the body is well-formed but cannot be taken. */
export interface Rejection {
  code: ProblemCode
  detail: string
  errors?: { path: string; message: string }[]
}

interface Common<S extends TSchema, Result> {
  body: S
  /** Names the FIFO. Default: the operation's type as queue. */
  lane?: (body: Static<S>, request: IntakeRequest) => LaneName
  /** Who asks. Default: the authenticated user, else the client's address. */
  identity?: (request: IntakeRequest) => string
  gates?: readonly Gate<Static<S>>[]
  /** A last look at the body, e.g. at what a schema cannot say. */
  check?: (body: Static<S>, request: IntakeRequest) => Rejection | null | Promise<Rejection | null>
  /** 1 (first) to 10. Default 5. */
  priority?: number | ((body: Static<S>) => number)
  /** Default 30 s. */
  timeoutMs?: number | ((body: Static<S>) => number)
  /** Default 3. */
  maxRetries?: number | ((body: Static<S>) => number)
  delayMs?: (body: Static<S>) => number
  retry?: BackoffOptions
  /** Hears of every decision on a submission that reached the store, after it is durable: for counting. */
  onAnswer?: (answer: Answer, submission: { body: Static<S>; identity: string }) => void
  /** How the answer for a finished operation looks. Default: 201 and `{status, operationId, result}`. */
  respond?: (done: { operationId: string; result: Result }) => {
    status?: number
    headers?: Record<string, string>
    body: unknown
  }
}

export interface RunOptions<S extends TSchema, Result> extends Common<S, Result> {
  /** Busy: queue it (default), or refuse with 503. */
  whenBusy?: 'queue' | 'refuse'
  /** A running one can be cancelled: the handler heeds `ctx.signal`. Default false. */
  abortable?: boolean
  /**
   * Slots of their own, apart from the intake's `concurrency`, for operations that last: they neither take the slots of others
   * nor wait for them. Definitions with the same name share them; so many run at once in this process.
   */
  slots?: { name: string; concurrency: number }
  /** `text`: the body as JSON, as it came. What is only carried keeps numbers there that JSON.parse cannot hold. */
  run: (body: Static<S>, context: RunContext, text: string) => Promise<Result> | Result
  /** While false, none is claimed from the queue here: it would be an attempt in vain. */
  ready?: () => boolean
  /**
   * What of it this process may run, in a form that `LeaveOperation` of another process understands; fixed once the intake
   * has started. Default: every process that has the definition may run all.
   */
  announces?: () => string
  pendingMax?: never
  apply?: never
}

/**
 * For effects that are rows in the store: set-based, called inside the accepting transaction, once per flush. A place that
 * a `capacity` gate gave is the rows' from then on: `intake.releaseCapacity` in the transaction that ends what it was for.
 */
export interface ApplyOptions<S extends TSchema, Result> extends Common<S, Result> {
  whenBusy?: 'queue' | 'refuse'
  abortable?: never
  slots?: never
  /** Operations that may wait, of all types, for one of this type to join them. Default: as many as the intake holds. */
  pendingMax?: number
  ready?: never
  announces?: never
  apply: ((tx: Tx, items: readonly ApplyItem<Static<S>>[]) => Promise<readonly Result[]>) | SqlEffect<Static<S>, Result>
  run?: never
}

/**
 * An effect that is a function in the database, called in the accepting statement itself: a flush is one round trip, where
 * `apply` as a function here takes four, with the rows that gates count by locked for as long.
 *
 *   name(verdicts text[], seqs bigint[], …values) RETURNS json[]
 *
 * The arrays have an element per item. It writes those whose verdict is `apply` and answers their results; for those
 * whose verdict is `rate_limited` it may keep a record and answer what `limited` makes members of their problem
 * documents from. All others are none of its business: their elements are NULL.
 */
export interface SqlEffect<Body, Result> {
  /** With its schema. */
  function: string
  /** Always as many: texts, numbers, booleans, nulls, and arrays of them; mostly with an element per item. */
  values: (
    items: readonly EffectItem<Body>[],
    /** They were queued, and are applied by a worker: nobody waits for the answer, so what cannot be done has to fail. */
    queued: boolean,
  ) => readonly (EffectValue | readonly EffectValue[])[]
  limited?: (told: unknown, item: LimitedItem<Body>) => Readonly<Record<string, unknown>>
  /** Awaited before what was queued is applied: what `values` has to know may have changed since it was accepted. */
  prepare?: (items: readonly EffectItem<Body>[]) => Promise<void>
  /** Phantom: only there for the types. */
  readonly _result?: Result
}

type EffectValue = string | number | boolean | null

/** Before it is decided: it has no place in its lane yet. */
export type EffectItem<Body> = Omit<ApplyItem<Body>, 'seq'>

export type DefineOptions<S extends TSchema, Result> = RunOptions<S, Result> | ApplyOptions<S, Result>

/** An operation type, as `define` gives it. `Body` and `Result` are inferred from the schema and the handler. */
export interface Definition<Body = unknown, Result = unknown> {
  readonly type: string
  /** Phantom: only there for the types. */
  readonly _types?: { body: Body; result: Result }
}

export const defaults = {
  timeoutMs: 30_000,
  maxRetries: 3,
  priority: 5,
} as const
