import type { ProblemCode } from '@spillway/protocol/wire'
import type { Static, TSchema } from 'typebox'
import type { BackoffOptions } from '../core/backoff.js'
import type { Duration } from '../core/duration.js'
import type { KeyName, LaneName } from '../core/ids.js'
import type { Gate } from '../gates/gate.js'
import type { StandardSchema } from '../http/standard-schema.js'
import type { Tx } from '../store/port.js'
import type { Answer } from './answer.js'
import type { WhenBusy } from './when-busy.js'

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
  /** The authenticated subject, if the host has one. */
  user: IntakeUser | null
  traceparent: string
}

/** Who asks. Undefined: the authenticated user, else the client's address. */
export type Identify = (request: IntakeRequest) => string | undefined

export interface IntakeUser {
  id: string
  roles: ReadonlySet<string>
  /** Patterns of the queues it may use (`orders*`); absent: all. */
  queues?: readonly string[]
}

/** A handler's context, besides the body. */
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
  /** To pass on: the trace continues through the queue. */
  readonly traceparent: string
  /** Fires on timeout, cancellation, loss of the lease and shutdown. */
  readonly signal: AbortSignal
  /**
   * How far it is, from 0 to 1, and a note of at most 200 characters: readers of the ticket see it, on any instance, while
   * this attempt runs. Call it as often as you like: the last one is written, at most twice a second for the whole process.
   */
  progress(value: number, note?: string): void
  /**
   * A transaction on the store, opened at the first query. Its writes and the operation's completion are one commit: both
   * happen, once, or neither.
   */
  readonly tx: Tx
}

export interface ApplyItem<Body> {
  id: string
  identity: string
  body: Body
  /** The original body as JSON text, which keeps numbers that JSON.parse cannot hold. */
  text: string
  queue: string
  partition: string
  seq: number
  traceparent: string
}

/** An item that a rate refused, inside the transaction that refused it. */
export interface LimitedItem<Body> {
  identity: string
  body: Body
  traceparent: string
  /** The tier that refused. */
  name: string
  limit: number
  windowSeconds: number
  /** Until a slot is free. */
  resetMs: number
  /** When that is: epoch milliseconds of the store's clock. */
  resetAtMs: number
}

/** A refusal: the body is well-formed but cannot be accepted. */
export interface Rejection {
  code: ProblemCode
  detail: string
  errors?: { path: string; message: string }[]
}

/** A schema of TypeBox, or of any library with Standard Schema: zod, valibot, arktype. */
export type BodySchema = TSchema | StandardSchema

/** What the handler gets. */
export type BodyOf<S> = S extends StandardSchema
  ? NonNullable<S['~standard']['types']>['output']
  : S extends TSchema
    ? Static<S>
    : unknown
/** What a caller submits: it differs where the schema has defaults or changes values. */
export type InputOf<S> = S extends StandardSchema ? NonNullable<S['~standard']['types']>['input'] : BodyOf<S>

type LaneOf<S> = (body: BodyOf<S>, request: IntakeRequest) => LaneName

interface Common<S extends BodySchema, Result> {
  /** What a body must look like. Without it any JSON value is taken. */
  body?: S
  /** Who asks. Default: what the intake's `identity` says, else the authenticated user, else the client's address. */
  identity?: Identify
  gates?: readonly Gate<BodyOf<S>>[]
  /** A last check of the body, e.g. for rules that a schema cannot express. */
  check?: (body: BodyOf<S>, request: IntakeRequest) => Rejection | null | Promise<Rejection | null>
  /** 1 (first) to 10. Default 5. */
  priority?: number | ((body: BodyOf<S>) => number)
  /** Default 30 s. */
  timeoutMs?: number | ((body: BodyOf<S>) => number)
  /** Default 3. */
  maxRetries?: number | ((body: BodyOf<S>) => number)
  delayMs?: (body: BodyOf<S>) => number
  /**
   * What is still queued this long after its acceptance fails with the code `expired` and never runs: milliseconds, or a text
   * such as `30s`.
   */
  expiresAfter?: Duration
  retry?: BackoffOptions
  /** Called for every decision on a submission that reached the store, after it is durable: for counters. */
  onAnswer?: (answer: Answer, submission: { body: BodyOf<S>; identity: string }) => void
  /** The answer for a finished operation. Default: 201 and `{status, operationId, result}`. */
  respond?: (done: { operationId: string; result: Result }) => {
    status?: number
    headers?: Record<string, string>
    body: unknown
  }
}

