/**
 * The intake: what `createIntake` returns. It puts the parts together, starts and stops them, and has all public calls.
 *
 * Its states: starting ──migrated, enlisted──► ready ──close()──► draining ──► closed. While it is not ready it refuses with
 * 503. A database that fails later shows as faults of single calls, not as a state.
 */
import type { Server } from 'node:http'
import { hostname } from 'node:os'
import { keyOf } from '../accept/accept-item.js'
import { Accepting } from '../accept/accepting.js'
import { OptionError } from '../core/options.js'
import { claimsQueued, type IntakeLog, type IntakeSettings } from '../core/settings.js'
import { type ConnectionPool, connectionPool, type PoolOptions } from '../fleet/connection-pool.js'
import { FleetNumbers, freeSlots } from '../fleet/fleet-numbers.js'
import { GateRegistry } from '../fleet/gate-registry.js'
import { PoolPermits } from '../fleet/pool-permits.js'
import { Presence } from '../fleet/presence.js'
import { pulseMetrics } from '../fleet/pulse-metrics.js'
import { guardRequests } from '../http/connections.js'
import { type FastifyRoute, fastifyRoute } from '../http/fastify-binding.js'
import type { FastifyLike } from '../http/fastify-tickets.js'
import { type FetchHandler, fetchHandler } from '../http/fetch-binding.js'
import { type FetchTickets, fetchTickets } from '../http/fetch-tickets.js'
import { type NodeHandler, nodeHandler } from '../http/node-binding.js'
import { expressTickets, type NodeTickets, nodeTickets } from '../http/node-tickets.js'
import { isStandardSchema } from '../http/standard-schema.js'
import type { TicketRoutesOptions } from '../http/tickets.js'
import { Ledger } from '../ledger/ledger.js'
import { queueSweeps, type Sweeps } from '../maintenance/sweeps.js'
import type { Metrics } from '../metrics/metrics.js'
import { loadTracing } from '../metrics/trace.js'
import { Door } from '../pressure/door.js'
import { ProcessPressure } from '../pressure/process-pressure.js'
import type { CancelOutcome, Pulse, Store, Tx } from '../store/port.js'
import { withDeadline } from '../time/with-deadline.js'
import { cancelPatiently } from '../work/cancel.js'
import { ProgressWriter } from '../work/progress.js'
import { SlotGroups, type Slots } from '../work/slot-groups.js'
import { Waiters } from '../work/waiters.js'
import type { Admission, AdmissionOptions } from './admission.js'
import type { Answer } from './answer.js'
import { DeadLetterCalls } from './dead-letters.js'
import type { BodySchema, DefineOptions, Definition, Identify, InputOf } from './define.js'
import { Definitions } from './definitions.js'
import { Events, type IntakeEvents, type IntakeListener } from './events.js'
import { LaneCalls } from './lanes.js'
import { answerMany, type Prepared } from './many.js'
import { keyOfItem } from './operation-options.js'
import { within } from './own-transaction.js'
import { Pipeline } from './pipeline.js'
import { type ScheduleBody, type ScheduleOptions, Schedules } from './schedules.js'
import {
  type Bound,
  checkEnqueueOptions,
  checkMany,
  checkSubmitOptions,
  type EnqueueManyOptions,
  type EnqueueOptions,
  type Submission,
  type SubmitAllOptions,
  type SubmitManyOptions,
  type SubmitOptions,
  submissionOf,
  submissionsOf,
} from './submission.js'
import { TicketCalls } from './tickets.js'
import { Answering } from './verdict-to-answer.js'

/** The time of `close` beyond `drainMs`. */
const closeGraceMs = 1_000
/** How many expired operations are looked up at a time, and how long a heartbeat may spend on ending them. */
const expiredPerLook = 200
const expiringMs = 500
/** The default timeout of a transaction. */
const transactionMs = 10_000

