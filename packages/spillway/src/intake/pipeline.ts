/**
 * The way of a request: early gates → permits → accept → answer. Every exit is an `Answer` or a `Refusal`. See
 * ARCHITECTURE.md for all of them.
 */
import { buildItem, exactChecks } from '../accept/accept-item.js'
import type { Accepting, Effect } from '../accept/accepting.js'
import type { IntakeLog, IntakeSettings } from '../core/settings.js'
import type { GateRegistry } from '../fleet/gate-registry.js'
import type { Presence } from '../fleet/presence.js'
import type { GateRequest, Permit } from '../gates/gate.js'
import type { Metrics } from '../metrics/metrics.js'
import type { Door } from '../pressure/door.js'
import { Lateness } from '../pressure/lateness.js'
import type { Accepted, AcceptItem, Admitted, Store, Tx } from '../store/port.js'
import type { SlotGroups } from '../work/slot-groups.js'
import type { RoomEnd } from '../work/waiting-room.js'
import type { AdmissionAnswer, BoundAdmission } from './admission.js'
import type { Answer } from './answer.js'
import { type Prepared, refused } from './many.js'
import { allSlotsTaken, queueFull, type Refusal, rateStatus, refusals, refusedBy, storeAwayRetryMs } from './refusal.js'
import type { Bound, BoundGates, PendingItem, Submission } from './submission.js'
import type { Answering } from './verdict-to-answer.js'
import { roomOf, thenOf } from './when-busy.js'

/** For an operation that must not be queued: the shares of the accept budget that it may wait at the door, and for its write. */
const doorShare = 0.1
const writeShare = 0.15

export interface PipelineOptions {
  store: Store
  settings: IntakeSettings
  log: IntakeLog
  metrics: Metrics
  /** In front of the HTTP server whose requests come here. */
  door: Door
  presence: Presence
  slotGroups: SlotGroups
  accepting: Accepting
  answering: Answering
  registry: GateRegistry
  /** An effect was committed with its acceptance. */
  onApplied(item: AcceptItem, result: unknown): void
}

export class Pipeline {
  readonly #o: PipelineOptions
  readonly #lateness = new Lateness()
  #inFlight = 0
  #draining = false

  constructor(options: PipelineOptions) {
    this.#o = options
  }

  /** Refuses new submissions from here on. */
  drain(): void {
    this.#draining = true
    this.#o.slotGroups.closeRooms()
  }

  get isDraining(): boolean {
    return this.#draining
  }

  get isReady(): boolean {
    return this.#o.presence.isReady && !this.#draining
  }

  /** Requests that are under way. */
  get inFlight(): number {
    return this.#inFlight
  }

  /** How much of this process's share of the store is in use, for the load decision. */
  get busy(): number {
    const pool = this.#o.store.poolState()
    return Math.max(
      (pool.busy + pool.waiting) / pool.max,
      this.#o.accepting.oldestMs / this.#o.settings.acceptWaitBudgetMs,
    )
  }

  /** The same for writes alone, for operations that do not need the pool. */
  get writesBusy(): number {
    return this.#o.accepting.oldestMs / this.#o.settings.acceptWaitBudgetMs
  }

