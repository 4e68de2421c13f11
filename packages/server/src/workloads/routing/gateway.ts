/**
 * The gateway: tracks the routers' status, refuses, and passes tasks to the routers.
 *
 *   refused: router overloaded (503) ─► rate of the tenant (429, tightened under pressure), then
 *     decide   over the broker and back: the broker's durability;  without one: an operation that is run now
 *     message  an operation, committed first (202), which a worker takes to the broker; without one: is run
 */
import { type RouteTask, routingProblemCode, routingStatus } from '@spillway/protocol/wire'
import type { Admission, Answer, Entered, Gone, Mount, Parsed, Problem, Wire } from 'spillway/workload'
import {
  type Definition,
  digestUuid,
  type Gate,
  mountAdmission,
  mountOf,
  pressure,
  rate,
  rateHeaders,
  refusalWire,
  type Submission,
  toWire,
} from 'spillway/workload'
import Type from 'typebox'
import { operatesAll } from '../../auth/identity.js'
import { BrokerFault, type RouterBroker } from '../../brokers/port.js'
import { checkTask, taskDigest } from './envelope.js'
import type { RoutingDeps } from './parts.js'
import type { RouteAnswer } from './processing.js'
import type { RouterStatus } from './router-watch.js'
import { decodeAnswer, TaskRunner, type TaskRunnerParts } from './task-runner.js'

/** How long a caller of decide waits for its answer. */
const decideMs = 30_000
/** With a broker. Many, because an attempt ends early when the broker is away, and the router itself answers permanent failures. */
const messageRetries = 100
/** Room for headers in a broker message: with the 4 KiB that the broker reserves for dead letters, 64 KiB below its limit. */
const envelopeBytes = 61_440
const brokerRetryAfterMs = 5_000

const AnyTask = Type.Unsafe<RouteTask>(Type.Any())

export interface GatewayParts extends TaskRunnerParts {
  /** Whether the policies are loaded. */
  canDecide(): boolean
}

export class Gateway {
  readonly #deps: RoutingDeps
  #isReduced = false
  #status: RouterStatus
  readonly #decide: Definition<RouteTask>
  readonly #message: Definition<RouteTask>
  /** For decisions over the broker: no operation is written. */
  readonly #decisions: Admission<RouteTask>
  readonly #registry: Admission

