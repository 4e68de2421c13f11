/**
 * The gateway: tracks the routers' status, refuses, and passes tasks to the routers.
 *
 *   refused: router overloaded (503) ─► rate of the tenant (429, tightened under pressure), then
 *     decide   over the broker and back: the broker's durability;  without one: an operation that is run now
 *     message  an operation, committed first (202), which a worker takes to the broker; without one: is run
 */
import { type RouteTask, routingProblemCode, routingStatus } from '@spillway/protocol/wire'
import type { Problem, Wire } from 'spillway/workload'
import {
  type Definition,
  digestUuid,
  type Entered,
  FailOperation,
  type Gate,
  type Gone,
  type Mount,
  mount,
  parseIdempotencyKey,
  parsePreferences,
  pressure,
  RetryOperation,
  type RunContext,
  rate,
  toWire,
} from 'spillway/workload'
import Type from 'typebox'
import { BrokerFault } from '../../brokers/port.js'
import { operatesAll } from '../../http/identity.js'
import type { Answers } from './answers.js'
import type { Burials } from './burials.js'
import type { RoutingDeps } from './deps.js'
import { checkTask, taskDigest } from './envelope.js'
import type { Processing, RouteAnswer } from './processing.js'
import type { RouterStatus } from './router-watch.js'
import type { Signals } from './signals.js'

/** How long a caller of decide waits for its answer. */
const decideMs = 30_000
/**
 * How long a worker waits in one attempt, because it holds a slot meanwhile. A retry finds an earlier decision. Many
 * attempts are allowed, because the router itself answers permanent failures.
 */
const messageMs = 10_000
const messageRetries = 100
/** Room for headers in a broker message: with the 4 KiB that the broker reserves for dead letters, 64 KiB below its limit. */
const envelopeBytes = 61_440
const brokerRetryAfterMs = 5_000

type Task = RouteTask
const AnyTask = Type.Unsafe<Task>(Type.Any())
/** `text`: as received, and as the router gets it. */
type CameTask = { ok: true; task: Task; text: string }

export interface GatewayParts {
  processing: Processing
  signals: Signals
  answers: Answers
  burials: Burials
  /** Whether the policies are loaded. */
  canDecide(): boolean
}

export class Gateway {
  readonly #deps: RoutingDeps
  readonly #processing: Processing
  readonly #signals: Signals
  #isReduced = false
  readonly #answers: Answers
  readonly #burials: Burials
  #status: RouterStatus
  readonly #decide: Definition<Task>
  readonly #admit: Definition<Task>
  readonly #message: Definition<Task>
  readonly #registry: Definition

