/** The intake as its users see it: `createIntake`, and what it returns. Loaded when the first one is made. */
import type { Server } from 'node:http'
import type { Static, TSchema } from 'typebox'
import { keyOf } from '../accept/accept-item.js'
import { type LaneName, laneOf } from '../core/lane.js'
import type { OperationReport } from '../core/operation-status.js'
import { type IntakeLog, type IntakeSettings, intakeDefaults } from '../core/settings.js'
import { type ConnectionPool, connectionPool, type PoolOptions } from '../fleet/connection-pool.js'
import { guardRequests } from '../http/connections.js'
import { type FastifyRoute, fastifyRoute } from '../http/fastify-binding.js'
import { type FetchHandler, fetchHandler } from '../http/fetch-binding.js'
import type { FastifyLike, TicketRoutesOptions } from '../http/operations-routes.js'
import { requireTypebox } from '../http/validation.js'
import { Ledger } from '../ledger/ledger.js'
import { createMetrics, type Metrics } from '../metrics/metrics.js'
import type { CancelOutcome, Store, Tx } from '../store/port.js'
import type { Answer } from './answer.js'
import type { DefineOptions, Definition, IntakeRequest } from './define.js'
import { Intake } from './intake.js'

export interface IntakeOptions extends Partial<IntakeSettings> {
  store: Store | Promise<Store>
  log?: IntakeLog
  metrics?: Metrics
  /** False: return before the database is connected, and refuse with 503 until then. Default true. */
  waitForStore?: boolean
}

export interface SubmitOptions {
  identity?: string
  idempotencyKey?: string
  /** The text that the key identifies, if not the body: another text with the same key is a mistake. */
  keyedOn?: string
  /** Queue it, do not run it now. */
  respondAsync?: boolean
  /**
   * Wait this long for a queued one, then answer as if it had run now. 0, for a `run` definition: if a slot is free run it
   * here, and answer with its ticket at once (`queued`, reason `still_running`); else queue it, with another reason.
   */
  waitMs?: number
  traceparent?: string
  signal?: AbortSignal
}

export interface SubmitAllOptions extends SubmitOptions {
  /** The bodies as JSON, if the caller has them. */
  texts?: readonly string[]
}

