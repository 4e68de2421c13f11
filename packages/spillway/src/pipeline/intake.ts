/**
 * The pipeline: identify → gates → verdict → execute, queue or refuse. See ARCHITECTURE.md for every exit.
 *
 * The intake's own states: starting ──migrated, enlisted──► ready ──close()──► draining ──► closed. While it is not
 * ready it refuses with 503; a store that goes away later shows as faults of single calls, not as a state.
 */
import { hostname } from 'node:os'
import { limits } from '@spillway/protocol/wire'
import type { Static, TSchema } from 'typebox'
import {
  type BoundGate,
  type GateBinding,
  type GateRequest,
  gateOrder,
  type Permit,
  type RateTier,
} from '../gates/gate.js'
import { FairClock } from '../operations/fair-clock.js'
import { digestUuid, laneOf } from '../operations/lane.js'
import { newOperationId } from '../operations/operation-id.js'
import { ProcessPressure } from '../pressure/process-pressure.js'
import type {
  AcceptContext,
  Accepted,
  AcceptItem,
  Claimed,
  Pulse,
  Store,
  StoredAnswer,
  Ticket,
  Tx,
} from '../store/port.js'
import type { Metrics } from '../telemetry/metrics.js'
import type { Answer } from './answer.js'
import { type ApplyItem, type DefineOptions, type Definition, defaults, type IntakeRequest } from './define.js'
import { Flush } from './flush.js'
import { Presence } from './presence.js'
import { type Refusal, toldRate } from './refusal.js'
import type { Outcome } from './run.js'
import { Waiters } from './waiters.js'
import { type Handler, Work } from './work.js'

export interface IntakeLog {
  debug(fields: object, message: string): void
  info(fields: object, message: string): void
  warn(fields: object, message: string): void
  error(fields: object, message: string): void
}

export interface IntakeSettings {
  /** Claim and run queued operations in this process. Default true. */
  work: boolean
  concurrency: number
  leaseMs: number
  directWaitMs: number
  retryBaseMs: number
  retryMaxMs: number
  retentionMs: number
  idempotencyTtlMs: number
  /** Operations held at most, of all types; beyond it `queue_full`. */
  pendingMax: number
  acceptWaitBudgetMs: number
  /** Busy above this queues instead of executing. */
  busyQueueAbove: number
  storeTimeoutMs: number
  drainMs: number
  pressureLoopDelayMs: number
  pressureInflightMax: number
}

export const intakeDefaults: IntakeSettings = {
  work: true,
  concurrency: 64,
  leaseMs: 15_000,
  directWaitMs: 5_000,
  retryBaseMs: 1_000,
  retryMaxMs: 60_000,
  retentionMs: 3_600_000,
  idempotencyTtlMs: 86_400_000,
  pendingMax: 1_000_000,
  acceptWaitBudgetMs: 250,
  busyQueueAbove: 0.7,
  storeTimeoutMs: 2_000,
  drainMs: 20_000,
  pressureLoopDelayMs: 500,
  pressureInflightMax: 10_000,
}

/** A submission after identify and parse. */
export interface Submission {
  body: unknown
  identity: string
  request: IntakeRequest
  idempotencyKey?: string
  respondAsync?: boolean
  /** Wait so long for a queued one, then answer as if it had run now. */
  waitMs?: number
  signal?: AbortSignal
}

/** A definition with its gates bound and its labels looked up. */
export interface Bound {
  readonly type: string
  readonly options: DefineOptions<TSchema, unknown>
  readonly gates: readonly BoundGate<unknown>[]
  readonly flush: Flush<PendingItem, Accepted>
}

interface PendingItem {
  item: AcceptItem
  body: unknown
  result?: unknown
}

const flushItemsMax = 500
const flushBytesMax = 4 * 1_048_576
const waitingItemsMax = 10_000
const storeAwayRetryMs = 2_000