  constructor(deps: RoutingDeps, parts: GatewayParts) {
    this.#deps = deps
    this.#processing = parts.processing
    this.#signals = parts.signals
    this.#answers = parts.answers
    this.#burials = parts.burials
    // Until the first report. A process without intake does not need it.
    this.#status = deps.settings.isGateway ? 'unknown' : 'inactive'
    const { perMinute, maxDeliver } = deps.settings
    const tries = { maxRetries: deps.broker === null ? maxDeliver - 1 : messageRetries }
    const ready = deps.broker === null ? { ready: parts.canDecide } : {}
    // One lane per task: a tenant's tasks do not wait for each other.
    const lane = (name: string) => (task: Task) => [name, task.request_id.toLowerCase()] as [string, string]
    const byTenant = (limit: number, name: string): Gate<Task> =>
      rate<Task>({ limit: () => this.tightened(limit), per: '1m', by: (_, task) => task.tenant_id, name })
    this.#decide = deps.intake.define('routing.decide', {
      ...{ body: AnyTask, lane: lane('routing.decide'), maxRetries: maxDeliver - 1, ...ready },
      gates: [this.#overloadGate(), pressure(), byTenant(perMinute.decide, 'routes_decide')],
      run: (task, context, text) => this.#runHere(task, context, text),
    })
    this.#message = deps.intake.define('routing.message', {
      ...{ body: AnyTask, lane: lane('routing.message'), ...tries, ...ready },
      gates: [this.#overloadGate(), pressure(), byTenant(perMinute.messages, 'messages')],
      run: (task, context, text) => this.#deliver(task, context, text),
    })
    const admission = { function: `${deps.schema}.rt_admit`, values: () => [] }
    this.#admit = deps.intake.define('routing.admit', {
      ...{ body: AnyTask, whenBusy: 'refuse', apply: admission },
      lane: (task) => ['routing.admit', task.tenant_id],
      gates: [this.#overloadGate(), pressure(), byTenant(perMinute.decide, 'routes_decide')],
    })
    this.#registry = deps.intake.define('routing.registry', {
      ...{ body: Type.Unknown(), whenBusy: 'refuse', apply: admission },
      lane: (_, request) => ['routing.registry', request.user?.id ?? request.clientAddress],
      gates: [
        this.#overloadGate(),
        pressure(),
        rate({ limit: () => this.tightened(perMinute.registry), per: '1m', name: 'registry' }),
      ],
    })
  }

  /** The level to act on: an unknown status counts as warning, but as inactive if no metrics URLs are configured. */
  get level(): 'inactive' | 'warning' | 'active' {
    const { settings, pressure: own } = this.#deps
    if (settings.isRouter || this.#deps.broker === null) return own.level
    if (this.#status !== 'unknown') return this.#status
    return settings.metricsUrls.length === 0 ? 'inactive' : 'warning'
  }

  /** Called by the watch of routers in other processes. */
  heard(status: RouterStatus): void {
    this.#status = status
    this.showLevel()
  }

  /** Call it whenever the level may have changed. */
  showLevel(): void {
    const { metrics, log, settings, broker } = this.#deps
    const { level } = this
    metrics.showStatus(settings.isRouter || broker === null ? level : this.#status)
    const reduced = level !== 'inactive'
    if (reduced === this.#isReduced) return
    this.#isReduced = reduced
    if (!reduced) {
      log.info({ pressure: level }, 'Backpressure over: rate limits restored')
      return
    }
    const { rateReduction: factor, rateMin: floorPerMinute } = settings
    metrics.rateAdjustments.inc()
    log.warn({ pressure: level, factor, floorPerMinute }, 'Backpressure active: reducing rate limits')
  }

  tightened(limit: number): number {
    if (this.level === 'inactive') return limit
    const { rateReduction, rateMin } = this.#deps.settings
    // A limit already below the floor is not raised to it.
    return Math.max(Math.min(limit, rateMin), Math.floor(limit * rateReduction), 1)
  }

  /** For routes without intake: low and medium priority are closed while the router is overloaded. */
  overload(): Problem | null {
    if (this.level !== 'active') return null
    const { metrics, settings } = this.#deps
    metrics.rejected('router_overloaded').inc()
    return {
      code: 'service_overloaded',
      detail: 'Router is overloaded, please retry later',
      retryAfterMs: settings.retryAfterSeconds * 1_000,
    }
  }

  decideMount(): Mount {
    const { broker, intake } = this.#deps
    const { core } = intake
    const definition = broker === null ? this.#decide : this.#admit
    const base = mount(core, core.bound(definition))
    return {
      ...base,
      submit: async (entered, body, gone, text) => {
        const task = this.#taskOf(entered, body, text)
        if (!task.ok) return task.wire
        return broker === null ? this.#decideHere(entered, task, gone) : this.#decideThere(entered, task, gone)
      },
    }
  }

  messageMount(): Mount {
    const { core } = this.#deps.intake
    const bound = core.bound(this.#message)
    const base = mount(core, bound)
    return {
      ...base,
      submit: async (entered, body, gone, given) => {
        const read = this.#taskOf(entered, body, given)
        if (!read.ok) return read.wire
        const { task, text } = read
        const key = parseIdempotencyKey(entered.request.headers['idempotency-key'])
        if (!key.ok) return refuse({ code: 'invalid_request', detail: key.detail })
        const preferences = parsePreferences(entered.request.headers.prefer)
        const { waitSeconds } = preferences
        // Refused now, because the ticket would fail. Before the first connection the broker's limit is unknown.
        const bytesMax = this.#taskBytesMax
        const isBounded = this.#deps.broker !== null
        if (isBounded && Buffer.byteLength(text) > bytesMax) return refuse(tooLarge(bytesMax))
        const { request, identity } = entered
        const answer = await core.submit(bound, {
          ...{ body: task, text, identity, request, respondAsync: true },
          ...(key.key === undefined ? keyInBody(task, text) : { idempotencyKey: key.key }),
          ...(waitSeconds !== undefined && { waitMs: waitSeconds * 1_000, signal: gone('wait') }),
        })
        return toWire(bound, answer, preferences, waitSeconds !== undefined)
      },
    }
  }

  registryMount(change: (entered: Entered, body: unknown) => Promise<Wire>): Mount {
    const { core } = this.#deps.intake
    const bound = core.bound(this.#registry)
    const base = mount(core, bound)
    return {
      ...base,
      submit: async (entered, body) => {
        const { request, identity } = entered
        const admitted = await core.submit(bound, { body: null, identity, request })
        const told = toWire(bound, admitted, parsePreferences(undefined), false)
        if (!told.ok) return told
        const wire = await change(entered, body)
        if (wire.ok) Object.assign(wire.answer.headers, told.answer.headers)
        return wire
      },
    }
  }

  #overloadGate(): Gate<unknown> {
    return {
      kind: 'pressure',
      bind: () => ({
        kind: 'pressure',
        early: () => {
          const problem = this.overload()
          return problem === null ? null : { ...problem, gate: 'pressure' as const }
        },
      }),
    }
  }

  get #taskBytesMax(): number {
    const { broker, settings } = this.#deps
    return Math.min(settings.bodyLimitBytes, (broker?.payloadBytesMax ?? Infinity) - envelopeBytes)
  }

  #taskOf({ request, identity }: Entered, body: unknown, text?: string): CameTask | { ok: false; wire: Wire } {
    const checked = body === undefined ? noBody : checkTask(body)
    if (!checked.ok) {
      const { code, message, errors } = checked
      const wire = refuse({
        ...{ code: routingProblemCode(code), detail: message, extensions: { error: { code, message } } },
        ...(errors !== undefined && { errors }),
      })
      return { ok: false, wire }
    }
    const { task } = checked
    const mayAll = request.user !== null && operatesAll(request.user)
    if (this.#deps.settings.isAuthenticated && !mayAll && task.tenant_id !== identity) {
      const message = 'tenant_id is not the authenticated subject.'
      const wire = refuse({
        ...{ code: 'tenant_forbidden', detail: message, extensions: { error: { code: 'TENANT_FORBIDDEN', message } } },
      })
      return { ok: false, wire }
    }
    return { ok: true, task, text: text ?? JSON.stringify(task) }
  }

  async #decideHere(entered: Entered, { task, text }: CameTask, gone: Gone): Promise<Wire> {
    const { core } = this.#deps.intake
    const bound = core.bound(this.#decide)
    const { request, identity } = entered
    const key = parseIdempotencyKey(request.headers['idempotency-key'])
    if (!key.ok) return refuse({ code: 'invalid_request', detail: key.detail })
    const preferences = parsePreferences(request.headers.prefer)
    const isPlain = preferences.waitSeconds === undefined && !preferences.respondAsync
    const answer = await core.submit(bound, {
      ...{ body: task, text, identity, request, respondAsync: preferences.respondAsync },
      ...(key.key !== undefined && { idempotencyKey: key.key }),
      ...(preferences.waitSeconds !== undefined && { waitMs: preferences.waitSeconds * 1_000, signal: gone('wait') }),
      // Of several requests with one id the first runs, and the others wait as long as it may take.
      ...(isPlain && { waitMs: core.settings.directWaitMs }),
    })
    const wire = toWire(bound, answer, preferences, preferences.waitSeconds !== undefined)
    if (answer.kind === 'failed') return refuse(failedProblem)
    if (!wire.ok || answer.kind !== 'done') return wire
    return answered(answer.result as RouteAnswer, wire.answer.headers)
  }

  async #decideThere({ request, identity }: Entered, came: CameTask, gone: Gone): Promise<Wire> {
    const { broker, intake, log } = this.#deps
    if (broker === null) throw new Error('there is no broker')
    const key = parseIdempotencyKey(request.headers['idempotency-key'])
    if (!key.ok) return refuse({ code: 'invalid_request', detail: key.detail })
    if (!broker.isConnected) return refuse(brokerAway)
    const data = Buffer.from(came.text)
    const bytesMax = this.#taskBytesMax
    if (data.byteLength > bytesMax) return refuse(tooLarge(bytesMax))
    const bound = intake.core.bound(this.#admit)
    // The body is not stored: the operation only passes the gates.
    const admitted = await intake.core.submit(bound, { body: came.task, text: '{}', identity, request })
    const told = toWire(bound, admitted, parsePreferences(undefined), false)
    if (!told.ok) return told
    try {
      const headers: Record<string, string> = { traceparent: request.traceparent }
      if (key.key !== undefined) headers['Spillway-Idempotency-Key'] = digestUuid(`${identity}\0${key.key}`)
      const reply = await broker.ask({ data, headers, deadlineMs: Date.now() + decideMs }, decideMs, gone('work'))
      return answered(JSON.parse(Buffer.from(reply).toString()) as RouteAnswer, told.answer.headers)
    } catch (fault) {
      if (!(fault instanceof BrokerFault)) throw fault
      if (fault.code === 'too_large') return refuse(tooLarge(bytesMax))
      if (fault.code !== 'aborted') log.warn({ err: fault }, 'a decision did not come back')
      return refuse(fault.code === 'timeout' ? lateProblem : brokerAway)
    }
  }

  /** Without a broker: the operation queue is the intake, and its workers are the routers. */
  async #runHere(task: Task, context: RunContext, text: string): Promise<RouteAnswer> {
    const { metrics } = this.#deps
    metrics.delivered.inc()
    if (context.attempt > 1) metrics.redelivered.inc()
    this.#signals.began()
    try {
      const answer = await this.#processing.answer(task, {
        text,
        traceId: traceIdOf(context),
        isTicket: true,
        isRepeat: context.attempt > 1,
      })
      this.#signals.ended(answer.ok ? 'ok' : 'undecided', sinceAccepted(context), true)
      return answer
    } catch (fault) {
      if (context.attempt >= context.maxAttempts) this.#signals.ended('exhausted', sinceAccepted(context), false)
      else this.#signals.putBack()
      throw fault
    }
  }

  /** Accepted with 202: goes to the router, and its answer becomes the operation's result. */
  async #deliver(task: Task, context: RunContext, text: string): Promise<RouteAnswer> {
    const isHere = this.#deps.broker === null
    const answer = isHere ? await this.#runHere(task, context, text) : await this.#carry(task, context, text)
    if (!answer.ok) throw new FailOperation(`${answer.error.code}: ${answer.error.message}`)
    return answer
  }

  async #carry(task: Task, context: RunContext, text: string): Promise<RouteAnswer> {
    const { broker } = this.#deps
    if (broker === null) throw new Error('there is no broker')
    // An earlier attempt may have been decided and only its answer lost: the broker would drop a second message.
    const known = context.attempt > 1 ? await this.#answers.find(task.tenant_id, task.request_id) : null
    if (known !== null) {
      return { ok: true, decision: known.decision, context: { request_id: task.request_id, trace_id: known.traceId } }
    }
    const isFirst = context.attempt === 1
    // A late first attempt may have been redriven, or returned by a process that ended.
    const isNew = isFirst && sinceAccepted(context) < messageMs
    const error = isNew ? null : await this.#burials.tell(context.id, isFirst)
    if (error !== null) throw new FailOperation(error)
    try {
      const told = await broker.ask(
        {
          data: Buffer.from(text),
          id: context.id,
          headers: { traceparent: context.traceparent, 'Spillway-Ticket': context.id },
        },
        messageMs,
        context.signal,
      )
      const answer = JSON.parse(Buffer.from(told).toString()) as RouteAnswer
      const buried = answer.ok ? null : await this.#burials.tell(context.id, false)
      if (buried !== null) throw new FailOperation(buried)
      return answer
    } catch (fault) {
      if (!(fault instanceof BrokerFault)) throw fault
      if (fault.code === 'too_large')
        throw new FailOperation('PAYLOAD_TOO_LARGE: more than the broker takes', { cause: fault })
      throw new RetryOperation(`the broker: ${fault.code}`, { cause: fault })
    }
  }
}