export interface IntakeApi {
  /** Defines an operation: its body, its lane, its gates, and its handler. */
  define<S extends TSchema, Result>(type: string, options: DefineOptions<S, Result>): Definition<Static<S>, Result>
  /** For Fastify: `app.route({ method: 'POST', url: '/orders', ...intake.route(placeOrder) })`. */
  route(definition: Definition): FastifyRoute
  /** For everything else: `(Request, { clientAddress }) => Promise<Response>`. */
  fetch(definition: Definition): FetchHandler
  /**
   * For your own HTTP server: under overload it accepts new connections in time, and `whenBusy: 'refuse'` learns how long
   * requests have waited. Call it once its routes are registered (Fastify: after `await app.ready()`).
   */
  guard(server: Server): void
  /** Without HTTP. */
  submit<Body>(definition: Definition<Body>, body: Body, options?: SubmitOptions): Promise<Answer>
  /**
   * Several items of one request, for a definition with a SqlEffect: written together, each done or queued by its own lane.
   * When the queue is full and one would have to wait in it, all are refused. With `tx`: in that transaction.
   */
  submitAll<Body>(
    definition: Definition<Body>,
    bodies: readonly Body[],
    options?: SubmitAllOptions,
    tx?: Tx,
  ): Promise<Answer[]>
  /** Inside your own PostgreSQL transaction (`client` is a node-postgres client): it is queued if and when that commits. */
  enqueue<Body>(definition: Definition<Body>, body: Body, client: Tx, options?: SubmitOptions): Promise<Answer>
  /** For Fastify: `app.register(intake.ticketRoutes())` mounts reading, waiting, cancelling and redriving. */
  ticketRoutes(options?: TicketRoutesOptions): (app: FastifyLike) => Promise<void>
  /**
   * Refuses every operation with the `halt` gate of this scope (default `system`), on every instance, until `resume`. With
   * `tx`: if and when that commits. False when it was halted already.
   */
  halt(reason: string, scope?: string, tx?: Tx): Promise<boolean>
  /** False when it was not halted. */
  resume(scope?: string, tx?: Tx): Promise<boolean>
  /** Releases capacity that `apply` definitions hold, in the transaction that removes their rows. */
  releaseCapacity(tx: Tx, gate: string, count: number): Promise<void>
  /** Runs `work` in a short transaction of the store; an error rolls it back. Default 10 s. */
  transaction<T>(work: (tx: Tx) => Promise<T>, options?: { timeoutMs?: number }): Promise<T>
  /** Your own statement, on the connections for reads; it is its own transaction. */
  read: Tx['query']
  /**
   * Your own statements that write, each its own transaction, prepared once per connection: `take` for statements that bring
   * work, `release` for statements that end work, on connections that nothing else can use up.
   */
  readonly statements: { take: Tx['query']; release: Tx['query'] }
  /** Pauses operations of this type, on every instance, until `resumeType`: they are queued and wait. */
  pauseType(definition: Definition): Promise<void>
  resumeType(definition: Definition): Promise<void>
  /** Witnessed events, hash-chained. */
  readonly ledger: Ledger
  /**
   * Calls `heard` with the text of `pg_notify(channel, name || ':' || text)`. A hint: it may be lost. `missed` is called
   * when some may be lost, which is each second if listening is not possible.
   */
  onNotice(name: string, heard: (text: string) => void, missed?: () => void): void
  /**
   * Permits held for any length of time, limited per identity and in total over all instances; shared with the `connections`
   * gates of the same pool name.
   */
  pool(options: PoolOptions): ConnectionPool
  /**
   * Like POST …/cancel: `cancelled` when it was queued, `asked` when it runs and its handler is asked to stop, `running`
   * when it cannot be stopped, `gone` when it is finished or unknown.
   */
  cancel(id: string, why: string): Promise<CancelOutcome>
  /** Discards the stored outcome of this operation: its Idempotency-Key can be used as if for the first time. */
  forgetKey(definition: Definition, used: { identity: string; key: string; operationId: string }): Promise<void>
  /** The status of operations; one statement for up to 2,000, cheap enough for each second. */
  statusOf(ids: readonly string[]): Promise<OperationReport[]>
  /** Unfinished operations of each lane. */
  laneDepths(lanes: readonly LaneName[]): Promise<number[]>
  /** This process's current id; it changes after the lease is lost. */
  readonly instance: string
  /** Reads the shared state (gates, halts) now, instead of within a second. */
  refresh(): Promise<void>
  /** Drains: refuses new submissions, finishes running operations, gives the rest back. */
  close(): Promise<void>
  readonly metrics: Metrics
  /** For our own packages. */
  readonly core: Intake
}

/** Without typebox, `define` says what to install. Any other failure is an error. */
async function loadTypebox(): Promise<void> {
  await import('../http/typebox.js').catch((fault: unknown) => {
    if ((fault as { code?: unknown }).code !== 'ERR_MODULE_NOT_FOUND') throw fault
  })
}

/** The default timeout of a transaction. */
const transactionMs = 10_000

const silent: IntakeLog = { debug: nothing, info: nothing, warn: nothing, error: nothing }
function nothing(): void {}

export async function openIntake(options: IntakeOptions): Promise<IntakeApi> {
  const { store, log, metrics, waitForStore, ...settings } = options
  await loadTypebox()
  const core = new Intake({
    store: await store,
    settings: { ...intakeDefaults, ...settings },
    log: log ?? silent,
    metrics: metrics ?? createMetrics(),
  })
  const started = core.start()
  if (waitForStore !== false) await started
  else started.catch((fault: unknown) => core.log.error({ err: fault }, 'the store cannot be used'))
  return intakeApi(core)
}

