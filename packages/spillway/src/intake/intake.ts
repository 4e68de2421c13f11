/**
 * The pipeline: identify → gates → verdict → execute, queue or refuse. See ARCHITECTURE.md for every exit.
 *
 * The intake's own states: starting ──migrated, enlisted──► ready ──close()──► draining ──► closed. While it is not
 * ready it refuses with 503. A database that fails later shows as faults of single calls, not as a state.
 */
import { hostname } from 'node:os'
import type { Static, TSchema } from 'typebox'
import { buildItem } from '../accept/accept-item.js'
import { Accepting, type Apply, type Effect, queuedApply } from '../accept/accepting.js'
import { type OperationReport, standingOf } from '../core/operation-status.js'
import type { IntakeLog, IntakeSettings } from '../core/settings.js'
import { FleetNumbers } from '../fleet/fleet-numbers.js'
import { GateRegistry } from '../fleet/gate-registry.js'
import { PoolPermits } from '../fleet/pool-permits.js'
import { Presence } from '../fleet/presence.js'
import { pulseMetrics } from '../fleet/pulse-metrics.js'
import { type BoundGate, type GateBinding, type GateRequest, gateOrder, type Permit } from '../gates/gate.js'
import { queueSweeps, type Sweeps } from '../maintenance/sweeps.js'
import type { Metrics } from '../metrics/metrics.js'
import { loadTracing } from '../metrics/trace.js'
import { Door } from '../pressure/door.js'
import { Lateness } from '../pressure/lateness.js'
import { ProcessPressure } from '../pressure/process-pressure.js'
import type { Accepted, CancelOutcome, Pulse, Store, Tx } from '../store/port.js'
import { cancelPatiently } from '../work/cancel.js'
import { SlotGroups } from '../work/slot-groups.js'
import { traced } from '../work/traced.js'
import { Waiters } from '../work/waiters.js'
import type { Answer } from './answer.js'
import type { DefineOptions, Definition } from './define.js'
import { allSlotsTaken, queueFull, type Refusal, refusals, storeAwayRetryMs } from './refusal.js'
import { Dispatch } from './run-or-wait.js'
import type { Bound, PendingItem, Submission } from './submission.js'
import { Answering } from './verdict-to-answer.js'

/** Queued operations whose effect is a function in the store are applied in batches of at most this many. */
const togetherMax = 500
/** For an operation that must not be queued: the shares of the accept budget that it may wait at the door, and for its write. */
const doorShare = 0.1
const writeShare = 0.15

export class Intake {
  readonly store: Store
  readonly settings: IntakeSettings
  readonly log: IntakeLog
  readonly metrics: Metrics
  readonly pressure: ProcessPressure
  /** In front of the HTTP server whose requests come here. */
  readonly door: Door
  readonly #lateness = new Lateness()
  readonly waiters: Waiters
  readonly presence: Presence
  readonly sweeps: Sweeps
  /** Listeners for `pg_notify` messages `name:text` on the store's channel. A hint: it may be lost. */
  readonly notices = new Map<string, (text: string) => void>()
  /** Called when such notifications may be lost. */
  readonly onMissed = new Set<() => void>()
  readonly fleet = new FleetNumbers()
  readonly #definitions = new Map<string, Bound>()
  readonly #works: SlotGroups
  readonly #pools = new Map<string, PoolPermits>()
  readonly #accepting: Accepting
  readonly #dispatch: Dispatch
  readonly #answering: Answering
  readonly #registry: GateRegistry
  #inFlight = 0
  #draining = false
  #stopped: Promise<void> | undefined
  #closed: Promise<void> | undefined