const noBody = { ok: false, code: 'PAYLOAD_TOO_SMALL', message: 'The request has no body.', errors: undefined } as const

const brokerAway: Problem = {
  code: 'broker_unavailable',
  detail: 'The broker is not reachable now. Nothing was decided; try again later.',
  retryAfterMs: brokerRetryAfterMs,
}

const lateProblem: Problem = {
  code: 'deadline_expired',
  detail: 'The router did not decide in time.',
  retryAfterMs: brokerRetryAfterMs,
  extensions: { error: { code: 'DEADLINE_EXPIRED', message: 'The router did not decide in time.' } },
}

const failedProblem: Problem = {
  code: 'internal_error',
  detail: 'Every attempt to decide failed.',
  extensions: { error: { code: 'internal_error', message: 'Every attempt to decide failed.' } },
}

function tooLarge(bytesMax: number): Problem {
  const message = `A task has at most ${bytesMax} bytes.`
  return { code: 'payload_too_large', detail: message, extensions: { error: { code: 'PAYLOAD_TOO_LARGE', message } } }
}

function refuse(problem: Problem): Wire {
  return { ok: false, problem, headers: {} }
}

function answered(answer: RouteAnswer, headers: Record<string, string>): Wire {
  if (answer.ok) {
    const { replayed, ...body } = answer
    if (replayed === true) headers['idempotent-replayed'] = 'true'
    return { ok: true, answer: { status: 200, headers, body } }
  }
  const { error, errors, context } = answer
  const problem: Problem = {
    ...{ code: routingProblemCode(error.code), detail: error.message, extensions: { error, context } },
    ...(errors !== undefined && { errors }),
    ...(routingStatus(error.code) === 503 && { retryAfterMs: brokerRetryAfterMs }),
  }
  return { ok: false, problem, headers }
}

/** A key in the body belongs to its tenant and covers the task's content. */
function keyInBody(task: Task, text: string): { idempotencyKey: string; keyedOn: string } | undefined {
  const { idempotency_key: key, tenant_id: tenant } = task
  return key === undefined ? undefined : { idempotencyKey: `${tenant}\0${key}`, keyedOn: taskDigest(text) }
}

function traceIdOf({ traceparent }: RunContext): string {
  return traceparent.split('-')[1] ?? ''
}

/** The first 48 bits of the id are the time of acceptance. */
function sinceAccepted({ id }: RunContext): number {
  return Math.max(0, Date.now() - Number.parseInt(id.slice(0, 8) + id.slice(9, 13), 16))
}