  /** An operation that must not be queued is refused before it waits for long; a burst may pass. */
  #isLate({ flush }: BoundGates): boolean {
    const { acceptWaitBudgetMs } = this.#o.settings
    const isOver =
      this.#o.door.waitedMs > acceptWaitBudgetMs * doorShare || flush.expectedMs > acceptWaitBudgetMs * writeShare
    return this.#lateness.refuses(isOver, performance.now())
  }

  get queueDepth(): number {
    return this.#o.slotGroups.depth
  }

  /** The gates that need no body, cheapest first. Runs before the body is parsed. */
  refuseEarly(bound: BoundGates, request: GateRequest): Refusal | null {
    const refusal = this.#unready()
    if (refusal !== null) return this.refuse(bound.type, refusal)
    for (const gate of bound.gates) {
      if (gate.early === undefined) continue
      const started = performance.now()
      const early = gate.early(request)
      this.#o.metrics.admissionDuration.labels(gate.kind).observe((performance.now() - started) / 1_000)
      if (early !== null) return this.refuse(bound.type, early)
    }
    return null
  }

  /**
   * Refuses an operation that must not be queued when this process is too busy, before its body is read. Not for callers who
   * may prefer to be queued.
   */
  refuseBusy(bound: BoundGates, identity: string): Refusal | null {
    const { run, whenBusy } = bound.options
    if (whenBusy === undefined || thenOf(whenBusy) !== 'refuse') return null
    const { work } = bound.slots
    const mayWait = (): boolean => work.room.hasRoomFor(identity, roomOf(whenBusy, bound.slots).most)
    const hasSlot = run === undefined || work.canReserve || mayWait()
    if (hasSlot && !this.#isLate(bound) && this.busy <= this.#o.settings.busyQueueAbove) return null
    return this.refuse(bound.type, allSlotsTaken(work.runMs))
  }

  /** Permits that are held while the request runs. */
  async acquire(bound: BoundGates, request: GateRequest): Promise<Refusal | Permit[]> {
    const permits: Permit[] = []
    for (const gate of bound.gates) {
      if (gate.acquire === undefined) continue
      const outcome = await gate.acquire(request).catch((fault: unknown): Refusal => {
        this.#o.log.warn({ err: fault, type: bound.type, gate: gate.kind }, 'could not take a permit')
        return {
          code: 'store_unavailable',
          detail: 'The store did not answer. Nothing was accepted; try again later.',
          retryAfterMs: storeAwayRetryMs,
          gate: 'store',
        }
      })
      if ('release' in outcome) {
        permits.push(outcome)
        continue
      }
      for (const permit of permits) permit.release()
      return this.refuse(bound.type, outcome)
    }
    return permits
  }

  /** Counts a request while it is under way. */
  enter(): () => void {
    this.#inFlight++
    let inside = true
    return () => {
      if (inside) this.#inFlight--
      inside = false
    }
  }

  async submit(bound: Bound, given: Submission): Promise<Answer> {
    // Where nothing runs, everything that may be queued is.
    const isQueued = this.#o.settings.role === 'accept' && thenOf(bound.options.whenBusy) === 'queue'
    const submission = isQueued && bound.options.run !== undefined ? { ...given, respondAsync: true } : given
    const unready = this.#unready() ?? this.#full(bound)
    if (unready !== null) return { kind: 'refused', refusal: this.refuse(bound.type, unready) }
    const unregistered = await this.#unregistered()
    if (unregistered !== null) return { kind: 'refused', refusal: this.refuse(bound.type, unregistered) }
    const { work, load } = bound.slots
    const runs = bound.options.run !== undefined
    const later = submission.respondAsync === true
    const calm = this.busy <= this.#o.settings.busyQueueAbove
    const end = runs && calm ? await this.#slotFor(bound, submission) : 'late'
    const reserved = end === 'slot'
    const gone = reserved ? null : end === 'gone' ? refusals.callerLeft : this.#unready()
    if (gone !== null) return { kind: 'refused', refusal: this.refuse(bound.type, gone) }
    const busy = runs ? !later && !reserved : !calm
    if (busy && thenOf(bound.options.whenBusy) === 'refuse') {
      return { kind: 'refused', refusal: this.refuse(bound.type, allSlotsTaken(work.runMs)) }
    }
    let held = reserved
    try {
      const now = runs ? reserved : !busy && !later
      const made = buildItem(bound, submission, { busy, now, paceMs: load.paceMs(bound.type) })
      if ('code' in made) return { kind: 'refused', refusal: this.refuse(bound.type, made) }
      const { item, tiers } = made
      const pending: PendingItem = { item, body: submission.body, tiers }
      let accepted: Accepted
      try {
        const asked = performance.now()
        const [first] = await bound.flush.submit([pending])
        accepted = first ?? noVerdict()
        if (reserved) work.acceptedIn(performance.now() - asked)
      } catch (fault) {
        return { kind: 'refused', refusal: this.#o.answering.storeFault(bound.type, fault, item) }
      }
      // From here on the run owns the slot; an operation that does not run now must not keep one while its caller waits.
      if (held && accepted.verdict !== 'execute') work.unreserve()
      held = false
      return await this.#answered(bound, { submission, pending }, accepted)
    } finally {
      if (held) work.unreserve()
    }
  }

  /** `slot` if it may run here and now. Most runs are short: if all slots are taken, one may be free in a moment. */
  async #slotFor({ type, options, slots }: Bound, submission: Submission): Promise<RoomEnd> {
    const { work } = slots
    const { role } = this.#o.settings
    const later = submission.respondAsync === true
    // A caller that asks for a ticket gets a run at once too, if slots are free: that saves the way through the queue.
    const isWrongTime = later && (submission.waitMs !== undefined || role === 'direct')
    if (role === 'accept' || isWrongTime) return 'late'
    if (work.room.size === 0 && work.reserve()) return 'slot'
    if (later || submission.waitMs === 0) return 'late'
    const { waitMs, most } = roomOf(options.whenBusy, slots)
    const longestMs = Math.min(waitMs, submission.waitMs ?? waitMs)
    const since = performance.now()
    const signal = submission.signal ?? submission.leaving?.()
    const waiting = work.room.wait({ identity: submission.identity, waitMs: longestMs, most, signal })
    work.admit()
    const end = await waiting
    this.#o.metrics.slotWaits.labels(type, end).inc()
    this.#o.metrics.slotWait.observe((performance.now() - since) / 1_000)
    return end
  }

  /**
   * Several items of one request, whose definition has a SqlEffect: decided and written together. When the queue is full and
   * one of them would have to wait in it, all are refused. With `tx` in the caller's transaction: if that rolls back,
   * nothing was accepted.
   */
  async submitAll(bound: Bound, submissions: readonly Submission[], tx?: Tx): Promise<Answer[]> {
    const unready = this.#unready() ?? this.#full(bound) ?? (await this.#unregistered())
    const refuseAll = (refusal: Refusal): Answer[] => submissions.map(() => ({ kind: 'refused', refusal }))
    if (unready !== null) return refuseAll(this.refuse(bound.type, unready))
    const { apply } = bound.options
    if (apply === undefined || typeof apply === 'function') throw new Error(`${bound.type} has no SqlEffect`)
    const busy = this.busy > this.#o.settings.busyQueueAbove
    const all: PendingItem[] = []
    for (const submission of submissions) {
      const now = !busy && submission.respondAsync !== true
      const made = buildItem(bound, submission, { busy, now, paceMs: bound.slots.load.paceMs(bound.type) })
      if ('code' in made) return refuseAll(this.refuse(bound.type, made))
      all.push({ item: made.item, body: submission.body, tiers: made.tiers })
    }
    let accepted: readonly Accepted[]
    try {
      accepted =
        tx === undefined
          ? await bound.flush.submit(all)
          : await this.#o.accepting.applyWithin(tx, apply as Effect, all, bound.options.pendingMax)
    } catch (fault) {
      const [first] = all
      if (first === undefined || tx !== undefined) throw fault
      return refuseAll(this.#o.answering.storeFault(bound.type, fault, first.item))
    }
    return Promise.all(
      submissions.map(async (submission, i) => {
        const pending = all[i]
        if (pending === undefined) throw new RangeError(`no item ${i}`)
        return this.#answered(bound, { submission, pending }, accepted[i] ?? noVerdict(), tx)
      }),
    )
  }

  /** All gates of an admission: early, then exact. No operation is written. */
  async admit(bound: BoundAdmission, request: GateRequest, body: unknown): Promise<AdmissionAnswer> {
    const { type, flush } = bound
    const refused = (refusal: Refusal): AdmissionAnswer => ({ kind: 'refused', refusal })
    const early = this.refuseEarly(bound, request) ?? this.refuseBusy(bound, request.identity)
    if (early !== null) return refused(early)
    if (flush.isFull) return refused(this.refuse(type, refusals.writesWait))
    const { halt, tiers, rates } = exactChecks(bound.gates, request, body)
    let admitted: Admitted = { verdict: 'admit', rate: null }
    try {
      if (halt !== null || rates.length > 0) admitted = await flush.submit({ halt, rates })
    } catch (fault) {
      return refused(this.#o.answering.storeFault(type, fault))
    }
    if (admitted.verdict === 'refuse') {
      return refused(this.refuse(type, refusedBy(bound, request, body, tiers, admitted)))
    }
    this.#o.metrics.admissions.labels(type, 'execute', 'admitted').inc()
    const rate = admitted.rate === null ? undefined : rateStatus(admitted.rate, tiers)
    return { kind: 'admitted', ...(rate && { rate }) }
  }

  /** The row of a submission that nobody waits for. `apply` may still be done at once. */
  prepare(bound: Bound, submission: Submission): Prepared | Extract<Answer, { kind: 'refused' }> {
    const later = submission.respondAsync === true
    const busy = !later && this.busy > this.#o.settings.busyQueueAbove
    if (busy && thenOf(bound.options.whenBusy) === 'refuse') {
      return refused(this.refuse(bound.type, allSlotsTaken(bound.slots.work.runMs)))
    }
    const now = !later && !busy
    const made = buildItem(bound, submission, { busy, now, paceMs: bound.slots.load.paceMs(bound.type) })
    if ('code' in made) return refused(this.refuse(bound.type, made))
    return { submission, pending: { item: made.item, body: submission.body, tiers: made.tiers } }
  }

  /** Up to a flush of them, each decided by itself. */
  async submitMany(bound: Bound, prepared: readonly Prepared[]): Promise<readonly Answer[]> {
    const full = this.#unready() ?? this.#full(bound) ?? (await this.#unregistered())
    if (full !== null) return prepared.map(() => refused(this.refuse(bound.type, full)))
    const { answering } = this.#o
    const answers = prepared.map(async ({ submission, pending }): Promise<Answer> => {
      let accepted: Accepted
      try {
        const [first] = await bound.flush.submit([pending])
        accepted = first ?? noVerdict()
      } catch (fault) {
        return refused(answering.storeFault(bound.type, fault, pending.item))
      }
      return this.#answered(bound, { submission, pending }, accepted)
    })
    return Promise.all(answers)
  }

  /** The caller's answer, once it is reported. With `tx` nothing is committed yet. */
  async #answered(bound: Bound, { submission, pending }: Prepared, accepted: Accepted, tx?: Tx): Promise<Answer> {
    const answer = await this.#o.answering.answer(bound, submission, pending, accepted)
    if (accepted.verdict === 'apply' && tx === undefined) this.#o.onApplied(pending.item, pending.result)
    bound.options.onAnswer?.(answer, submission)
    return answer
  }

  /** Inside the caller's own PostgreSQL transaction: the operations exist if and when that commits. */
  async enqueue(bound: Bound, prepared: readonly Prepared[], tx: Tx): Promise<readonly Answer[]> {
    const full = (await this.#unregistered()) ?? this.#full(bound)
    if (full !== null) return prepared.map(() => refused(this.refuse(bound.type, full)))
    const items = prepared.map(({ pending }) => pending.item)
    const accepted = await this.#o.accepting.within(tx, items, bound.slots)
    return Promise.all(
      prepared.map(({ submission, pending }, i) =>
        this.#o.answering.answer(bound, submission, pending, accepted[i] ?? noVerdict()),
      ),
    )
  }

  #unready(): Refusal | null {
    if (this.#draining) return refusals.draining
    return this.#o.presence.isReady ? null : refusals.storeAway
  }

  async #unregistered(): Promise<Refusal | null> {
    if (this.#o.registry.isComplete) return null
    try {
      await this.#o.registry.register()
      return null
    } catch {
      return refusals.limitsUnknown
    }
  }

  #full(bound: Bound): Refusal | null {
    if (bound.flush.isFull) return refusals.writesWait
    if (this.queueDepth >= this.#o.settings.pendingMax && bound.options.apply === undefined) {
      return queueFull(bound.slots.load.drainMs(this.queueDepth - this.#o.settings.pendingMax + 1))
    }
    return null
  }

  /** Counts a refusal. */
  refuse(route: string, refusal: Refusal): Refusal {
    return this.#o.answering.refuse(route, refusal)
  }
}

function noVerdict(): never {
  throw new Error('the store gave no verdict')
}