export class Intake {
  readonly store: Store
  readonly settings: IntakeSettings
  readonly log: IntakeLog
  readonly metrics: Metrics
  /** Who asks, where a definition does not say it. */
  readonly identity: Identify | undefined
  readonly pressure: ProcessPressure
  /** In front of the HTTP server whose requests come here. */
  readonly door: Door
  readonly waiters: Waiters
  readonly presence: Presence
  readonly sweeps: Sweeps
  readonly fleet = new FleetNumbers()
  readonly pipeline: Pipeline
  /** Operations: read, wait for, cancel and retry them. */
  readonly tickets = new TicketCalls(this)
  /** Operations that failed for good: read, redrive and delete them. */
  readonly deadLetters = new DeadLetterCalls(this)
  /** Which lanes hold operations and why they wait; pause and resume them. */
  readonly lanes = new LaneCalls(this)
  /** Witnessed events, hash-chained. */
  readonly ledger: Ledger
  /** Your own statement, on the connections for reads; it is its own transaction. */
  readonly read: Tx['query']
  /**
   * Your own statements that write, each its own transaction, prepared once per connection: `take` for statements that bring
   * work, `release` for statements that end work, on connections that nothing else can use up.
   */
  readonly statements: { take: Tx['query']; release: Tx['query'] }
  /** Where the ticket routes are mounted, if below a path of the host's own: for the `Location` of a 202. */
  ticketPrefix = ''
  readonly #definitions: Definitions
  readonly #slotGroups: SlotGroups
  readonly #schedules: Schedules
  readonly #pools = new Map<string, PoolPermits>()
  readonly #accepting: Accepting
  readonly #progress: ProgressWriter
  readonly #registry: GateRegistry
  /** Null until somebody listens. */
  #events: Events | null = null
  readonly #notices = new Map<string, (text: string) => void>()
  readonly #missed = new Set<() => void>()
  #stopped: Promise<void> | undefined
  #closed: Promise<void> | undefined
  /** Nothing runs any more. Handlers that finish during `close` may still enqueue. */
  #isEnded = false

