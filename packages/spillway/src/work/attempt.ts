/**
 * One attempt at one operation.
 *
 *   started ──handler returns──► completed          (with ctx.tx: settled in its transaction, see lane-runner.ts)
 *      │──throws FailOperation, or no attempts left──► failed
 *      │──throws anything else──► retry
 *      └──timeout │ cancelled │ lease lost │ stopping──► its signal fires; the handler's end is no longer waited for
 */
import { type BackoffOptions, backoffMs } from '../core/backoff.js'
import { faultText } from '../core/fault-text.js'
import { expired, FailOperation, OperationAborted, RetryOperation } from '../core/outcome.js'
import type { RunContext } from '../intake/define.js'
import { isTracing, parseTraceparent, withSpan } from '../metrics/trace.js'
import type { Claimed, Failure, Leaving, OpenTx, Store, StoredAnswer, Tx } from '../store/port.js'
import { withDeadline } from '../time/with-deadline.js'
import type { ProgressWriter } from './progress.js'

export type Outcome =
  | { kind: 'completed'; result: unknown }
  | {
      kind: 'failed'
      error: string
      result?: unknown
      /** What the handler said with FailOperation. */
      said?: { code: string; status: number }
      /** A caller waits, and is answered with it: it leaves no dead letter. */
      answered?: true
    }
  | { kind: 'retry'; error: string; delayMs: number }
  | { kind: 'cancelled' }
  /** Its time was over before it could start. */
  | { kind: 'expired' }
  /** Not completed and not counted: the lane goes back unchanged, or to processes that may run it (see left-to-others.ts). */
  | { kind: 'released'; leave?: { to: string | null; delayMs: number } }

/** How long a lane waits for the rollback of a handler's transaction. */
const rollbackWaitMs = 1_000

/** A handler's view of one attempt; signal and transaction are created on first use. */
export class Attempt implements RunContext {
  readonly op: Claimed
  readonly startedAt: number
  readonly deadline: number
  readonly #store: Store
  #controller: AbortController | undefined
  #tx: Promise<OpenTx> | undefined
  #aborted: OperationAborted | undefined
  readonly #progress: Pick<ProgressWriter, 'say' | 'ended'> | undefined
  #hasProgress = false
  #hasEnded = false
  #onAbort: ((reason: OperationAborted) => void) | undefined

  constructor(store: Store, op: Claimed, now: number, progress?: Pick<ProgressWriter, 'say' | 'ended'>) {
    this.#store = store
    this.#progress = progress
    this.op = op
    this.startedAt = now
    this.deadline = now + op.timeoutMs
  }

  get id(): string {
    return this.op.id
  }
  get type(): string {
    return this.op.type
  }
  get identity(): string {
    return this.op.identity
  }
  get queue(): string {
    return this.op.queue
  }
  get partition(): string {
    return this.op.partition
  }
  get attempt(): number {
    return this.op.attempts + 1
  }
  get maxAttempts(): number {
    return this.op.maxAttempts
  }
  get traceparent(): string {
    return this.op.traceparent
  }