export class Intake {
  readonly store: Store
  readonly settings: IntakeSettings
  readonly log: IntakeLog
  readonly metrics: Metrics
  readonly pressure: ProcessPressure
  readonly waiters: Waiters
  readonly presence: Presence
  readonly #definitions = new Map<string, Bound>()
  readonly #handlers = new Map<string, Handler>()
  readonly #fair = new FairClock()
  readonly #work: Work
  readonly #accepts: Flush<PendingItem, Accepted>
  readonly #paceMs = new Map<string, number>()
  readonly #connectionFlushes = new Map<string, Flush<string, 'granted' | 'identity_full' | 'pool_full'>>()
  #inFlight = 0
  #acceptedSincePulse = 0
  #held = 0
  #drainPerMs = 0
  #settledSincePulse = 0
  #draining = false

  constructor(options: { store: Store; settings: IntakeSettings; log: IntakeLog; metrics: Metrics }) {
    const { store, settings, log, metrics } = options
    this.store = store
    this.settings = settings
    this.log = log
    this.metrics = metrics
    this.waiters = new Waiters((ids) => store.finished(ids))
    this.#accepts = this.#makeFlush((pending) => this.#accept(pending))
    this.pressure = new ProcessPressure(
      {
        loopDelayMs: settings.pressureLoopDelayMs,
        storeWaitMs: settings.storeTimeoutMs,
        inFlight: settings.pressureInflightMax,
      },
      () => ({ storeWaitMs: this.#accepts.oldestMs, inFlight: this.#inFlight }),
    )
    this.#work = new Work({
      store,
      handlers: this.#handlers,
      concurrency: settings.concurrency,
      worker: () => this.presence.worker,
      log,
      onAttempt: (type, outcome, runMs) => {
        metrics.attempt(type, outcome).inc()
        if (outcome === 'lease_lost') return
        metrics.operationRun.observe(runMs / 1_000)
        const pace = this.#paceMs.get(type)
        this.#paceMs.set(type, pace === undefined ? runMs : pace * 0.9 + runMs * 0.1)
      },
      onWait: (waitedMs) => metrics.operationWait.observe(waitedMs / 1_000),
      onSettled: (op, outcome) => {
        if (outcome.kind !== 'retry') this.#settledSincePulse++
        this.waiters.hint(op.id)
      },
    })
    this.presence = new Presence({
      store,
      leaseMs: settings.leaseMs,
      retentionMs: settings.retentionMs,
      name: `${hostname()}:${process.pid}`,
      log,
      running: () => this.#work.runningByType(),
      onPulse: (pulse, elapsedMs) => this.#observe(pulse, elapsedMs),
      afterPulse: () => this.#work.giveBackStray(),
      onLost: () => this.#work.loseAll(),
      onReady: async () => {
        for (const register of this.#registrations) await register()
        this.#startWork()
      },
      onWake: (kind) => {
        if (kind === 'cancel') void this.presence.beat()
        else this.#work.wake()
      },
    })
  }

  readonly #registrations: (() => Promise<void>)[] = []
  /** Gates that are being registered after the start; submissions wait for them. */
  readonly #registering = new Set<Promise<void>>()

  define<S extends TSchema, Result>(type: string, options: DefineOptions<S, Result>): Definition<Static<S>, Result> {
    if (this.#definitions.has(type)) throw new Error(`The operation type ${type} is defined already.`)
    if (!/^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$/.test(type)) {
      throw new RangeError(
        `An operation type has 1 to 100 letters, digits, dots, dashes or underscores, not ${JSON.stringify(type)}.`,
      )
    }
    const open = options as unknown as DefineOptions<TSchema, unknown>
    const binding = this.#gateBinding(type)
    const gates = (open.gates ?? [])
      .map((gate) => gate.bind(binding) as BoundGate<unknown>)
      .sort((a, b) => gateOrder.indexOf(a.kind) - gateOrder.indexOf(b.kind))
    const flush =
      open.apply === undefined ? this.#accepts : this.#makeFlush((pending) => this.#acceptAndApply(open.apply, pending))
    this.#definitions.set(type, { type, options: open, gates, flush })
    this.#handlers.set(type, {
      backoff: open.retry ?? { baseMs: this.settings.retryBaseMs, maxMs: this.settings.retryMaxMs },
      ...(open.run && { run: (payload, attempt) => open.run?.(payload as never, attempt) }),
      ...(open.apply && { apply: (tx, items) => open.apply?.(tx, items as never) ?? Promise.resolve([]) }),
    })
    // After this turn of the event loop: what is defined together is known before the first operation is claimed.
    setImmediate(() => this.#startWork())
    return { type }
  }

  /** Claims begin once there is a store and something to run. */
  #startWork(): void {
    if (this.settings.work && this.presence.isEnlisted && this.#handlers.size > 0 && !this.#draining) this.#work.start()
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

  /** How much of this process's share of the store is in use: the load decision. */
  get busy(): number {
    const pool = this.store.poolState()
    return Math.max((pool.busy + pool.waiting) / pool.max, this.#accepts.oldestMs / this.settings.acceptWaitBudgetMs)
  }

  get queueDepth(): number {
    return this.#held + this.#acceptedSincePulse
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

  /** Places that are held while the request runs. */
  async acquire(bound: Bound, request: GateRequest): Promise<Refusal | Permit[]> {
    const permits: Permit[] = []
    for (const gate of bound.gates) {
      if (gate.acquire === undefined) continue
      const outcome = await gate.acquire(request)
      if ('release' in outcome) {
        permits.push(outcome)
        continue
      }
      for (const permit of permits) permit.release()
      return this.#refuse(bound.type, outcome)
    }
    return permits
  }

  /** Counts a request for as long as it is under way. */
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
    if (this.#registering.size > 0) await Promise.all(this.#registering)
    const wantsNow = bound.options.run !== undefined && submission.respondAsync !== true
    const reserved = wantsNow && this.busy <= this.settings.busyQueueAbove && this.#work.reserve()
    const busy = bound.options.run === undefined ? this.busy > this.settings.busyQueueAbove : wantsNow && !reserved
    if (busy && bound.options.whenBusy === 'refuse') {
      const refusal: Refusal = {
        code: 'overloaded',
        detail: 'This instance is busy. Try again later.',
        retryAfterMs: storeAwayRetryMs,
        gate: 'load',
      }
      return { kind: 'refused', refusal: this.#refuse(bound.type, refusal) }
    }
    let held = reserved
    try {
      const made = this.#item(bound, submission, busy)
      if ('code' in made) return { kind: 'refused', refusal: this.#refuse(bound.type, made) }
      const { item, tiers } = made
      const pending: PendingItem = { item, body: submission.body }
      let accepted: Accepted
      try {
        accepted = await bound.flush.submit(pending)
      } catch (fault) {
        return { kind: 'refused', refusal: this.#storeFault(bound, item, fault) }
      }
      // From here on the slot is the run's.
      if (accepted.verdict === 'execute') held = false
      return await this.#told(bound, submission, pending, tiers, accepted)
    } finally {
      if (held) this.#work.unreserve()
    }
  }

  /** Inside the caller's own PostgreSQL transaction: the operation exists if and when that commits. */
  async enqueue(bound: Bound, submission: Submission, tx: Tx): Promise<Answer> {
    const full = this.#full(bound)
    if (full !== null) return { kind: 'refused', refusal: this.#refuse(bound.type, full) }
    const made = this.#item(bound, { ...submission, respondAsync: true }, false)
    if ('code' in made) return { kind: 'refused', refusal: this.#refuse(bound.type, made) }
    const { item, tiers } = made
    this.#fair.stamp([item])
    const [accepted] = await this.store.acceptWithin(tx, [item], this.#acceptContext())
    if (accepted === undefined) throw new Error('the store gave no verdict')
    return this.#told(bound, submission, { item, body: submission.body }, tiers, accepted)
  }

  async start(): Promise<void> {
    this.pressure.start()
    await this.presence.start()
  }

  /** Refuses what is new, finishes what runs, gives back the rest. */
  async close(): Promise<void> {
    if (this.#draining) return
    this.#draining = true
    for (const { flush } of this.#definitions.values()) await flush.drained()
    await this.#work.stop(this.settings.drainMs)
    this.waiters.close()
    this.pressure.stop()
    await this.presence.stop()
    await this.store.close()
  }

  get isDraining(): boolean {
    return this.#draining
  }

  /** Operations were changed from outside (redrive, resume): look for work, here and elsewhere. */
  wakeAll(kind: 'ready' | 'cancel' = 'ready'): void {
    this.#work.wake()
    this.presence.announce(kind)
  }

  #unready(): Refusal | null {
    if (this.#draining) {
      return { code: 'draining', detail: 'This instance is shutting down.', retryAfterMs: 5_000, gate: 'lifecycle' }
    }
    if (this.presence.isReady) return null
    return {
      code: 'store_unavailable',
      detail: 'The store cannot be reached yet. Nothing was accepted; try again later.',
      retryAfterMs: storeAwayRetryMs,
      gate: 'store',
    }
  }

  #full(bound: Bound): Refusal | null {
    if (bound.flush.isFull) {
      return {
        code: 'overloaded',
        detail: 'Too many requests wait to be written. Try again later.',
        retryAfterMs: storeAwayRetryMs,
        gate: 'flush',
      }
    }
    if (this.queueDepth >= this.settings.pendingMax && bound.options.apply === undefined) {
      const over = this.queueDepth - this.settings.pendingMax + 1
      const waitMs = this.#drainPerMs > 0 ? over / this.#drainPerMs : 5_000
      return {
        code: 'queue_full',
        detail: `The operation queue is full (${this.settings.pendingMax}). Try again later.`,
        retryAfterMs: Math.min(60_000, Math.max(1_000, waitMs)),
        gate: 'depth',
      }
    }
    return null
  }

  #refuse(route: string, refusal: Refusal): Refusal {
    this.metrics.admissions.labels(route, 'refuse', refusal.gate ?? refusal.code).inc()
    return refusal
  }

  #item(bound: Bound, submission: Submission, busy: boolean): { item: AcceptItem; tiers: RateTier[] } | Refusal {
    const { options, type } = bound
    const { body, request, identity } = submission
    const lane = laneOf(options.lane === undefined ? type : options.lane(body, request))
    if (!isName(lane.queue) || !isName(lane.partition)) {
      return {
        code: 'invalid_request',
        detail: `Queue and partition have 1 to ${limits.nameCodePoints} characters and no NUL.`,
        gate: 'lane',
      }
    }
    const of = (value: number | ((body: unknown) => number) | undefined, fallback: number): number =>
      typeof value === 'function' ? value(body) : (value ?? fallback)
    const delayMs = Math.max(0, Math.round(options.delayMs?.(body) ?? 0))
    const requested = submission.respondAsync === true || delayMs > 0
    const tiers: RateTier[] = []
    let gate: string | null = null
    let halt: string | null = null
    const gateRequest = { identity, clientAddress: request.clientAddress }
    for (const bind of bound.gates) {
      const exact = bind.exact?.(gateRequest, body)
      if (exact === undefined) continue
      gate = exact.gate ?? gate
      halt = exact.halt ?? halt
      if (exact.rates !== undefined) tiers.push(...exact.rates)
    }
    const payload = JSON.stringify(body ?? null)
    return {
      tiers,
      item: {
        id: newOperationId(),
        lane: lane.id,
        queue: lane.queue,
        partition: lane.partition,
        type,
        priority: Math.min(
          limits.priorityMax,
          Math.max(limits.priorityMin, Math.round(of(options.priority, defaults.priority))),
        ),
        identity,
        payload,
        delayMs,
        maxAttempts: of(options.maxRetries, defaults.maxRetries) + 1,
        timeoutMs: of(options.timeoutMs, defaults.timeoutMs),
        traceparent: request.traceparent,
        execute: !requested && !busy,
        reason: requested ? 'requested' : busy ? 'system_busy' : '',
        paceMs: this.#paceMs.get(type) ?? 0,
        stamp: 0,
        lead: 0,
        idempotency:
          submission.idempotencyKey === undefined
            ? null
            : {
                key: digestUuid(`${type}\0${identity}\0${submission.idempotencyKey}`),
                request: digestUuid(payload),
              },
        gate,
        halt,
        rates: tiers.map((tier) => ({
          key: digestUuid(`rate\0${tier.key}`),
          limit: tier.limit,
          windowMinutes: tier.windowMinutes,
        })),
      },
    }
  }

  async #told(
    bound: Bound,
    submission: Submission,
    pending: PendingItem,
    tiers: readonly RateTier[],
    accepted: Accepted,
  ): Promise<Answer> {
    const { item } = pending
    const { type } = bound
    const rateTold = 'rate' in accepted && accepted.rate !== null ? toldRate(accepted.rate, tiers) : undefined
    const rate = rateTold === undefined ? {} : { rate: rateTold }
    switch (accepted.verdict) {
      case 'apply':
        this.metrics.admissions.labels(type, 'execute', 'applied').inc()
        return { kind: 'done', operationId: item.id, result: pending.result, replayed: false, ...rate }
      case 'execute':
        this.metrics.admissions.labels(type, 'execute', 'direct').inc()
        return { ...(await this.#executed(item, accepted, submission)), ...rate }
      case 'queue': {
        this.metrics.admissions.labels(type, 'queue', accepted.reason).inc()
        this.#acceptedSincePulse++
        this.#queued(item)
        const queued: Answer = {
          kind: 'queued',
          operationId: item.id,
          place: accepted.place,
          waitMs: accepted.waitMs,
          reason: accepted.reason,
          replayed: false,
          ...rate,
        }
        return submission.waitMs === undefined ? queued : this.waitFor(queued, submission.waitMs, submission.signal)
      }
      case 'refuse':
        return { kind: 'refused', refusal: this.#refuse(type, this.#refusedBy(bound, submission, tiers, accepted)) }
      case 'replay':
        this.metrics.admissions.labels(type, 'replay', accepted.answer.v).inc()
        return this.#replay(accepted, submission)
      case 'mismatch':
        return this.#conflict(type, {
          code: 'idempotency_mismatch',
          detail: 'This Idempotency-Key was used for a request with another body. Use a new key.',
          gate: 'idempotency',
        })
      case 'in_progress':
        return this.#conflict(type, {
          code: 'idempotency_in_progress',
          detail: 'The first request with this Idempotency-Key is still in progress. Ask again shortly.',
          gate: 'idempotency',
        })
    }
  }

  /** The stored answer; a caller who waits is told as the first one was. */
  async #replay(accepted: Extract<Accepted, { verdict: 'replay' }>, submission: Submission): Promise<Answer> {
    const answer = replayed(accepted.operationId, accepted.answer)
    if (answer.kind !== 'queued' || submission.waitMs === undefined) return answer
    const waited = await this.waitFor(answer, submission.waitMs, submission.signal)
    return waited.kind === 'refused' ? waited : { ...waited, replayed: true }
  }

  #conflict(type: string, refusal: Refusal): Answer {
    return { kind: 'refused', refusal: this.#refuse(type, refusal) }
  }

  #refusedBy(
    bound: Bound,
    submission: Submission,
    tiers: readonly RateTier[],
    accepted: Extract<Accepted, { verdict: 'refuse' }>,
  ): Refusal {
    const request = { identity: submission.identity, clientAddress: submission.request.clientAddress }
    if (accepted.by !== 'rate') {
      const gate = bound.gates.find((g) => g.kind === accepted.by)
      if (gate?.refused === undefined) throw new Error(`refused by ${accepted.by}, which ${bound.type} does not have`)
      return gate.refused(request, null)
    }
    const tier = tiers[accepted.rate.tier]
    // Tiers stand in the order of the rate gates that gave them.
    const gates = bound.gates.filter((g) => g.kind === 'rate')
    const gate = gates.find((g) => g.exact?.(request, submission.body).rates?.some((r) => r.key === tier?.key) === true)
    if (tier === undefined || gate?.refused === undefined) throw new Error('refused by a rate that is not there')
    return gate.refused(request, { ...tier, resetMs: accepted.rate.resetMs })
  }

  async #executed(
    item: AcceptItem,
    accepted: Extract<Accepted, { verdict: 'execute' }>,
    submission: Submission,
  ): Promise<Answer> {
    const op: Claimed = {
      fence: accepted.fence,
      lane: item.lane,
      seq: accepted.seq,
      id: item.id,
      type: item.type,
      queue: item.queue,
      partition: item.partition,
      priority: item.priority,
      identity: item.identity,
      payload: JSON.parse(item.payload),
      waitedMs: 0,
      careful: false,
      due: true,
      attempts: 0,
      maxAttempts: item.maxAttempts,
      timeoutMs: item.timeoutMs,
      traceparent: item.traceparent,
      idempotencyKey: item.idempotency?.key ?? null,
      gate: item.gate,
    }
    const patienceMs = submission.waitMs ?? this.settings.directWaitMs
    const started = performance.now()
    let timer: NodeJS.Timeout | undefined
    const late = new Promise<'late'>((resolve) => {
      timer = setTimeout(() => resolve('late'), patienceMs)
    })
    const outcome = await Promise.race([this.#work.execute(op), late])
    clearTimeout(timer)
    if (outcome === 'late') return this.#becameTicket(item, 'still_running', 0)
    if (outcome === null) return this.#afterLoss(item)
    if (outcome.kind !== 'retry' && outcome.kind !== 'released') return settledAnswer(item.id, outcome)
    // It comes again. A caller who said how long to wait waits for that, too.
    const leftMs = submission.waitMs === undefined ? 0 : patienceMs - (performance.now() - started)
    const ticket = leftMs > 0 ? await this.waiters.wait(item.id, leftMs, submission.signal) : null
    const answer = ticket === null ? null : finishedAnswer(ticket)
    if (answer !== null) return answer
    return outcome.kind === 'retry'
      ? this.#becameTicket(item, 'retrying', outcome.delayMs)
      : this.#becameTicket(item, 'still_running', 0)
  }

  /** The caller's patience ended before the run did: the work is durable already, the answer is its ticket. */
  async #becameTicket(item: AcceptItem, reason: 'still_running' | 'retrying', waitMs: number): Promise<Answer> {
    const answer = { place: 0, wait_ms: Math.max(waitMs, item.paceMs), reason }
    if (item.idempotency !== null) {
      await this.store.answerKeys([item.idempotency.key], [{ v: 'queue', ...answer }]).catch((fault: unknown) => {
        // The key stays "in progress" and is answered when the operation is settled.
        this.log.warn({ err: fault, operation: item.id }, 'could not keep the answer for its Idempotency-Key')
      })
    }
    return { kind: 'queued', operationId: item.id, place: 0, waitMs: answer.wait_ms, reason, replayed: false }
  }

  /** The lease was lost while it ran, or the answer of the settlement was: the ticket knows. */
  async #afterLoss(item: AcceptItem): Promise<Answer> {
    const ticket = await this.store.ticket(item.id).catch(() => null)
    const answer = ticket === null ? null : finishedAnswer(ticket)
    return answer ?? this.#becameTicket(item, 'still_running', 0)
  }

  /** Waits for a queued operation and answers as if it had run now. */
  async waitFor(queued: Extract<Answer, { kind: 'queued' }>, ms: number, signal?: AbortSignal): Promise<Answer> {
    const ticket = await this.waiters.wait(queued.operationId, ms, signal)
    const answer = ticket === null ? null : finishedAnswer(ticket)
    return answer === null ? queued : { ...answer, ...(queued.rate && { rate: queued.rate }) }
  }

  #queued(item: AcceptItem): void {
    if (item.delayMs > 0) this.#work.wakeIn(item.delayMs)
    else this.#work.wake()
    this.presence.announce('ready')
  }

  #storeFault(bound: Bound, item: AcceptItem, fault: unknown): Refusal {
    if (item.execute) this.#work.suspect()
    const code = codeOf(fault)
    if (code === 'data' || code === undefined || code === 'other') {
      this.log.error({ err: fault, type: bound.type, operation: item.id }, 'an operation could not be stored')
      return this.#refuse(bound.type, {
        code: 'internal_error',
        detail: 'The operation could not be stored.',
        gate: 'store',
      })
    }
    return this.#refuse(bound.type, {
      code: 'store_unavailable',
      detail: 'The store did not confirm. Repeat the request with the same Idempotency-Key.',
      retryAfterMs: code === 'disk_full' ? 30_000 : storeAwayRetryMs,
      gate: 'store',
    })
  }

  #acceptContext(): AcceptContext {
    return {
      worker: this.presence.worker,
      backlogMs:
        this.#drainPerMs > 0
          ? Math.min(86_400_000, Math.max(0, this.queueDepth - this.settings.concurrency) / this.#drainPerMs)
          : 0,
      keyTtlMs: this.settings.idempotencyTtlMs,
    }
  }

  #makeFlush(write: (pending: readonly PendingItem[]) => Promise<Accepted[]>): Flush<PendingItem, Accepted> {
    return new Flush<PendingItem, Accepted>({
      write,
      isPoison: (fault) => codeOf(fault) === 'data' || codeOf(fault) === undefined,
      exclusiveKey: (pending) => pending.item.idempotency?.key ?? null,
      sizeOf: (pending) => pending.item.payload.length + 200,
      itemsMax: flushItemsMax,
      bytesMax: flushBytesMax,
      waitingMax: waitingItemsMax,
      timeoutMs: this.settings.storeTimeoutMs * 0.9,
      timeoutFault: () => Object.assign(new Error('the write waited too long'), { code: 'timeout' }),
      onFlush: (items, durationMs) => {
        this.metrics.flushBatchSize.observe(items)
        this.metrics.flushDuration.observe(durationMs / 1_000)
      },
    })
  }

  async #accept(pending: readonly PendingItem[]): Promise<Accepted[]> {
    const items = pending.map((p) => p.item)
    this.#fair.stamp(items)
    const accepted = await this.store.accept(items, this.#acceptContext())
    this.#learn(items, accepted)
    return accepted
  }

  async #acceptAndApply(
    apply: ((tx: Tx, items: readonly ApplyItem<unknown>[]) => Promise<readonly unknown[]>) | undefined,
    pending: readonly PendingItem[],
  ): Promise<Accepted[]> {
    if (apply === undefined) throw new Error('not an apply definition')
    const items = pending.map((p) => p.item)
    this.#fair.stamp(items)
    const accepted = await this.store.acceptAndApply(items, this.#acceptContext(), async (tx, applied) => {
      const chosen = applied.flatMap((index) => pending[index] ?? [])
      const results = await apply(
        tx,
        chosen.map(({ item, body }) => toApplyItem(item, body)),
      )
      if (results.length !== chosen.length) {
        throw new Error(`apply answered ${results.length} results for ${chosen.length} items`)
      }
      for (const [i, p] of chosen.entries()) p.result = results[i] ?? null
      return results.map((result) => ({ v: 'done', result: result ?? null }))
    })
    this.#learn(items, accepted)
    return accepted
  }

  #learn(items: readonly AcceptItem[], accepted: readonly Accepted[]): void {
    for (const [i, item] of items.entries()) {
      const told = accepted[i]
      if (told !== undefined && 'stamp' in told) this.#fair.learn(item, told.stamp)
    }
  }

  #observe(pulse: Pulse, elapsedMs: number): void {
    this.#held = Object.values(pulse.held).reduce((sum, n) => sum + n, 0)
    this.#acceptedSincePulse = 0
    const rate = elapsedMs > 0 ? this.#settledSincePulse / elapsedMs : 0
    // While nothing is held nothing drains: that says nothing about how fast it could.
    if (this.#held > 0 || rate > 0)
      this.#drainPerMs = this.#drainPerMs === 0 ? rate : this.#drainPerMs * 0.7 + rate * 0.3
    this.#settledSincePulse = 0
    for (const { gates } of this.#definitions.values()) for (const gate of gates) gate.observe?.(pulse)
    for (const id of pulse.cancels) this.#work.cancel(id)
    if (pulse.waiting) this.#work.wake()
    if (pulse.nextDueMs !== null) this.#work.wakeIn(pulse.nextDueMs)
    const { metrics } = this
    metrics.deadLetters.set(pulse.deadLetters)
    metrics.laneOldestSeconds.set(pulse.oldestMs / 1_000)
    metrics.setOperations(
      Object.keys({ ...pulse.held, ...pulse.running }).flatMap((type) => {
        const running = pulse.running[type] ?? 0
        return [
          { type, status: 'pending', count: Math.max(0, (pulse.held[type] ?? 0) - running) },
          { type, status: 'processing', count: running },
        ]
      }),
    )
    const pool = this.store.poolState()
    metrics.setStorePool({ busy: pool.busy, idle: pool.idle, waiting: pool.waiting, max: pool.max })
  }

  #gateBinding(type: string): GateBinding {
    return {
      type,
      now: () => performance.now(),
      pressureLevel: () => this.pressure.level,
      registerCapacity: (name, limit, resumeBelow) => {
        const register = (): Promise<void> => this.store.registerGate(name, limit, resumeBelow)
        this.#registrations.push(register)
        if (!this.presence.isReady) return
        const registering = register()
          .catch((fault: unknown) =>
            this.log.error({ err: fault, gate: name }, 'a capacity gate could not be registered'),
          )
          .finally(() => this.#registering.delete(registering))
        this.#registering.add(registering)
      },
      takeConnection: (pool, identity, limits) => this.#connectionFlush(pool, limits).submit(identity),
      giveConnection: (pool, identity) => this.#giveConnection(pool, identity),
    }
  }

  #connectionFlush(
    pool: string,
    limits: { perIdentity: number; total: number },
  ): Flush<string, 'granted' | 'identity_full' | 'pool_full'> {
    const known = this.#connectionFlushes.get(pool)
    if (known !== undefined) return known
    const flush = new Flush<string, 'granted' | 'identity_full' | 'pool_full'>({
      write: (identities) => this.store.takeConnections(this.presence.worker, pool, identities, limits),
      isPoison: () => false,
      sizeOf: () => 100,
      itemsMax: flushItemsMax,
      bytesMax: flushBytesMax,
      waitingMax: waitingItemsMax,
      timeoutMs: this.settings.storeTimeoutMs * 0.9,
      timeoutFault: () => Object.assign(new Error('the write waited too long'), { code: 'timeout' }),
    })
    this.#connectionFlushes.set(pool, flush)
    return flush
  }

  #giveConnection(pool: string, identity: string): void {
    this.store.giveConnections(this.presence.worker, pool, [identity]).catch((fault: unknown) => {
      if (this.#draining) return
      this.log.warn({ err: fault, pool }, 'could not give a connection back; tried again')
      setTimeout(() => this.#giveConnection(pool, identity), 500).unref()
    })
  }
}