  constructor(options: {
    store: Store
    settings: IntakeSettings
    log: IntakeLog
    metrics: Metrics
    door?: Door
    identity?: Identify
    /** Monotonic milliseconds, of the gates. Default: this process's. */
    now?: () => number
  }) {
    const { store, settings, log, metrics } = options
    this.store = store
    this.settings = settings
    this.log = log
    this.metrics = metrics
    this.identity = options.identity
    this.door = options.door ?? new Door()
    this.ledger = new Ledger(store)
    this.read = store.read
    this.statements = store.statements
    this.#registry = new GateRegistry(log)
    this.#progress = new ProgressWriter(store, log)
    this.waiters = new Waiters((ids) => store.finished(ids))
    const worker = (): string => this.presence.worker
    this.#accepting = new Accepting({
      ...{ store, settings, metrics, log, worker },
      depth: () => this.queueDepth,
      general: () => this.#slotGroups.general,
    })
    this.pressure = this.#makePressure()
    this.#slotGroups = this.#makeSlotGroups(worker)
    const answering = new Answering({
      ...{ store, metrics, log, waiters: this.waiters, directWaitMs: settings.directWaitMs },
      suspect: () => this.#slotGroups.suspect(),
      announce: () => this.presence.announce('ready'),
      onRefused: (type, refusal) => this.#events?.refused(type, refusal),
    })
    this.presence = this.#makePresence()
    const shared = { store, settings, slotGroups: this.#slotGroups, accepting: this.#accepting }
    this.pipeline = new Pipeline({
      ...{ ...shared, log, metrics, answering, door: this.door, presence: this.presence, registry: this.#registry },
      onApplied: (item, result) => this.#events?.applied(item, result),
    })
    this.#definitions = new Definitions({
      ...{ ...shared, pipeline: this.pipeline, identity: options.identity },
      binding: {
        pressureLevel: () => this.pressure.level,
        registerCapacity: (name, limit, resumeBelow) =>
          this.#registry.add(name, () => store.registerGate(name, limit, resumeBelow)),
        takeConnection: (pool, identity, limits) => this.permitsOf(pool).take(identity, limits),
        now: options.now ?? (() => performance.now()),
      },
    })
    this.#schedules = this.#makeSchedules()
    this.sweeps = queueSweeps(store, settings.retentionMs, { isReady: () => this.isReady, metrics, log })
  }

  #makePressure(): ProcessPressure {
    const {
      pressureLoopDelayMs: loopDelayMs,
      storeTimeoutMs: storeWaitMs,
      pressureInflightMax: inFlight,
    } = this.settings
    return new ProcessPressure({ loopDelayMs, storeWaitMs, inFlight }, () => ({
      storeWaitMs: this.#accepting.oldestMs,
      inFlight: this.pipeline.inFlight,
    }))
  }

  #makeSlotGroups(worker: () => string): SlotGroups {
    const { store, settings, log, metrics } = this
    return new SlotGroups({
      ...{ store, log, worker, accepting: this.#accepting, concurrency: settings.concurrency },
      progress: this.#progress,
      onAttempt: (type, outcome, runMs) => {
        metrics.attempt(type, outcome).inc()
        if (outcome !== 'lease_lost') metrics.operationRun.observe(runMs / 1_000)
      },
      onWait: (waitedMs) => metrics.operationWait.observe(waitedMs / 1_000),
      onSettled: (op, outcome) => {
        this.waiters.hint(op.id)
        if (outcome.kind === 'expired') metrics.expired.labels(op.type).inc()
        this.#events?.settled(op, outcome)
        if (op.gate !== null) this.#definitions.freed(op.gate)
      },
      onLeft: () => this.presence.announce('ready'),
    })
  }

  #makePresence(): Presence {
    const { store, settings, log } = this
    const slotGroups = this.#slotGroups
    return new Presence({
      ...{ store, log, leaseMs: settings.leaseMs, retentionMs: settings.retentionMs },
      name: `${hostname()}:${process.pid}`,
      running: () => ({ ...slotGroups.runningByType(), ...slotGroups.figures(), ...this.fleet.figures() }),
      announced: () => (claimsQueued(settings) ? slotGroups.announced() : {}),
      onPulse: (pulse, elapsedMs) => this.#observe(pulse, elapsedMs),
      afterPulse: async () => {
        await this.#registry.register()
        await slotGroups.lookAfter()
        await this.#schedules.look()
        await this.#endExpired()
      },
      onLost: () => slotGroups.loseAll(),
      onReady: async () => {
        await this.#registry.register()
        this.#startWork()
      },
      onWake: (kind) => {
        const colon = kind.indexOf(':')
        if (colon >= 0) this.#notices.get(kind.slice(0, colon))?.(kind.slice(colon + 1))
        else if (kind === 'cancel') void this.presence.beat()
        else slotGroups.wake()
      },
      missed: this.#missed,
    })
  }

  #makeSchedules(): Schedules {
    const { store, log } = this
    return new Schedules({
      ...{ store, log },
      isDraining: () => this.isDraining,
      checkBody: (call, definition, body, options) => requireValid(call, this.bound(definition), body, options),
      enqueue: (definition, body, tx, options) => this.#enqueue(definition, body, { ...options, tx }),
    })
  }

  /** Defines an operation: its body, its lane, its gates, and its handler. */
  define<S extends BodySchema, Result>(
    type: string,
    options: DefineOptions<S, Result>,
  ): Definition<InputOf<S>, Result> {
    if (this.#closed !== undefined) throw new OptionError(`define(${JSON.stringify(type)}): this intake is closed`)
    const definition = this.#definitions.define(type, options)
    // After this turn of the event loop: definitions made together are known before the first claim.
    setImmediate(() => this.#startWork())
    return definition
  }

  /**
   * Gates without an operation, for work that the intake does not run. `name` is like an operation's type, and names its
   * rates: `const calls = intake.admission('calls', { gates: [rate({ limit: 100, per: '1m' })] })`.
   */
  admission<Body = unknown>(name: string, options: AdmissionOptions<Body>): Admission<Body> {
    return this.#definitions.admission(name, options)
  }

  /** For Fastify: `app.route({ method: 'POST', url: '/orders', ...intake.route(placeOrder) })`. */
  route(definition: Definition): FastifyRoute {
    this.#requireAccepting('route')
    return fastifyRoute(this, definition)
  }

  /** For Express 4 and 5, with or without `express.json()`: `app.post('/orders', intake.express(placeOrder))`. */
  express(definition: Definition): NodeHandler {
    this.#requireAccepting('express')
    return nodeHandler(this, definition)
  }

  /** For node:http: `createServer(intake.node(placeOrder))`. */
  node(definition: Definition): NodeHandler {
    this.#requireAccepting('node')
    return nodeHandler(this, definition)
  }

  /** For everything else: `(Request, { clientAddress }) => Promise<Response>`. */
  fetch(definition: Definition): FetchHandler {
    this.#requireAccepting('fetch')
    return fetchHandler(this, definition)
  }

  /**
   * For your own HTTP server: under overload it accepts new connections in time, and `whenBusy: 'refuse'` learns how long
   * requests have waited. Call it once its routes are registered (Fastify: after `await app.ready()`).
   */
  guard(server: Server): void {
    guardRequests(server, this.door)
  }

  /** For Fastify: `app.register(intake.ticketRoutes())` mounts reading, waiting, cancelling and redriving. */
  ticketRoutes(options?: TicketRoutesOptions): (app: FastifyLike) => Promise<void> {
    return async (app) => {
      const { ticketRoutes } = await import('../http/fastify-tickets.js')
      await ticketRoutes(this, options)(app)
    }
  }

  /**
   * The same for Express: `app.use(intake.expressTickets())`. All other requests go on to `next`. Below a path, give it as
   * `prefix` too: Express does not say it before the first request.
   */
  expressTickets(options?: TicketRoutesOptions & { prefix?: string }): NodeHandler {
    return expressTickets(this, options)
  }

  /** The same for node:http: `createServer((req, res) => tickets(req, res, () => …))`; the last is for all other requests. */
  nodeTickets(options?: TicketRoutesOptions & { prefix?: string }): NodeTickets {
    return nodeTickets(this, options)
  }

  /** The same for everything else: `(Request, { clientAddress }, otherwise?) => Promise<Response>`. */
  fetchTickets(options?: TicketRoutesOptions & { prefix?: string }): FetchTickets {
    return fetchTickets(this, options)
  }

  /**
   * Without HTTP. The body is validated as over HTTP: if it does not fit the schema, or `check` rejects it, the answer is a
   * refusal, mostly with the code `invalid_request` and `errors`.
   */
  async submit<Body, Result>(
    definition: Definition<Body, Result>,
    body: Body,
    options: SubmitOptions = {},
  ): Promise<Answer<Result>> {
    const { pipeline } = this
    const bound = this.bound(definition)
    checkSubmitOptions('submit', options)
    this.#requireAccepting('submit')
    const submission = submissionOf('submit', body, options)
    const gate = { identity: submission.identity, clientAddress: 'local' }
    const refusal = pipeline.refuseEarly(bound, gate)
    if (refusal !== null) return { kind: 'refused', refusal }
    const permits = await pipeline.acquire(bound, gate)
    if (!Array.isArray(permits)) return { kind: 'refused', refusal: permits }
    try {
      const valid = await validated(bound, submission)
      return 'kind' in valid ? valid : ((await pipeline.submit(bound, valid)) as Answer<Result>)
    } finally {
      for (const permit of permits) permit.release()
    }
  }

  /**
   * Many operations in one call, each with an answer of its own, in this order: up to 10,000, written 500 at a time. Nobody
   * waits for their runs: those of a `run` definition are queued, and their answers are tickets; those of an `apply`
   * definition are applied at once where their lane is empty. A body that is not valid is refused by itself. Each option is
   * for all of them, or a function: `submitMany(place, orders, { idempotencyKey: (order) => order.number })`.
   */
  async submitMany<Body, Result>(
    definition: Definition<Body, Result>,
    bodies: readonly Body[],
    options: SubmitManyOptions<Body> = {},
  ): Promise<Answer<Result>[]> {
    const { pipeline } = this
    const bound = this.bound(definition)
    checkMany('submitMany', bodies, options)
    this.#requireAccepting('submitMany')
    const submissions = submissionsOf('submitMany', bodies, options, bound.options.run !== undefined)
    const answers = await answerMany(submissions, {
      call: 'submitMany',
      enter: async (identity) => {
        const gate = { identity, clientAddress: 'local' }
        return pipeline.refuseEarly(bound, gate) ?? pipeline.acquire(bound, gate)
      },
      prepare: (submission) => this.#prepare(bound, submission),
      write: (prepared) => pipeline.submitMany(bound, prepared),
    })
    return answers as Answer<Result>[]
  }

  /** The same in a transaction of yours: they are queued if and when that commits. All are queued, as by `enqueue`. */
  async enqueueMany<Body>(
    definition: Definition<Body>,
    bodies: readonly Body[],
    options: EnqueueManyOptions<Body>,
  ): Promise<Answer[]> {
    const { pipeline } = this
    const bound = this.bound(definition)
    checkMany('enqueueMany', bodies, options, true)
    this.#requireAccepting('enqueueMany')
    this.#requireOpen('enqueueMany')
    const submissions = submissionsOf('enqueueMany', bodies, options, true)
    return within('enqueueMany', options.tx, (tx) =>
      answerMany(submissions, {
        call: 'enqueueMany',
        inOneFlush: true,
        enter: () => Promise.resolve([]),
        prepare: (submission) => this.#prepare(bound, submission),
        write: (prepared) => pipeline.enqueue(bound, prepared, tx),
      }),
    )
  }

  async #prepare(bound: Bound, submission: Submission): Promise<Prepared | Extract<Answer, { kind: 'refused' }>> {
    const valid = await validated(bound, submission)
    return 'kind' in valid ? valid : this.pipeline.prepare(bound, valid)
  }

  /**
   * Several items of one request, for a definition with a SqlEffect: written together, each done or queued by its own lane.
   * When a body is not valid, or the queue is full and one would have to wait in it, all are refused. With `tx`: in that
   * transaction.
   */
  async submitAll<Body>(
    definition: Definition<Body>,
    bodies: readonly Body[],
    options: SubmitAllOptions = {},
    tx?: Tx,
  ): Promise<Answer[]> {
    const bound = this.bound(definition)
    checkSubmitOptions('submitAll', options)
    this.#requireAccepting('submitAll')
    const { idempotencyKey: key, texts } = options
    const valid: Submission[] = []
    for (const [i, body] of bodies.entries()) {
      // Each has its own key, made from the request's key.
      const own = { ...options, ...(key !== undefined && { idempotencyKey: keyOfItem(key, i) }) }
      const one = await validated(bound, submissionOf('submitAll', body, own, texts?.[i]))
      if ('kind' in one) return bodies.map(() => one)
      valid.push(one)
    }
    return this.pipeline.submitAll(bound, valid, tx)
  }

  /**
   * Inside your own PostgreSQL transaction: `enqueue(place, order, { tx: client })`, with a node-postgres client. It is queued
   * if and when that commits. The body is validated as by `submit`; look at the answer before you commit.
   */
  async enqueue<Body>(definition: Definition<Body>, body: Body, options: EnqueueOptions): Promise<Answer> {
    checkEnqueueOptions('enqueue', options)
    this.#requireAccepting('enqueue')
    return this.#enqueue(definition, body, options)
  }

  async #enqueue<Body>(definition: Definition<Body>, body: Body, options: EnqueueOptions): Promise<Answer> {
    const bound = this.bound(definition)
    this.#requireOpen('enqueue')
    const prepared = await this.#prepare(bound, { ...submissionOf('enqueue', body, options), respondAsync: true })
    if ('kind' in prepared) return prepared
    const [answer] = await within('enqueue', options.tx, (tx) => this.pipeline.enqueue(bound, [prepared], tx))
    if (answer === undefined) throw new Error('the store gave no verdict')
    return answer
  }

  #requireAccepting(call: string): void {
    if (this.settings.role !== 'work') return
    throw new OptionError(`${call}: this intake has the role "work": it runs operations and accepts none; use "both"`)
  }

  #requireOpen(call: string): void {
    if (this.#isEnded) throw new OptionError(`${call}: this intake is closed; call it before close()`)
  }

  /**
   * A step of `tickets.cancel`, for workloads: `cancelled` when it was queued, `asked` when it runs and its handler is asked to stop, `running`
   * when it cannot be stopped, `gone` when it is finished or unknown.
   */
  async cancel(id: string, why: string): Promise<CancelOutcome> {
    const outcome = await cancelPatiently(this.store, id, this.abortableTypes, why)
    if (outcome === 'cancelled') {
      this.waiters.hint(id)
      this.wakeAll()
    } else if (outcome === 'asked' && !this.#slotGroups.cancel(id)) this.wakeAll('cancel')
    return outcome
  }

  /** Discards the stored outcome of this operation: its Idempotency-Key can be used as if for the first time. */
  forgetKey(definition: Definition, used: { identity: string; key: string; operationId: string }): Promise<void> {
    return this.store.forgetKey(keyOf(this.bound(definition).type, used.identity, used.key), used.operationId)
  }

  /**
   * Recurring work: one operation per due time over all processes, also when they crash or their clocks differ. `cron` has five
   * fields, or six with seconds first. `body` may be a function of the due time. A schedule runs while any process defines it.
   *
   *   intake.schedule('0 3 * * *', cleanUp, {}, { timezone: 'Europe/Berlin', missed: 'once' })
   */
  schedule<Body>(
    cron: string,
    definition: Definition<Body>,
    body: ScheduleBody<NoInfer<Body>>,
    options: ScheduleOptions = {},
  ): void {
    if (this.#closed !== undefined) throw new OptionError('schedule: this intake is closed')
    this.bound(definition)
    this.#schedules.add(cron, definition, body, options)
  }

  /**
   * Refuses every operation with the `halt` gate of this scope (default `system`), on every instance, until `resume`. With
   * `tx`: if and when that commits. False when it was halted already.
   */
  async halt(reason: string, scope = 'system', tx?: Tx): Promise<boolean> {
    const halted = await this.store.halt(scope, reason, tx)
    if (tx === undefined) await this.presence.beat()
    return halted
  }

  /** False when it was not halted. */
  async resume(scope = 'system', tx?: Tx): Promise<boolean> {
    const resumed = await this.store.unhalt(scope, tx)
    if (tx === undefined) await this.presence.beat()
    return resumed
  }

  /** Releases capacity that `apply` definitions hold, in the transaction that removes their rows. */
  releaseCapacity(tx: Tx, gate: string, count: number): Promise<void> {
    return this.store.releaseGate(tx, gate, count)
  }

  /** Runs `work` in a short transaction of the store; an error rolls it back. Default 10 s. */
  async transaction<T>(work: (tx: Tx) => Promise<T>, options: { timeoutMs?: number } = {}): Promise<T> {
    const tx = await this.store.begin(options.timeoutMs ?? transactionMs, 'operators')
    try {
      const result = await work(tx)
      await tx.commit()
      return result
    } catch (fault) {
      await tx.rollback()
      throw fault
    }
  }

  /**
   * Calls `listener` for each event of this process, after its commit: `completed`, `retried`, `failed`, `dead`, `refused`. An
   * error of a listener is logged. Returns a function that ends it.
   */
  on<Name extends keyof IntakeEvents>(name: Name, listener: IntakeListener<Name>): () => void {
    this.#events ??= new Events(this.log)
    return this.#events.on(name, listener)
  }

  /**
   * Calls `heard` with the text of `pg_notify(channel, name || ':' || text)`. A hint: it may be lost. `missed` is called
   * when some may be lost, which is each second if listening is not possible.
   */
  onNotice(name: string, heard: (text: string) => void, missed?: () => void): void {
    this.#notices.set(name, heard)
    if (missed !== undefined) this.#missed.add(missed)
  }

  /**
   * Permits held for any length of time, limited per identity and in total over all instances; shared with the `connections`
   * gates of the same pool name.
   */
  pool(options: PoolOptions): ConnectionPool {
    return connectionPool(this, options)
  }

  /** This process's current id; it changes after the lease is lost. */
  get instance(): string {
    return this.presence.worker
  }

  /** Reads the shared state (gates, halts) now, instead of within a second. */
  refresh(): Promise<void> {
    return this.presence.beat()
  }

  /** Something is under way: a request, a write, or a run. */
  get isBusy(): boolean {
    const running = Object.values(this.#slotGroups.runningByType()).some((n) => n > 0)
    return running || this.pipeline.inFlight > 0 || this.#accepting.oldestMs > 0
  }

  /** For tests that have moved the store's clock: this process knows what the store does when it resolves. */
  async catchUp(): Promise<void> {
    // A heartbeat and its tasks may be under way, and have seen the time before.
    await this.presence.beatAfter()
    await this.presence.beatAfter()
    this.#slotGroups.wake()
  }

  /** For tests that have emptied the store: what this process has and knows of it is void. */
  async forgetAll(): Promise<void> {
    this.#slotGroups.loseAll()
    this.#definitions.forget()
    this.#schedules.forget()
    await this.catchUp()
  }

  bound(definition: Definition): Bound {
    return this.#definitions.get(definition)
  }

  find(type: string): Bound | undefined {
    return this.#definitions.find(type)
  }

  /** Where operations of a type run. */
  slotsOf(type: string): Slots {
    return this.find(type)?.slots ?? this.#slotGroups.general
  }

  /** Free for a type in all processes, as of their last heartbeats; null: none has reported that it runs the type. */
  freeSlots(type: string): number | null {
    const all = this.fleet.figure(freeSlots(type))
    const own = this.#slotGroups.freeSlots(type)
    return own === null ? all : Math.max(own, all ?? 0)
  }

  get typesWithIdentity(): string[] {
    return this.#definitions.typesWithIdentity
  }

  get abortableTypes(): string[] {
    return this.#definitions.abortableTypes
  }

  get isReady(): boolean {
    return this.pipeline.isReady
  }

  get isDraining(): boolean {
    return this.pipeline.isDraining
  }

  /** Whether an operation of this type would run at once, if its lane is empty. */
  hasSlot(definition: Definition): boolean {
    return this.pipeline.busy <= this.settings.busyQueueAbove && this.bound(definition).slots.work.canReserve
  }

  /** Operations in the queue, of all processes. */
  get queueDepth(): number {
    return this.#slotGroups.depth
  }

  /** Operations were changed from outside (redrive, resume): look for work, here and elsewhere. */
  wakeAll(kind: 'ready' | 'cancel' = 'ready'): void {
    this.#slotGroups.wake()
    this.presence.announce(kind)
  }

  /** Permits of a pool, shared by all instances. */
  permitsOf(pool: string): PoolPermits {
    const known = this.#pools.get(pool)
    if (known !== undefined) return known
    const { store, log, presence, settings } = this
    const permits = new PoolPermits({
      ...{ store, pool, log, timeoutMs: settings.storeTimeoutMs * 0.9 },
      worker: () => presence.worker,
      isEnlisted: () => presence.isEnlisted,
    })
    this.#pools.set(pool, permits)
    this.fleet.report(`pool:${pool}`, () => permits.held)
    return permits
  }

  /** `mayRetry`: whether a failed connection is tried again. Default: until it succeeds. */
  async start(mayRetry?: (fault: unknown) => boolean): Promise<void> {
    await loadTracing()
    this.pressure.start()
    await this.presence.start(mayRetry)
    this.sweeps.start()
  }

  /** Refuses new submissions from here on. */
  drain(): void {
    this.pipeline.drain()
  }

  /** Finishes running operations, gives back the rest, answers waiting callers; the store stays open. */
  stop(): Promise<void> {
    this.#stopped ??= (async () => {
      this.drain()
      await Promise.all([this.sweeps.stop(), this.#accepting.drained()])
      await this.#slotGroups.stop(this.settings.drainMs)
      await this.#progress.stop()
      this.waiters.close()
    })()
    return this.#stopped
  }

  /**
   * Drains: refuses new submissions, finishes running operations, gives the rest back. Takes at most `drainMs` and a second,
   * whatever handlers and the database do: what was not given back by then, others take over when the lease runs out.
   */
  close(): Promise<void> {
    this.#closed ??= (async () => {
      const deadline = performance.now() + this.settings.drainMs + closeGraceMs
      await withDeadline(this.#signOff(), this.settings.drainMs + closeGraceMs * 0.8, () => {
        this.log.warn({ drainMs: this.settings.drainMs }, 'closing took too long; the rest is left to other processes')
      })
      this.#isEnded = true
      await this.store.close(Math.max(1, deadline - performance.now()))
    })()
    return this.#closed
  }

  async #signOff(): Promise<void> {
    await this.stop()
    this.pressure.stop()
    await this.presence.stop()
  }

  /** Ends expired operations that no process claims (paused, parked, behind others). One that is claimed is ended by its process. */
  async #endExpired(): Promise<void> {
    if (!this.fleet.holdsAny) return
    const until = performance.now() + expiringMs
    for (let ended = 0; performance.now() < until; ) {
      const due = await this.store.expired(expiredPerLook)
      for (const { id, type } of due) {
        if (performance.now() >= until || !(await this.store.expire(id))) continue
        ended++
        this.metrics.expired.labels(type).inc()
        this.waiters.hint(id)
      }
      if (due.length === expiredPerLook && ended > 0) continue
      if (ended > 0) this.wakeAll()
      return
    }
  }

  /** Claims start once the database is connected and something is defined. */
  #startWork(): void {
    if (claimsQueued(this.settings) && this.presence.isEnlisted && !this.isDraining) this.#slotGroups.start()
  }

  #observe(pulse: Pulse, elapsedMs: number): void {
    this.fleet.observe(pulse)
    this.#slotGroups.observe(pulse, elapsedMs)
    this.#definitions.observe(pulse)
    pulseMetrics(this.metrics, this.fleet, pulse, this.store.poolState())
  }
}

