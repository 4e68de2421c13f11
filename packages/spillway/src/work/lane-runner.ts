/**
 * Runs the operations of one lane that this process holds, one after the other, and records their outcomes. These are
 * settled later (claim-loop.ts), except for handlers that used `ctx.tx` and for `apply`: those settle in their own
 * transaction, together with all that ran before them in the lane.
 */

import { isNobodysFault } from '../accept/conflict-retry.js'
import { Flush } from '../accept/flush.js'
import type { BackoffOptions } from '../core/backoff.js'
import { FailOperation, LeaveOperation, OperationAborted } from '../core/outcome.js'
import type { ApplyItem } from '../intake/define.js'
import type { AttemptOutcome } from '../metrics/metrics.js'
import type { Claimed, Failure, Leaving, OpenTx, Settlement, Store, Tx } from '../store/port.js'
import { withDeadline } from '../time/with-deadline.js'
import { Attempt, failureOf, leave, type Outcome, outcomeOf } from './attempt.js'
import type { ProgressWriter } from './progress.js'

export interface Handler {
  backoff: BackoffOptions
  run?: (body: unknown, attempt: Attempt, text: string) => unknown
  apply?: (tx: Tx, items: readonly ApplyItem<unknown>[]) => Promise<readonly unknown[]>
  /** While false, none of the type is claimed. Default: always. */
  ready?: () => boolean
  /** See left-to-others.ts. */
  announces?: () => string
  /** Its operations take turns: when one ends, another may be ready at once. */
  takesTurns?: boolean
  /** Up to this many operations, of any lanes, are applied in one transaction. Default: those of one lane. */
  together?: number
}

/** Operations of one lane that are applied together. */
interface Group {
  held: HeldLane
  ops: Claimed[]
}

/** The ended operations of a lane, settled by one commit with those of other lanes. */
interface Part {
  held: HeldLane
  ended: readonly { op: Claimed; outcome: Outcome }[]
}

export interface LaneRunOptions {
  store: Store
  handlers: ReadonlyMap<string, Handler>
  worker(): string
  log: { warn(fields: object, message: string): void; error(fields: object, message: string): void }
  onAttempt(type: string, outcome: AttemptOutcome, runMs: number): void
  onWait(waitedMs: number): void
  /** An operation left the queue (completed, failed or cancelled), or will be retried. Called after the commit. */
  onSettled(op: Claimed, outcome: Outcome): void
  /** What handlers say with `ctx.progress`. */
  progress: Pick<ProgressWriter, 'say' | 'ended'>
  /** The outcome of an operation that this process may not run. */
  elsewhere(op: Claimed, left: LeaveOperation): Promise<Outcome>
  now?: () => number
}

/** A lane that this process holds, with the operations it was handed. */
export interface HeldLane {
  lane: string
  fence: number
  /** Everything up to here has left the lane, durably. */
  from: number
  ops: Claimed[]
  leaving: Leaving[]
  /** Of the operations that failed, since the last settlement. */
  failures: Failure[]
  outcomes: { op: Claimed; outcome: Outcome }[]
  retry: Settlement['retry']
  leaveTo: string | null
  attempt: Attempt | null
  /** The start of the current operation is recorded in the store. */
  marked: boolean
  startedAt: number
  /** When it was asked for: not later than the store's time of the claim. */
  claimedAt: number
  lost: boolean
  /** The last settlement released the lane. */
  released: boolean
  /** For a request that waits: true if it still does. From then on it waits for the settlement, and is answered with it. */
  claimCaller: (() => boolean) | null
  /** For a request that waits: settled, or lost. */
  done: ((settled: boolean) => void) | null
}

/**
 * How long a lane may run before its finished operations are settled. It limits how much a crash repeats, how late a pause
 * takes effect, and how stale a ticket is.
 */
export const sliceMs = 5
/** How long a lane with an operation of an unknown type is left to others. */
const unknownTypeMs = 5_000
const confirmPauseMs = 250
/**
 * An `apply` holds the locks of its lane and lease. If its process vanishes, they stay until the database ends its
 * transaction, this long after its last statement: with the default lease still within 30 s.
 */