  get signal(): AbortSignal {
    // An AbortController costs more than a short handler; most never look.
    if (this.#controller === undefined) {
      this.#controller = new AbortController()
      if (this.#aborted !== undefined) this.#controller.abort(this.#aborted)
    }
    return this.#controller.signal
  }

  progress(value: number, note?: string): void {
    // An abandoned handler has nothing to say any more.
    if (this.#aborted !== undefined || this.#hasEnded) return
    this.#progress?.say(this.op.id, this.attempt, value, note)
    this.#hasProgress = true
  }

  endProgress(): void {
    this.#hasEnded = true
    if (this.#hasProgress) this.#progress?.ended(this.op.id)
  }

  get tx(): Tx {
    return { query: async (text, values) => (await this.#begin()).query(text, values) }
  }

  /** The handler's open transaction, if any. */
  get openTx(): Promise<OpenTx> | undefined {
    return this.#tx
  }

  get abortedBy(): OperationAborted | undefined {
    return this.#aborted
  }

  /** Ends the attempt from outside: the handler's signal fires, and nobody waits for the handler any longer. */
  abort(code: OperationAborted['code']): void {
    if (this.#aborted !== undefined) return
    this.#aborted = new OperationAborted(code)
    this.#controller?.abort(this.#aborted)
    this.#onAbort?.(this.#aborted)
  }

  /** Called with the reason when the attempt is aborted. */
  whenAborted(listener: (reason: OperationAborted) => void): void {
    this.#onAbort = listener
    if (this.#aborted !== undefined) listener(this.#aborted)
  }

  #begin(): Promise<OpenTx> {
    // An abandoned handler must not write any more.
    if (this.#aborted !== undefined) return Promise.reject(this.#aborted)
    this.#tx ??= this.#store.begin(this.op.timeoutMs)
    return this.#tx
  }

  /**
   * Rolls back a handler's unfinished writes before the lane continues. With a time limit: a connection that does not open
   * or answer must not hold the lane; the store ends the transaction by itself.
   */
  async rollback(): Promise<void> {
    if (this.#tx === undefined) return
    // A transaction that never began needs no rollback; one that cannot be reached ends with its connection.
    const done = this.#tx.then((tx) => tx.rollback()).catch(() => undefined)
    await withDeadline(done, rollbackWaitMs, () => undefined)
  }
}

/** Turns a handler's error into the next step. */
export function outcomeOf(
  fault: unknown,
  op: Claimed,
  backoff: BackoffOptions,
  random: () => number = Math.random,
): Outcome {
  if (fault instanceof OperationAborted) {
    if (fault.code === 'cancelled') return { kind: 'cancelled' }
    if (fault.code !== 'timeout') return { kind: 'released' }
  }
  const error = messageOf(fault)
  const result = fault instanceof FailOperation || fault instanceof RetryOperation ? fault.result : undefined
  const attempt = op.attempts + 1
  // Another attempt would do its work again, and return the same.
  const isFinal = fault instanceof FailOperation || fault instanceof ResultFault
  if (isFinal || attempt >= op.maxAttempts) {
    const said = fault instanceof FailOperation ? { said: { code: fault.code, status: fault.status } } : {}
    return { kind: 'failed', error, ...(result !== undefined && { result }), ...said }
  }
  const asked = fault instanceof RetryOperation ? fault.afterMs : undefined
  // The store would refuse NaN, e.g. from a Retry-After that was no number, and the lane would hang forever.
  const delayMs =
    asked === undefined || Number.isNaN(asked) ? backoffMs(attempt, backoff, random) : Math.min(asked, retryAfterMsMax)
  return { kind: 'retry', error, delayMs: Math.max(0, Math.round(delayMs)) }
}

/** A service may ask a handler to come back next year; a lane waits at most a day. */
const retryAfterMsMax = 86_400_000
const errorCharactersMax = 2_000
const stackCharactersMax = 8_000

function messageOf(fault: unknown): string {
  return storable(textOf(fault), errorCharactersMax)
}

/** Anything may be thrown, also what cannot be shown. An error of another realm is no instance of Error here. */
function textOf(fault: unknown): string {
  try {
    const { message, name } = fault as { message?: unknown; name?: unknown }
    for (const text of [message, name]) if (typeof text === 'string' && text !== '') return text
  } catch {
    // null, undefined, or a getter that throws.
  }
  return faultText(fault)
}

/** PostgreSQL's text has no NUL. */
const storable = (text: string, charactersMax: number): string =>
  text.replaceAll('\0', '\uFFFD').toWellFormed().slice(0, charactersMax)

/** Of a failed attempt, for the store. Undefined: it did not fail. */
export function failureOf(op: Claimed, outcome: Outcome, fault: unknown): Failure | undefined {
  if (outcome.kind !== 'failed' && outcome.kind !== 'retry') return undefined
  return {
    id: op.id,
    attempt: op.attempts + 1,
    said: (outcome.kind === 'failed' && outcome.said) || null,
    keepLetter: fault instanceof FailOperation && fault.deadLetter,
    stack: storable(faultText(fault), stackCharactersMax),
  }
}

declare global {
  interface String {
    toWellFormed(): string
  }
}

/** In a span of the request's trace, if the process has an OpenTelemetry SDK; else the handler unchanged. */
export function traced(
  type: string,
  run: (body: unknown, attempt: Attempt, text: string) => unknown,
): (body: unknown, attempt: Attempt, text: string) => unknown {
  return (body, attempt, text) => {
    const parent = isTracing() ? parseTraceparent(attempt.traceparent) : null
    if (parent === null) return run(body, attempt, text)
    const attributes = { 'spillway.operation': attempt.id, 'spillway.attempt': attempt.attempt }
    return withSpan(`run ${type}`, { parent, attributes }, async () => run(body, attempt, text))
  }
}

/** An operation that leaves its lane, in the store's form. Throws for a result that JSON cannot express. `keepsPlace`: the applied rows exist, so they keep their capacity. */
export function leave(op: Claimed, outcome: Outcome, startedAt: number, now: number, keepsPlace = false): Leaving {
  if (outcome.kind === 'retry' || outcome.kind === 'released') {
    throw new Error(`an operation that comes again does not leave its lane (${outcome.kind})`)
  }
  return {
    seq: op.seq,
    type: op.type,
    status: outcome.kind === 'failed' && outcome.answered === true ? 'answered' : outcome.kind,
    result: 'result' in outcome ? resultText(op.type, outcome.result) : null,
    error: errorOf(outcome),
    startedMsAgo: Math.max(0, Math.round(now - startedAt)),
    counted: outcome.kind !== 'expired',
    gate: keepsPlace && outcome.kind === 'completed' ? null : op.gate,
    idempotencyKey: op.idempotencyKey,
    answer: op.idempotencyKey === null ? null : answerOf(outcome),
  }
}

function errorOf(outcome: Outcome): string | null {
  if (outcome.kind === 'failed') return outcome.error
  if (outcome.kind === 'expired') return expired.error
  return outcome.kind === 'cancelled' ? 'cancelled while running' : null
}

function answerOf(outcome: Outcome): StoredAnswer {
  switch (outcome.kind) {
    case 'completed':
      return { v: 'done', result: outcome.result ?? null }
    case 'failed':
      return {
        v: 'failed',
        error: outcome.error,
        ...(outcome.result !== undefined && { result: outcome.result }),
        ...outcome.said,
      }
    case 'expired':
      return { v: 'failed', error: expired.error, ...expired.said }
    default:
      return { v: 'cancelled' }
  }
}

/** A handler returned what cannot be kept with the operation. */
class ResultFault extends TypeError {
  override readonly name = 'ResultFault'
}

/** About as much as one answer may have. */
const resultCharactersMax = 4 * 1_048_576

/** A result as JSON; null for none. */
export function resultText(type: string, result: unknown): string | null {
  if (result === undefined || result === null) return null
  const wrong = (why: string, cause?: unknown): ResultFault =>
    new ResultFault(`the result of ${type} ${why}. It ran, and is not tried again`, { cause })
  let text: string | undefined
  try {
    text = JSON.stringify(result)
  } catch (fault) {
    const [reason] = textOf(fault).split('\n')
    throw wrong(`cannot be stored as JSON: ${reason}. Return JSON values only`, fault)
  }
  if (text === undefined) throw wrong(`is a ${typeof result}, which JSON does not have. Return JSON values only`)
  if (text.length <= resultCharactersMax) return text
  const limit = `${text.length} characters of JSON; ${resultCharactersMax} are allowed`
  throw wrong(`has ${limit}. Store it elsewhere, and return where it is`)
}