/**
 * The submission with the value that the schema makes of its body, or the refusal of a body that is not valid. The text that
 * is stored is that of the body as it was given.
 */
async function validated(
  bound: Bound,
  submission: Submission,
): Promise<Submission | Extract<Answer, { kind: 'refused' }>> {
  const text = submission.text ?? textOf(bound.type, submission.body)
  // Another process runs it from the text, so what the text cannot hold (a Date, undefined) is refused now, not then.
  const body = isStandardSchema(bound.options.body) ? JSON.parse(text) : submission.body
  const parsing = bound.parse(body, submission.request)
  const parsed = parsing instanceof Promise ? await parsing : parsing
  if (!parsed.ok) return { kind: 'refused', refusal: { ...parsed.problem, gate: 'body' } }
  return { ...submission, body: parsed.value, text }
}

/** For a body that is submitted later: a check that is asynchronous waits until then. */
function requireValid(call: string, bound: Bound, body: unknown, options: SubmitOptions): void {
  const parsed = bound.parse(JSON.parse(textOf(bound.type, body)), submissionOf(call, body, options).request)
  if (parsed instanceof Promise || parsed.ok) return
  const { detail, errors = [] } = parsed.problem
  const places = errors.map(({ path, message }) => `${path || '/'}: ${message}`)
  throw new OptionError(`${call}: the body is not valid for ${bound.type}: ${[detail, ...places].join('; ')}`)
}

function textOf(type: string, body: unknown): string {
  let text: string | undefined
  try {
    text = JSON.stringify(body ?? null)
  } catch (fault) {
    throw new OptionError(`a body of ${type} cannot be stored as JSON: ${(fault as Error).message}`, { cause: fault })
  }
  if (text === undefined) throw new OptionError(`a body of ${type} cannot be stored as JSON: it is a ${typeof body}`)
  return text
}