/** 1–255 code points, any character but NUL. The length in UTF-16 units settles all but the longest. */
function isName(text: string): boolean {
  if (text.length === 0 || text.includes('\0')) return false
  return text.length <= limits.nameCodePoints || [...text].length <= limits.nameCodePoints
}

function codeOf(fault: unknown): string | undefined {
  return typeof fault === 'object' && fault !== null && 'code' in fault && typeof fault.code === 'string'
    ? fault.code
    : undefined
}

const toApplyItem = (item: AcceptItem, body: unknown): ApplyItem<unknown> => ({
  id: item.id,
  identity: item.identity,
  body,
  queue: item.queue,
  partition: item.partition,
  seq: 0,
  traceparent: item.traceparent,
})

function settledAnswer(operationId: string, outcome: Exclude<Outcome, { kind: 'retry' | 'released' }>): Answer {
  switch (outcome.kind) {
    case 'completed':
      return { kind: 'done', operationId, result: outcome.result ?? null, replayed: false }
    case 'failed':
      return { kind: 'failed', operationId, error: outcome.error, result: outcome.result ?? null, replayed: false }
    case 'cancelled':
      return { kind: 'failed', operationId, error: 'The operation was cancelled.', result: null, replayed: false }
  }
}

function replayed(operationId: string, answer: StoredAnswer): Answer {
  switch (answer.v) {
    case 'queue':
      return {
        kind: 'queued',
        operationId,
        place: answer.place,
        waitMs: answer.wait_ms,
        reason: answer.reason,
        replayed: true,
      }
    case 'done':
      return { kind: 'done', operationId, result: answer.result, replayed: true }
    case 'failed':
      return { kind: 'failed', operationId, error: answer.error, result: answer.result ?? null, replayed: true }
    case 'cancelled':
      return { kind: 'failed', operationId, error: 'The operation was cancelled.', result: null, replayed: true }
  }
}

function finishedAnswer(ticket: Ticket): Extract<Answer, { kind: 'done' | 'failed' }> | null {
  switch (ticket.status) {
    case 'completed':
      return { kind: 'done', operationId: ticket.id, result: ticket.result, replayed: false }
    case 'failed':
      return {
        kind: 'failed',
        operationId: ticket.id,
        error: ticket.error ?? '',
        result: ticket.result,
        replayed: false,
      }
    case 'cancelled':
      return {
        kind: 'failed',
        operationId: ticket.id,
        error: 'The operation was cancelled.',
        result: null,
        replayed: false,
      }
    default:
      return null
  }
}