const applyMsMax = 8_000

export class LaneRunner {
  readonly #o: LaneRunOptions
  readonly #now: () => number
  readonly #byId = new Map<string, HeldLane>()
  readonly #counts = new Map<string, number>()
  readonly #applies = new Map<Handler, Flush<Group, boolean>>()
  #runMs: number
  #hasRun = false

  /** `runMs`: the assumed run time before the first run. */
  constructor(options: LaneRunOptions, runMs: number) {
    this.#o = options
    this.#now = options.now ?? (() => performance.now())
    this.#runMs = runMs
  }

  /** Moving average of an operation's run time. */
  get runMs(): number {
    return this.#runMs
  }

  /** Whether something has run, so that `runMs` is more than an assumption. */
  get hasRun(): boolean {
    return this.#hasRun
  }

  /** Operations that run here now, per type. */
  runningByType(): Record<string, number> {
    return Object.fromEntries(this.#counts)
  }

  /** Asks a running operation to stop. False: it does not run here. */
  cancel(id: string): boolean {
    const attempt = this.#byId.get(id)?.attempt
    if (attempt?.id !== id) return false
    attempt.abort('cancelled')
    return true
  }

  /** `mayGoOn`: whether another one may start after the first. */
  async run(held: HeldLane, mayGoOn: () => boolean): Promise<void> {
    const { ops } = held
    for (let index = 0; index < ops.length; index++) {
      const op = ops[index]
      if (op === undefined || !op.due || held.lost) break
      // The first always runs, so that a claimed lane makes progress.
      if (index > 0 && (!mayGoOn() || this.#now() - held.startedAt > sliceMs)) break
      if (this.#isExpired(held, op)) {
        this.#expire(held, op)
        continue
      }
      const handler = this.#o.handlers.get(op.type)
      if (handler === undefined) {
        this.#o.log.warn({ type: op.type, operation: op.id }, 'no handler for this type here; left to other processes')
        held.retry = { delayMs: unknownTypeMs, error: null }
        break
      }
      if (op.careful && handler.together === undefined && !(await this.#recordStart(held, op))) break
      if (handler.apply !== undefined) {
        const group = consecutive(ops, index, (next) => this.#isExpired(held, next))
        if (!(await this.#applyGroup(held, handler, group))) break
        index += group.length - 1
        continue
      }
      const startedAt = this.#now()
      const outcome = await this.#runOne(held, handler, op, startedAt)
      if (outcome !== 'settled' && !this.#record(held, handler, { op, outcome, startedAt })) break
    }
    held.attempt = null
  }

  /** By the store's clock, or a little earlier. */
  #isExpired(held: HeldLane, { expiresInMs }: Claimed): boolean {
    return typeof expiresInMs === 'number' && this.#now() >= held.claimedAt + expiresInMs
  }

  #expire(held: HeldLane, op: Claimed): void {
    const outcome: Outcome = { kind: 'expired' }
    const now = this.#now()
    this.#o.log.warn({ type: op.type, operation: op.id }, 'operation expired in the queue; it is not run')
    held.outcomes.push({ op, outcome })
    held.leaving.push(leave(op, outcome, now, now))
  }

  /** A process died while running this lane: the start is made durable before the handler runs. */
  async #recordStart(held: HeldLane, op: Claimed): Promise<boolean> {
    held.marked = true
    try {
      await this.#o.store.mark(this.#o.worker(), [{ fence: held.fence, lane: held.lane, seq: op.seq, startedMsAgo: 0 }])
      return true
    } catch (fault) {
      this.#o.log.warn(
        { err: fault, operation: op.id },
        'could not record the start of a careful operation; returning it to its lane',
      )
      return false
    }
  }

  /** 'settled': the handler's own transaction committed effect and completion together. */
  async #runOne(held: HeldLane, handler: Handler, op: Claimed, startedAt: number): Promise<Outcome | 'settled'> {
    const attempt = new Attempt(this.#o.store, op, startedAt, this.#o.progress)
    held.attempt = attempt
    this.#byId.set(op.id, held)
    this.#count(op.type, 1)
    if (op.attempts === 0) this.#o.onWait(op.waitedMs)
    let outcome: Outcome
    const text = op.payload
    // A slice of the whole claim's text, which should not stay in memory while this operation runs.
    op.payload = ''
    try {
      const returned = handler.run?.(JSON.parse(text), attempt, text)
      const result = isPromise(returned) ? await orAborted(returned, attempt) : returned
      outcome = { kind: 'completed', result }
      const tx = await attempt.openTx
      if (tx !== undefined) {
        if (await this.#commit(tx, [{ held, ended: [{ op, outcome }] }], startedAt)) {
          this.#endAttempt(held, op, outcome, startedAt)
          return 'settled'
        }
        held.lost = true
        outcome = { kind: 'released' }
      }
    } catch (fault) {
      await attempt.rollback()
      outcome =
        fault instanceof LeaveOperation && handler.announces !== undefined
          ? await this.#o.elsewhere(op, fault)
          : outcomeOf(fault, op, handler.backoff)
      const isFinal = fault instanceof FailOperation && !fault.deadLetter && outcome.kind === 'failed'
      if (isFinal && held.claimCaller?.() === true) outcome = { ...outcome, answered: true } as Outcome
      this.#failed(held, op, outcome, fault)
    }
    this.#endAttempt(held, op, outcome, startedAt)
    return outcome
  }

  /** Logs a failed attempt, and keeps its error with the operation. */
  #failed(held: HeldLane, op: Claimed, outcome: Outcome, fault: unknown): void {
    const failure = failureOf(op, outcome, fault)
    if (failure !== undefined) held.failures.push(failure)
    const { id, type, attempts, maxAttempts } = op
    const fields = { err: fault, type, operation: id, attempt: attempts + 1, maxAttempts }
    if (outcome.kind === 'retry') this.#o.log.warn({ ...fields, retryInMs: outcome.delayMs }, 'attempt failed')
    if (outcome.kind !== 'failed') return
    if (outcome.answered === true) this.#o.log.warn(fields, 'operation failed for good; its caller is answered with it')
    else this.#o.log.error(fields, 'operation failed for good; it is a dead letter now')
  }

  #endAttempt(held: HeldLane, op: Claimed, outcome: Outcome, startedAt: number): void {
    held.attempt?.endProgress()
    held.attempt = null
    this.#byId.delete(op.id)
    this.#count(op.type, -1)
    const counted = countedAs(outcome, held.lost)
    const runMs = this.#now() - startedAt
    this.#runMs += (runMs - this.#runMs) * 0.05
    this.#hasRun = true
    if (counted !== null) this.#o.onAttempt(op.type, counted, runMs)
  }

  /**
   * Settles the operations that ran in these lanes so far inside a handler's transaction, and commits. False: a lease is
   * lost.
   */
  async #commit(tx: OpenTx, parts: readonly Part[], startedAt: number): Promise<boolean> {
    const now = this.#now()
    const settlements = parts.map(({ held, ended }): Settlement => {
      const isApplied = ended.some(({ op }) => this.#o.handlers.get(op.type)?.apply !== undefined)
      return {
        fence: held.fence,
        lane: held.lane,
        from: held.from,
        // Earlier operations of this lane must leave first: the head moves in order.
        leaving: [...held.leaving, ...ended.map(({ op, outcome }) => leave(op, outcome, startedAt, now, isApplied))],
        failures: held.failures,
        retry: null,
        // The last operation handed out also releases the lane, in the same transaction.
        release: ended[ended.length - 1]?.op === held.ops[held.ops.length - 1],
      }
    })
    settlements.sort((a, b) => (a.lane < b.lane ? -1 : 1))
    if (!(await this.#o.store.settleWithin(tx, this.#o.worker(), ...settlements))) {
      await tx.rollback()
      return false
    }
    try {
      await tx.commit()
    } catch (fault) {
      // Was it committed? Assuming no would run it twice, assuming yes would lose it. One lane answers for all.
      const [first] = parts
      const op = first?.ended[first.ended.length - 1]?.op
      if (first === undefined || op === undefined) throw fault
      this.#o.log.warn({ err: fault, operation: op.id }, 'commit not confirmed; querying its outcome')
      const state = await this.#confirm(first.held, op)
      if (state === 'lost') return false
      if (state === 'pending') throw fault
    }
    for (const part of parts) this.#settled(part)
    return true
  }

  #settled({ held, ended }: Part): void {
    const last = ended[ended.length - 1]
    if (last === undefined) return
    for (const earlier of held.outcomes) this.#o.onSettled(earlier.op, earlier.outcome)
    held.released = last.op === held.ops[held.ops.length - 1]
    held.from = last.op.seq
    held.leaving = []
    held.failures = []
    held.outcomes = held.done === null ? [] : [last]
    // The claim loop reports an operation that a request waits for.
    if (held.done === null) for (const { op, outcome } of ended) this.#o.onSettled(op, outcome)
  }

  async #confirm(held: HeldLane, op: Claimed): Promise<'left' | 'pending' | 'lost'> {
    while (!held.lost) {
      try {
        return await this.#o.store.confirm(this.#o.worker(), held.fence, held.lane, op.seq)
      } catch (fault) {
        this.#o.log.warn({ err: fault, operation: op.id }, 'cannot query the database, retrying')
        await new Promise((resolve) => setTimeout(resolve, confirmPauseMs))
      }
    }
    return 'lost'
  }

  async #applyGroup(held: HeldLane, handler: Handler, ops: Claimed[]): Promise<boolean> {
    for (const op of ops) if (op.attempts === 0) this.#o.onWait(op.waitedMs)
    try {
      const group = { held, ops }
      const [applied = false] =
        handler.together === undefined
          ? await this.#applyAll(handler, [group])
          : [await this.#appliesOf(handler, handler.together).submit(group)]
      if (!applied) held.lost = true
      return applied
    } catch (fault) {
      return this.#applyFailed(held, handler, ops, fault)
    }
  }

  /** Lanes whose next operations are of one type are applied together, in a flush. */
  #appliesOf(handler: Handler, itemsMax: number): Flush<Group, boolean> {
    const known = this.#applies.get(handler)
    if (known !== undefined) return known
    const flush = new Flush<Group, boolean>({
      write: (groups) => this.#applyAll(handler, groups),
      // In halves, until the faulty group is alone; not for faults that no group caused.
      isPoison: (fault) => !isNobodysFault(fault),
      sizeOf: () => 1,
      countOf: ({ ops }) => ops.length,
      itemsMax,
      bytesMax: Number.MAX_SAFE_INTEGER,
      waitingMax: Number.MAX_SAFE_INTEGER,
      timeoutMs: Number.MAX_SAFE_INTEGER,
      timeoutFault: () => new OperationAborted('timeout'),
    })
    this.#applies.set(handler, flush)
    return flush
  }

  async #applyAll(handler: Handler, groups: readonly Group[]): Promise<boolean[]> {
    const { apply } = handler
    if (apply === undefined) throw new Error('there is nothing to apply')
    const startedAt = this.#now()
    const { store } = this.#o
    const longestMs = Math.min(applyMsMax, ...groups.flatMap(({ ops }) => ops.map((op) => op.timeoutMs)))
    let tx: OpenTx | undefined
    try {
      tx = await store.begin(longestMs)
      const holds = await store.holdWithin(
        tx,
        this.#o.worker(),
        groups.map(({ held: { fence, lane }, ops }) => ({
          fence,
          lane,
          keys: ops.flatMap((op) => op.idempotencyKey ?? []),
        })),
      )
      const mine = groups.filter((_, i) => holds[i] === true)
      if (mine.length === 0) {
        await tx.rollback()
        return groups.map(() => false)
      }
      const ops = mine.flatMap((group) => group.ops)
      const results = await orLate(apply(tx, ops.map(toApplyItem)), longestMs)
      if (results.length !== ops.length) {
        throw new Error(`apply answered ${results.length} results for ${ops.length} items`)
      }
      let at = 0
      const parts = mine.map(({ held, ops: own }): Part => {
        const ended = own.map((op, i) => ({ op, outcome: { kind: 'completed', result: results[at + i] } as Outcome }))
        at += own.length
        return { held, ended }
      })
      if (!(await this.#commit(tx, parts, startedAt))) return groups.map(() => false)
      for (const op of ops) this.#o.onAttempt(op.type, 'completed', this.#now() - startedAt)
      return groups.map((_, i) => holds[i] === true)
    } catch (fault) {
      await tx?.rollback()
      throw fault
    }
  }

  /** One by one, so that a poisoned item fails alone. */
  async #applyFailed(held: HeldLane, handler: Handler, group: Claimed[], fault: unknown): Promise<boolean> {
    const [first] = group
    if (first === undefined) return true
    if (group.length > 1) {
      for (const op of group) if (!(await this.#applyGroup(held, handler, [op]))) return false
      return true
    }
    const outcome = outcomeOf(fault, first, handler.backoff)
    this.#failed(held, first, outcome, fault)
    this.#o.onAttempt(first.type, outcome.kind === 'retry' ? 'retried' : 'failed', 0)
    return this.#record(held, handler, { op: first, outcome, startedAt: this.#now() })
  }

  /** Records the outcome of an operation; false when the lane has to wait here. */
  #record(held: HeldLane, handler: Handler, ended: { op: Claimed; outcome: Outcome; startedAt: number }): boolean {
    const { op, outcome, startedAt } = ended
    if (outcome.kind === 'released') {
      if (outcome.leave === undefined) return false
      held.retry = { delayMs: outcome.leave.delayMs, error: null }
      held.leaveTo = outcome.leave.to
      return false
    }
    if (outcome.kind === 'retry') {
      held.outcomes.push({ op, outcome })
      held.retry = { delayMs: outcome.delayMs, error: outcome.error }
      return false
    }
    let leaving: Leaving
    try {
      leaving = leave(op, outcome, startedAt, this.#now())
    } catch (fault) {
      // A result that JSON cannot express: a BigInt, a cycle.
      const instead = outcomeOf(fault, op, handler.backoff)
      this.#failed(held, op, instead, fault)
      return this.#record(held, handler, { op, outcome: instead, startedAt })
    }
    held.outcomes.push({ op, outcome })
    held.leaving.push(leaving)
    return true
  }

  #count(type: string, by: number): void {
    this.#counts.set(type, (this.#counts.get(type) ?? 0) + by)
  }
}

const toApplyItem = (op: Claimed): ApplyItem<unknown> => ({
  id: op.id,
  identity: op.identity,
  body: JSON.parse(op.payload),
  text: op.payload,
  queue: op.queue,
  partition: op.partition,
  seq: op.seq,
  traceparent: op.traceparent,
})

/** How an attempt is counted; null: it is not. */
function countedAs({ kind }: Outcome, lost: boolean): AttemptOutcome | null {
  if (kind === 'retry') return 'retried'
  if (kind === 'released') return lost ? 'lease_lost' : null
  return kind === 'expired' ? null : kind
}

/** The operations of the same type from `index` on that are due, and may still start. */
function consecutive(ops: readonly Claimed[], index: number, isOver: (op: Claimed) => boolean): Claimed[] {
  const type = ops[index]?.type
  let end = index
  for (let next = ops[end]; next?.type === type && next?.due === true && !isOver(next); next = ops[end]) end++
  return ops.slice(index, end)
}

const isPromise = (value: unknown): value is Promise<unknown> =>
  typeof value === 'object' && value !== null && typeof (value as { then?: unknown }).then === 'function'

/** The handler's end, or the reason why nobody waits for it any more. */
function orAborted(returned: Promise<unknown>, attempt: Attempt): Promise<unknown> {
  return new Promise((resolve, reject) => {
    returned.then(resolve, reject)
    attempt.whenAborted((reason) => reject(reason))
  })
}

/** An `apply` that does not return must not hold its lane forever; its transaction is ended. */
function orLate<T>(applied: Promise<T>, ms: number): Promise<T> {
  return withDeadline(applied, ms, () => Promise.reject(new OperationAborted('timeout')))
}