  constructor(deps: RoutingDeps, parts: GatewayParts) {
    this.#deps = deps
    // Until the first report. A process without intake does not need it.
    this.#status = deps.settings.isGateway ? 'unknown' : 'inactive'
    const runner = new TaskRunner(deps, parts)
    const { perMinute, maxDeliver } = deps.settings
    const tries = { maxRetries: deps.broker === null ? maxDeliver - 1 : messageRetries }
    const ready = deps.broker === null ? { ready: parts.canDecide } : {}
    // One lane per task: a tenant's tasks do not wait for each other.
    const lane = (name: string) => (task: RouteTask) => [name, task.request_id.toLowerCase()] as [string, string]
    const perTenant = (limit: number, name: string): Gate<RouteTask>[] => [
      ...[this.#overloadGate(), pressure()],
      rate({ limit: () => this.tightened(limit), per: '1m', by: (_, task) => task.tenant_id, name }),
    ]
    this.#decide = deps.intake.define('routing.decide', {
      ...{ body: AnyTask, lane: lane('routing.decide'), maxRetries: maxDeliver - 1, ...ready },
      gates: perTenant(perMinute.decide, 'routes_decide'),
      run: (task, context, text) => runner.decide(task, context, text),
    })
    this.#message = deps.intake.define('routing.message', {
      ...{ body: AnyTask, lane: lane('routing.message'), ...tries, ...ready },
      gates: perTenant(perMinute.messages, 'messages'),
      run: (task, context, text) => runner.deliver(task, context, text),
    })
    this.#decisions = deps.intake.admission('routing.admit', { gates: perTenant(perMinute.decide, 'routes_decide') })
    const registryRate = rate({ limit: () => this.tightened(perMinute.registry), per: '1m', name: 'registry' })
    this.#registry = deps.intake.admission('routing.registry', {
      gates: [this.#overloadGate(), pressure(), registryRate],
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
    const parse = this.#parse.bind(this)
    if (broker !== null) {
      return mountAdmission(intake, this.#decisions, {
        parse,
        submit: (submission, gone) => this.#askRouter(broker, submission, gone),
        encode: (wire) => wire,
      })
    }
    const bound = intake.bound(this.#decide)
    return mountOf<RouteTask, Answer>(intake, this.#decide, {
      parse,
      // Of several requests with one id the first runs, and the others wait as long as it may take.
      submit: (submission) =>
        intake.pipeline.submit(
          bound,
          submission.respondAsync ? submission : { waitMs: intake.settings.directWaitMs, ...submission },
        ),
      encode: (answer, preferences) => {
        if (answer.kind === 'failed') return refuse(failedProblem)
        const wire = toWire(bound, answer, preferences, preferences.waitSeconds !== undefined)
        return wire.ok && answer.kind === 'done' ? answerWire(answer.result as RouteAnswer, wire.answer.headers) : wire
      },
    })
  }

  messageMount(): Mount {
    const { intake } = this.#deps
    const bound = intake.bound(this.#message)
    return mountOf<RouteTask>(intake, this.#message, {
      parse: this.#parse.bind(this),
      submit: (submission) =>
        intake.pipeline.submit(bound, {
          ...{ ...submission, respondAsync: true },
          ...(submission.idempotencyKey === undefined && keyInBody(submission)),
        }),
    })
  }

  /** The rate, then the change. */
  registryMount(change: (body: unknown, params: Readonly<Record<string, string | undefined>>) => Promise<Wire>): Mount {
    return mountAdmission<unknown, Wire>(this.#deps.intake, this.#registry, {
      submit: async (submission) => {
        const { body, request, identity } = submission
        const admitted = await this.#registry.admit({ identity, clientAddress: request.clientAddress }, body)
        if (admitted.kind === 'refused') return refusalWire(admitted.refusal)
        const wire = await change(body, request.params)
        if (wire.ok) Object.assign(wire.answer.headers, rateHeaders(admitted.rate))
        return wire
      },
      encode: (wire) => wire,
    })
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

  #parse(body: unknown, { request, identity }: Entered, original: string | undefined): Parsed<RouteTask> {
    const checked = body === undefined ? noBody : checkTask(body)
    if (!checked.ok) {
      const { code, message, errors } = checked
      const problem = { code: routingProblemCode(code), detail: message, extensions: { error: { code, message } } }
      return { ok: false, problem: { ...problem, ...(errors !== undefined && { errors }) } }
    }
    const { task } = checked
    const mayAll = request.user !== null && operatesAll(request.user)
    if (this.#deps.settings.isAuthenticated && !mayAll && task.tenant_id !== identity) {
      const message = 'tenant_id is not the authenticated subject.'
      const extensions = { error: { code: 'TENANT_FORBIDDEN', message } }
      return { ok: false, problem: { code: 'tenant_forbidden', detail: message, extensions } }
    }
    const text = original ?? JSON.stringify(task)
    // Refused now, because the ticket would fail. Before the first connection the broker's limit is unknown.
    const bytesMax = this.#taskBytesMax
    const isTooLarge = this.#deps.broker !== null && Buffer.byteLength(text) > bytesMax
    return isTooLarge ? { ok: false, problem: tooLarge(bytesMax) } : { ok: true, value: task, text }
  }

  async #askRouter(broker: RouterBroker, submission: Submission<RouteTask>, gone: Gone): Promise<Wire> {
    const { body: task, text = '', request, identity, idempotencyKey: key } = submission
    if (!broker.isConnected) return refuse(brokerAway)
    const admitted = await this.#decisions.admit({ identity, clientAddress: request.clientAddress }, task)
    if (admitted.kind === 'refused') return refusalWire(admitted.refusal)
    const headers: Record<string, string> = { traceparent: request.traceparent }
    if (key !== undefined) headers['Spillway-Idempotency-Key'] = digestUuid(`${identity}\0${key}`)
    try {
      const message = { data: Buffer.from(text), headers, deadlineMs: Date.now() + decideMs }
      const reply = await broker.ask(message, decideMs, gone('work'))
      return answerWire(decodeAnswer(reply), rateHeaders(admitted.rate))
    } catch (fault) {
      if (!(fault instanceof BrokerFault)) throw fault
      if (fault.code === 'too_large') return refuse(tooLarge(this.#taskBytesMax))
      if (fault.code !== 'aborted') this.#deps.log.warn({ err: fault }, 'no decision came back from the router')
      return refuse(fault.code === 'timeout' ? lateProblem : brokerAway)
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

function answerWire(answer: RouteAnswer, headers: Record<string, string>): Wire {
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
function keyInBody({
  body,
  text = '',
}: Submission<RouteTask>): { idempotencyKey: string; keyedOn: string } | undefined {
  const { idempotency_key: key, tenant_id: tenant } = body
  return key === undefined ? undefined : { idempotencyKey: `${tenant}\0${key}`, keyedOn: taskDigest(text) }
}