  constructor(options: { store: Store; settings: IntakeSettings; log: IntakeLog; metrics: Metrics; door?: Door }) {
    const { store, settings, log, metrics } = options
    this.store = store
    this.settings = settings
    this.log = log
    this.metrics = metrics
    this.door = options.door ?? new Door()
    this.#registry = new GateRegistry(log)
    this.waiters = new Waiters((ids) => store.finished(ids))
    this.#accepting = new Accepting({
      store,
      settings,
      metrics,
      log,
      worker: () => this.presence.worker,
      depth: () => this.queueDepth,
      general: () => this.#works.general,
    })
    this.pressure = new ProcessPressure(
      {
        loopDelayMs: settings.pressureLoopDelayMs,
        storeWaitMs: settings.storeTimeoutMs,
        inFlight: settings.pressureInflightMax,
      },
      () => ({ storeWaitMs: this.#accepting.oldestMs, inFlight: this.#inFlight }),
    )
    this.#works = new SlotGroups({
      store,
      concurrency: settings.concurrency,
      accepting: this.#accepting,
      worker: () => this.presence.worker,
      log,
      onAttempt: (type, outcome, runMs) => {
        metrics.attempt(type, outcome).inc()
        if (outcome !== 'lease_lost') metrics.operationRun.observe(runMs / 1_000)
      },
      onWait: (waitedMs) => metrics.operationWait.observe(waitedMs / 1_000),
      onSettled: (op) => this.waiters.hint(op.id),
      onLeft: () => this.presence.announce('ready'),
    })
    this.#dispatch = new Dispatch({ store, waiters: this.waiters, log, directWaitMs: settings.directWaitMs })
    this.#answering = new Answering({
      ...{ metrics, log, dispatch: this.#dispatch },
      suspect: () => this.#works.suspect(),
      announce: () => this.presence.announce('ready'),
    })
    this.presence = new Presence({
      store,
      leaseMs: settings.leaseMs,
      retentionMs: settings.retentionMs,
      name: `${hostname()}:${process.pid}`,
      log,
      running: () => ({ ...this.#works.runningByType(), ...this.#works.told(), ...this.fleet.told() }),
      announced: () => (settings.work ? this.#works.announced() : {}),
      onPulse: (pulse, elapsedMs) => this.#observe(pulse, elapsedMs),
      afterPulse: async () => {
        await this.#registry.register()
        await this.#works.lookAfter()
      },
      onLost: () => this.#works.loseAll(),
      onReady: async () => {
        await this.#registry.register()
        this.#startWork()
      },
      onWake: (kind) => {
        const colon = kind.indexOf(':')
        if (colon >= 0) this.notices.get(kind.slice(0, colon))?.(kind.slice(colon + 1))
        else if (kind === 'cancel') void this.presence.beat()
        else this.#works.wake()
      },
      missed: this.onMissed,
    })
    this.sweeps = queueSweeps(store, settings.retentionMs, { isReady: () => this.isReady, metrics, log })
  }

  define<S extends TSchema, Result>(type: string, options: DefineOptions<S, Result>): Definition<Static<S>, Result> {
    if (this.#definitions.has(type)) throw new Error(`The operation type ${type} is defined already.`)
    if (!/^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$/.test(type)) {
      throw new RangeError(
        `An operation type has 1 to 100 letters, digits, dots, dashes or underscores, not ${JSON.stringify(type)}.`,
      )
    }
    const open = options as unknown as DefineOptions<TSchema, unknown>
    for (const kind of ['capacity', 'halt', 'connections'] as const) {
      if ((open.gates ?? []).filter((gate) => gate.kind === kind).length > 1) {
        throw new Error(`The operation type ${type} has two ${kind} gates; an operation can be held by one only.`)
      }
    }
    const binding = this.#gateBinding(type)
    const gates = (open.gates ?? [])
      .map((gate) => gate.bind(binding) as BoundGate<unknown>)
      .sort((a, b) => gateOrder.indexOf(a.kind) - gateOrder.indexOf(b.kind))
    const apply = open.apply as Apply | Effect | undefined
    const slots = this.#works.slots(open.slots)
    const flush = apply === undefined ? slots.flush : this.#accepting.applying(apply, open.pendingMax)
    this.#definitions.set(type, { type, options: open, gates, flush, slots })
    this.#works.handle(type, slots, {
      backoff: open.retry ?? { baseMs: this.settings.retryBaseMs, maxMs: this.settings.retryMaxMs },
      ...(open.run && { run: traced(type, open.run as never) }),
      ...(open.ready && { ready: open.ready }),
      ...(open.announces && { announces: open.announces }),
      ...(apply && {
        apply: queuedApply(this.store, apply),
        ...(typeof apply !== 'function' && { together: togetherMax }),
      }),
    })
    // After this turn of the event loop: definitions made together are known before the first claim.
    setImmediate(() => this.#startWork())
    return { type }
  }

  /** Claims start once the database is connected and something is defined. */
  #startWork(): void {
    if (this.settings.work && this.presence.isEnlisted && !this.#draining) this.#works.start()
  }

  bound(definition: Definition): Bound {
    const bound = this.#definitions.get(definition.type)
    if (bound === undefined) throw new Error(`The operation type ${definition.type} is not defined on this intake.`)
    return bound
  }

  find(type: string): Bound | undefined {
    return this.#definitions.get(type)
  }

  get abortableTypes(): string[] {
    return [...this.#definitions.values()].filter((d) => d.options.abortable === true).map((d) => d.type)
  }

  get isReady(): boolean {
    return this.presence.isReady && !this.#draining
  }

  /** How much of this process's share of the store is in use, for the load decision. */
  get busy(): number {
    const pool = this.store.poolState()
    return Math.max((pool.busy + pool.waiting) / pool.max, this.#accepting.oldestMs / this.settings.acceptWaitBudgetMs)
  }

  /** The same for writes alone, for operations that do not need the pool. */
  get writesBusy(): number {
    return this.#accepting.oldestMs / this.settings.acceptWaitBudgetMs
  }

  /** An operation that must not be queued is refused before it waits for long; a burst may pass. */
  #isLate({ flush }: Bound): boolean {
    const { acceptWaitBudgetMs } = this.settings
    const isOver =
      this.door.waitedMs > acceptWaitBudgetMs * doorShare || flush.expectedMs > acceptWaitBudgetMs * writeShare
    return this.#lateness.refuses(isOver, performance.now())
  }

  get queueDepth(): number {
    return this.#works.depth
  }

  /** The gates that need no body, cheapest first. Runs before the body is parsed. */
  admit(bound: Bound, request: GateRequest): Refusal | null {
    const refusal = this.#unready()
    if (refusal !== null) return this.#refuse(bound.type, refusal)
    for (const gate of bound.gates) {
      if (gate.early === undefined) continue
      const started = performance.now()
      const early = gate.early(request)
      this.metrics.admissionDuration.labels(gate.kind).observe((performance.now() - started) / 1_000)
      if (early !== null) return this.#refuse(bound.type, early)
    }
    return null
  }

  /**
   * Refuses an operation that must not be queued when this process is too busy, before its body is read. Not for callers who
   * may prefer to be queued.
   */
  refuseBusy(bound: Bound): Refusal | null {
    const { run, whenBusy } = bound.options
    if (whenBusy !== 'refuse') return null
    const { work } = bound.slots
    const hasSlot = run === undefined || work.canReserve
    if (hasSlot && !this.#isLate(bound) && this.busy <= this.settings.busyQueueAbove) return null
    return this.#refuse(bound.type, allSlotsTaken(work.runMs))
  }

  /** Permits that are held while the request runs. */
  async acquire(bound: Bound, request: GateRequest): Promise<Refusal | Permit[]> {
    const permits: Permit[] = []
    for (const gate of bound.gates) {
      if (gate.acquire === undefined) continue
      const outcome = await gate.acquire(request).catch((fault: unknown): Refusal => {
        this.log.warn({ err: fault, type: bound.type, gate: gate.kind }, 'a place could not be taken')
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
      return this.#refuse(bound.type, outcome)
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

  async submit(bound: Bound, submission: Submission): Promise<Answer> {
    const unready = this.#unready() ?? this.#full(bound)
    if (unready !== null) return { kind: 'refused', refusal: this.#refuse(bound.type, unready) }
    const unregistered = await this.#unregistered()
    if (unregistered !== null) return { kind: 'refused', refusal: this.#refuse(bound.type, unregistered) }
    const { work, load } = bound.slots
    const runs = bound.options.run !== undefined
    const later = submission.respondAsync === true
    // A caller that asks for a ticket gets a run at once too, if slots are free: that saves the way through the queue.
    const background = later && this.settings.work && submission.waitMs === undefined
    const calm = this.busy <= this.settings.busyQueueAbove
    const reserved = runs && (!later || background) && calm && work.reserve()
    const busy = runs ? !later && !reserved : !calm
    if (busy && bound.options.whenBusy === 'refuse') {
      return { kind: 'refused', refusal: this.#refuse(bound.type, allSlotsTaken(work.runMs)) }
    }
    let held = reserved
    try {
      const now = runs ? reserved : !busy && !later
      const made = buildItem(bound, submission, { busy, now, paceMs: load.paceMs(bound.type) })
      if ('code' in made) return { kind: 'refused', refusal: this.#refuse(bound.type, made) }
      const { item, tiers } = made
      const pending: PendingItem = { item, body: submission.body, tiers }
      let accepted: Accepted
      try {
        const asked = performance.now()
        const [told] = await bound.flush.submit([pending])
        accepted = told ?? nothingTold()
        if (reserved) work.acceptedIn(performance.now() - asked)
      } catch (fault) {
        return { kind: 'refused', refusal: this.#answering.storeFault(bound, item, fault) }
      }
      // From here on the run owns the slot; an operation that does not run now must not keep one while its caller waits.
      if (held && accepted.verdict !== 'execute') work.unreserve()
      held = false
      const answer = await this.#answering.told(bound, submission, pending, accepted)
      bound.options.onAnswer?.(answer, submission)
      return answer
    } finally {
      if (held) work.unreserve()
    }
  }

  /**
   * Several items of one request, whose definition has a SqlEffect: decided and written together. When the queue is full and
   * one of them would have to wait in it, all are refused. With `tx` in the caller's transaction: if that rolls back,
   * nothing was accepted.
   */
  async submitAll(bound: Bound, submissions: readonly Submission[], tx?: Tx): Promise<Answer[]> {
    const unready = this.#unready() ?? this.#full(bound) ?? (await this.#unregistered())
    const refuseAll = (refusal: Refusal): Answer[] => submissions.map(() => ({ kind: 'refused', refusal }))
    if (unready !== null) return refuseAll(this.#refuse(bound.type, unready))
    const { apply } = bound.options
    if (apply === undefined || typeof apply === 'function') throw new Error(`${bound.type} has no SqlEffect`)
    const busy = this.busy > this.settings.busyQueueAbove
    const all: PendingItem[] = []
    for (const submission of submissions) {
      const now = !busy && submission.respondAsync !== true
      const made = buildItem(bound, submission, { busy, now, paceMs: bound.slots.load.paceMs(bound.type) })
      if ('code' in made) return refuseAll(this.#refuse(bound.type, made))
      all.push({ item: made.item, body: submission.body, tiers: made.tiers })
    }
    let accepted: readonly Accepted[]
    try {
      accepted =
        tx === undefined
          ? await bound.flush.submit(all)
          : await this.#accepting.applyWithin(tx, apply as Effect, all, bound.options.pendingMax)
    } catch (fault) {
      const [first] = all
      if (first === undefined || tx !== undefined) throw fault
      return refuseAll(this.#answering.storeFault(bound, first.item, fault))
    }
    return Promise.all(
      submissions.map(async (submission, i) => {
        const pending = all[i]
        if (pending === undefined) throw new RangeError(`no item ${i}`)
        const answer = await this.#answering.told(bound, submission, pending, accepted[i] ?? nothingTold())
        bound.options.onAnswer?.(answer, submission)
        return answer
      }),
    )
  }

  /** Inside the caller's own PostgreSQL transaction: the operation exists if and when that commits. */
  async enqueue(bound: Bound, submission: Submission, tx: Tx): Promise<Answer> {
    const full = (await this.#unregistered()) ?? this.#full(bound)
    if (full !== null) return { kind: 'refused', refusal: this.#refuse(bound.type, full) }
    const made = buildItem(
      bound,
      { ...submission, respondAsync: true },
      { busy: false, now: false, paceMs: bound.slots.load.paceMs(bound.type) },
    )
    if ('code' in made) return { kind: 'refused', refusal: this.#refuse(bound.type, made) }
    const { item, tiers } = made
    const accepted = await this.#accepting.within(tx, item, bound.slots)
    return this.#answering.told(bound, submission, { item, body: submission.body, tiers }, accepted)
  }

  async start(): Promise<void> {
    await loadTracing()
    this.pressure.start()
    await this.presence.start()
    this.sweeps.start()
  }

  /** Refuses new submissions from here on. */
  drain(): void {
    this.#draining = true
  }

  /** Finishes running operations, gives back the rest, answers waiting callers; the store stays open. */
  stop(): Promise<void> {
    this.#stopped ??= (async () => {
      this.drain()
      await Promise.all([this.sweeps.stop(), this.#accepting.drained()])
      await this.#works.stop(this.settings.drainMs)
      this.waiters.close()
    })()
    return this.#stopped
  }

  /** Refuses new submissions, finishes running operations, gives back the rest. */
  close(): Promise<void> {
    this.#closed ??= (async () => {
      await this.stop()
      this.pressure.stop()
      await this.presence.stop()
      await this.store.close()
    })()
    return this.#closed
  }

  get isDraining(): boolean {
    return this.#draining
  }

  /** Operations were changed from outside (redrive, resume): look for work, here and elsewhere. */
  wakeAll(kind: 'ready' | 'cancel' = 'ready'): void {
    this.#works.wake()
    this.presence.announce(kind)
  }

  /** Removes a queued operation, or asks a running one to stop; its waiting callers are notified. */
  async cancel(id: string, why: string): Promise<CancelOutcome> {
    const outcome = await cancelPatiently(this.store, id, this.abortableTypes, why)
    if (outcome === 'cancelled') {
      this.waiters.hint(id)
      this.wakeAll()
    } else if (outcome === 'asked' && !this.#works.cancel(id)) this.wakeAll('cancel')
    return outcome
  }

  statusOf(ids: readonly string[]): Promise<OperationReport[]> {
    return standingOf(this.store, (type) => this.#definitions.get(type)?.slots ?? this.#works.general, ids)
  }

  /** Permits of a pool, shared by all instances. */
  places(pool: string): PoolPermits {
    const known = this.#pools.get(pool)
    if (known !== undefined) return known
    const { store, log, presence, settings } = this
    const places = new PoolPermits({
      ...{ store, pool, log, timeoutMs: settings.storeTimeoutMs * 0.9 },
      worker: () => presence.worker,
      isEnlisted: () => presence.isEnlisted,
    })
    this.#pools.set(pool, places)
    this.fleet.tells.set(`pool:${pool}`, () => places.held)
    return places
  }

  #unready(): Refusal | null {
    if (this.#draining) return refusals.draining
    return this.presence.isReady ? null : refusals.storeAway
  }

  async #unregistered(): Promise<Refusal | null> {
    if (this.#registry.isComplete) return null
    try {
      await this.#registry.register()
      return null
    } catch {
      return refusals.limitsUnknown
    }
  }

  #full(bound: Bound): Refusal | null {
    if (bound.flush.isFull) return refusals.writesWait
    if (this.queueDepth >= this.settings.pendingMax && bound.options.apply === undefined) {
      return queueFull(bound.slots.load.drainMs(this.queueDepth - this.settings.pendingMax + 1))
    }
    return null
  }

  #refuse(route: string, refusal: Refusal): Refusal {
    return this.#answering.refuse(route, refusal)
  }

  #observe(pulse: Pulse, elapsedMs: number): void {
    this.fleet.observe(pulse)
    this.#works.observe(pulse, elapsedMs)
    for (const { gates } of this.#definitions.values()) for (const gate of gates) gate.observe?.(pulse)
    pulseMetrics(this.metrics, this.fleet, pulse, this.store.poolState())
  }

  #gateBinding(type: string): GateBinding {
    return {
      type,
      now: () => performance.now(),
      pressureLevel: () => this.pressure.level,
      registerCapacity: (name, limit, resumeBelow) => {
        this.#registry.add(name, () => this.store.registerGate(name, limit, resumeBelow))
      },
      takeConnection: (pool, identity, limits) => this.places(pool).take(identity, limits),
    }
  }
}

function nothingTold(): never {
  throw new Error('the store gave no verdict')
}