export interface RunOptions<S extends BodySchema, Result> extends Common<S, Result> {
  /**
   * A function names the FIFO: its operations run one after the other. An object names a key: at most `concurrency`
   * operations of a key run at a time, over all instances; they start in order. Default: parallel, up to the slots.
   */
  lane?: LaneOf<S> | { key: (body: BodyOf<S>, request: IntakeRequest) => KeyName; concurrency: number }
  /**
   * What becomes of a request that finds no free slot, once it has waited a moment for one: it is queued (default, after
   * 250 ms at most), or refused with 503 (after 25 ms, or half a usual run). `{ wait, then }` sets the longest wait.
   */
  whenBusy?: WhenBusy
  /** A running one can be cancelled: the handler obeys `ctx.signal`. Default false. */
  abortable?: boolean
  /**
   * Dedicated slots, separate from the intake's `concurrency`, for long operations: they neither take the slots of others
   * nor wait for them. Definitions with the same name share them; `concurrency` is the number that run at once in this
   * process.
   */
  slots?: { name: string; concurrency: number }
  /** `text`: the original body as JSON text, which keeps numbers that JSON.parse cannot hold. */
  run: (body: BodyOf<S>, context: RunContext, text: string) => Promise<Result> | Result
  /** While false, none is claimed from the queue here: the attempt would be wasted. */
  ready?: () => boolean
  /**
   * Which operations of the type this process may run, in a form that `LeaveOperation` of another process understands; fixed
   * once the intake has started. Default: every process that has the definition may run all.
   */
  announces?: () => string
  pendingMax?: never
  apply?: never
}

/**
 * For effects that are rows in the store: set-based, called inside the accepting transaction, once per flush. A place from a
 * `capacity` gate then belongs to the rows: call `intake.releaseCapacity` in the transaction that removes them.
 */
export interface ApplyOptions<S extends BodySchema, Result> extends Common<S, Result> {
  /** Names the FIFO: its operations are applied in order. Default: parallel. */
  lane?: LaneOf<S>
  whenBusy?: 'queue' | 'refuse'
  abortable?: never
  slots?: never
  /** Limit on queued operations, of all types, for one of this type to be queued. Default: the intake's limit. */
  pendingMax?: number
  ready?: never
  announces?: never
  apply: ((tx: Tx, items: readonly ApplyItem<BodyOf<S>>[]) => Promise<readonly Result[]>) | SqlEffect<BodyOf<S>, Result>
  run?: never
}

/**
 * An effect that is a function in the database, called in the accepting statement itself: a flush is one round trip. `apply`
 * as a JavaScript function takes four, and holds the locks of the gates' rows for that long.
 *
 *   name(verdicts text[], seqs bigint[], …values) RETURNS json[]
 *
 * The arrays have one element per item. The function writes the items whose verdict is `apply` and returns their results. For
 * items whose verdict is `rate_limited` it may keep a record and return a value, from which `limited` makes members of their
 * problem documents. It ignores all others: their elements are NULL.
 */
export interface SqlEffect<Body, Result> {
  /** With its schema. */
  function: string
  /** Always the same number of arguments: texts, numbers, booleans, nulls, and arrays of them; mostly one element per item. */
  values: (
    items: readonly EffectItem<Body>[],
    /** They were queued, and a worker applies them: nobody waits for the answer, so an item that cannot be applied must fail. */
    queued: boolean,
  ) => readonly (EffectValue | readonly EffectValue[])[]
  limited?: (value: unknown, item: LimitedItem<Body>) => Readonly<Record<string, unknown>>
  /** Awaited before queued items are applied: the data that `values` needs may have changed since they were accepted. */
  prepare?: (items: readonly EffectItem<Body>[]) => Promise<void>
  /** Phantom: exists only for the types. */
  readonly _result?: Result
}

type EffectValue = string | number | boolean | null

/** Before the decision, so it has no sequence number in its lane yet. */
export type EffectItem<Body> = Omit<ApplyItem<Body>, 'seq'>

export type DefineOptions<S extends BodySchema, Result> = RunOptions<S, Result> | ApplyOptions<S, Result>

/** An operation type, from `define`. `Body` and `Result` are inferred from the schema and the handler. */
export interface Definition<Body = unknown, Result = unknown> {
  readonly type: string
  /** Phantom: exists only for the types. */
  readonly _types?: { body: Body; result: Result }
}

export const defaults = {
  timeoutMs: 30_000,
  maxRetries: 3,
  priority: 5,
} as const