export function intakeApi(core: Intake): IntakeApi {
  const submission = (body: unknown, options: SubmitOptions, text?: string) => ({
    body,
    ...(text !== undefined && { text }),
    identity: options.identity ?? 'local',
    request: localRequest(options),
    ...(options.idempotencyKey !== undefined && { idempotencyKey: options.idempotencyKey }),
    ...(options.keyedOn !== undefined && { keyedOn: options.keyedOn }),
    ...(options.respondAsync !== undefined && { respondAsync: options.respondAsync }),
    ...(options.waitMs !== undefined && { waitMs: options.waitMs }),
    ...(options.signal && { signal: options.signal }),
  })
  return {
    define: (type, definition) => {
      requireTypebox()
      return core.define(type, definition)
    },
    route: (definition) => fastifyRoute(core, core.bound(definition)),
    fetch: (definition) => fetchHandler(core, core.bound(definition)),
    guard: (server) => guardRequests(server, core.door),
    submit: async (definition, body, options = {}) => {
      const bound = core.bound(definition)
      const request = submission(body, options)
      const gate = { identity: request.identity, clientAddress: 'local' }
      const refusal = core.admit(bound, gate)
      if (refusal !== null) return { kind: 'refused', refusal }
      const permits = await core.acquire(bound, gate)
      if (!Array.isArray(permits)) return { kind: 'refused', refusal: permits }
      try {
        return await core.submit(bound, request)
      } finally {
        for (const permit of permits) permit.release()
      }
    },
    submitAll: (definition, bodies, options = {}, tx) => {
      const { idempotencyKey: key, texts } = options
      return core.submitAll(
        core.bound(definition),
        // Each has its own key, made from the request's key.
        bodies.map((body, i) =>
          submission(body, { ...options, ...(key !== undefined && { idempotencyKey: `${key}\0${i}` }) }, texts?.[i]),
        ),
        tx,
      )
    },
    enqueue: (definition, body, client, options = {}) =>
      core.enqueue(core.bound(definition), submission(body, options), client),
    ticketRoutes: (options) => async (app) => {
      const { ticketRoutes } = await import('../http/operations-routes.js')
      await ticketRoutes(core, options)(app)
    },
    halt: async (reason, scope = 'system', tx) => {
      const halted = await core.store.halt(scope, reason, tx)
      if (tx === undefined) await core.presence.beat()
      return halted
    },
    resume: async (scope = 'system', tx) => {
      const resumed = await core.store.unhalt(scope, tx)
      if (tx === undefined) await core.presence.beat()
      return resumed
    },
    releaseCapacity: (tx, gate, count) => core.store.releaseGate(tx, gate, count),
    transaction: async (work, options = {}) => {
      const tx = await core.store.begin(options.timeoutMs ?? transactionMs, 'operators')
      try {
        const result = await work(tx)
        await tx.commit()
        return result
      } catch (fault) {
        await tx.rollback()
        throw fault
      }
    },
    read: core.store.read,
    statements: core.store.statements,
    pauseType: (definition) => core.store.pause('', core.bound(definition).type),
    resumeType: async (definition) => {
      await core.store.resume('', core.bound(definition).type)
      core.wakeAll()
    },
    ledger: new Ledger(core.store),
    onNotice: (name, heard, missed) => {
      core.notices.set(name, heard)
      if (missed !== undefined) core.onMissed.add(missed)
    },
    pool: (options) => connectionPool(core, options),
    cancel: (id, why) => core.cancel(id, why),
    forgetKey: (definition, { identity, key, operationId }) =>
      core.store.forgetKey(keyOf(core.bound(definition).type, identity, key), operationId),
    statusOf: (ids) => core.statusOf(ids),
    laneDepths: (lanes) => core.store.laneDepths(lanes.map((lane) => laneOf(lane).id)),
    get instance() {
      return core.presence.worker
    },
    refresh: () => core.presence.beat(),
    close: () => core.close(),
    metrics: core.metrics,
    core,
  }
}

function localRequest(options: SubmitOptions): IntakeRequest {
  return {
    method: 'POST',
    path: '/',
    headers: {},
    query: new URLSearchParams(),
    params: {},
    clientAddress: 'local',
    user: options.identity === undefined ? null : { id: options.identity, roles: new Set() },
    traceparent: options.traceparent ?? '',
  }
}
