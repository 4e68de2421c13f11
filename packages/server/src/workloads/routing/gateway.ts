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
  failureAsResult,
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
import type { RouterBroker } from '../../brokers/nats/broker.js'
import { BrokerFault } from '../../brokers/nats/faults.js'
import type { RoutingParts } from './context.js'
import { checkTask, taskDigest } from './envelope.js'
import type { RouteAnswer } from './processing.js'
import type { RouterStatus } from './router-watch.js'
import { decideHere, decodeAnswer, deliver } from './task-runner.js'

/** How long a caller of decide waits for its answer. */
const decideMs = 30_000
/** With a broker. Many, because an attempt ends early when the broker is away, and the router itself answers permanent failures. */
const messageRetries = 100
/** Room for headers in a broker message: with the 4 KiB that the broker reserves for dead letters, 64 KiB below its limit. */
const envelopeBytes = 61_440
const brokerRetryAfterMs = 5_000

const AnyTask = Type.Unsafe<RouteTask>(Type.Any())

export class Gateway {
  readonly #parts: RoutingParts
  #isReduced = false
  #status: RouterStatus
  readonly #decide: Definition<RouteTask>
  readonly #message: Definition<RouteTask>
  /** For decisions over the broker: no operation is written. */
  readonly #decisions: Admission<RouteTask>
  readonly #registry: Admission

  constructor(parts: RoutingParts) {
    this.#parts = parts
    const { intake, settings, broker, policies, config } = parts
    // Until the first report. A process without intake does not need it.
    this.#status = config.process.roles.includes('gateway') ? 'unknown' : 'inactive'
    const tries = { maxRetries: broker === null ? settings.maxDeliver - 1 : messageRetries }
    const ready = broker === null ? { ready: () => policies.isLoaded } : {}
    // One lane per task: a tenant's tasks do not wait for each other.
    const lane = (name: string) => (task: RouteTask) => [name, task.request_id.toLowerCase()] as [string, string]
    const perTenant = (limit: number, name: string): Gate<RouteTask>[] => [
      ...[this.#overloadGate(), pressure()],
      rate({ limit: () => this.tightened(limit), per: '1m', by: (_, task) => task.tenant_id, name }),
    ]
    this.#decide = intake.define('routing.decide', {
      ...{ body: AnyTask, lane: lane('routing.decide'), maxRetries: settings.maxDeliver - 1, ...ready },
      gates: perTenant(settings.decidePerMinute, 'routes_decide'),
      run: (task, context, text) => decideHere(parts, task, context, text),
    })
    this.#message = intake.define('routing.message', {
      ...{ body: AnyTask, lane: lane('routing.message'), ...tries, ...ready },
      gates: perTenant(settings.messagesPerMinute, 'messages'),
      run: (task, context, text) => deliver(parts, task, context, text),
    })
    this.#decisions = intake.admission('routing.admit', { gates: perTenant(settings.decidePerMinute, 'routes_decide') })
    const registryRate = rate({ limit: () => this.tightened(settings.registryPerMinute), per: '1m', name: 'registry' })
    this.#registry = intake.admission('routing.registry', { gates: [this.#overloadGate(), pressure(), registryRate] })
  }

  /** The level to act on: an unknown status counts as warning, but as inactive if no metrics URLs are configured. */
  get level(): 'inactive' | 'warning' | 'active' {
    const { settings, signals, isRoutedHere } = this.#parts
    if (isRoutedHere) return signals.level
    if (this.#status !== 'unknown') return this.#status
    return settings.metricsUrls === null ? 'inactive' : 'warning'
  }

  /** Called by the watch of routers in other processes. */
  heard(status: RouterStatus): void {
    this.#status = status
    this.showLevel()
  }

  /** Call it whenever the level may have changed. */
  showLevel(): void {
    const { metrics, log, settings, isRoutedHere } = this.#parts
    const { level } = this
    metrics.showStatus(isRoutedHere ? level : this.#status)
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
    const { rateReduction, rateMin } = this.#parts.settings
    // A limit already below the floor is not raised to it.
    return Math.max(Math.min(limit, rateMin), Math.floor(limit * rateReduction), 1)
  }

  /** For routes without intake: low and medium priority are closed while the router is overloaded. */
  overload(): Problem | null {
    if (this.level !== 'active') return null
    const { metrics, settings } = this.#parts
    metrics.rejected('router_overloaded').inc()
    return {
      code: 'service_overloaded',
      detail: 'Router is overloaded, please retry later',
      retryAfterMs: settings.retryAfterSeconds * 1_000,
    }
  }

  decideMount(): Mount {
    const { broker, intake } = this.#parts
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
    const { intake } = this.#parts
    const bound = intake.bound(this.#message)
    return mountOf<RouteTask>(intake, this.#message, {
      parse: this.#parse.bind(this),
      submit: (submission) =>
        intake.pipeline.submit(bound, {
          ...{ ...submission, respondAsync: true },
          ...(submission.idempotencyKey === undefined && keyInBody(submission)),
        }),
      encode: failureAsResult(bound),
    })
  }

  /** The rate, then the change. */
  registryMount(change: (body: unknown, params: Readonly<Record<string, string | undefined>>) => Promise<Wire>): Mount {
    return mountAdmission<unknown, Wire>(this.#parts.intake, this.#registry, {
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
    const { broker, config } = this.#parts
    return Math.min(config.server.bodyLimitBytes, (broker?.payloadBytesMax ?? Infinity) - envelopeBytes)
  }

  #parse(body: unknown, { request, identity }: Entered, original: string | undefined): Parsed<RouteTask> {
    const checked = checkTask(body)
    if (!checked.ok) {
      const { code, message, errors } = checked
      return { ok: false, problem: problemOf({ code, message }, errors && { errors }) }
    }
    const { task } = checked
    const mayAll = request.user !== null && operatesAll(request.user)
    if (this.#parts.isAuthenticated && !mayAll && task.tenant_id !== identity) {
      const message = 'tenant_id is not the authenticated subject.'
      return { ok: false, problem: problemOf({ code: 'TENANT_FORBIDDEN', message }) }
    }
    const text = original ?? JSON.stringify(task)
    // Refused now, because the ticket would fail. Before the first connection the broker's limit is unknown.
    const bytesMax = this.#taskBytesMax
    const isTooLarge = this.#parts.broker !== null && Buffer.byteLength(text) > bytesMax
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
      if (fault.code !== 'aborted') this.#parts.log.warn({ err: fault }, 'no decision came back from the router')
      return refuse(fault.code === 'timeout' ? lateProblem : brokerAway)
    }
  }
}

const brokerAway: Problem = {
  code: 'broker_unavailable',
  detail: 'The broker is not reachable now. Nothing was decided; try again later.',
  retryAfterMs: brokerRetryAfterMs,
}

const lateProblem = problemOf(
  { code: 'DEADLINE_EXPIRED', message: 'The router did not decide in time.' },
  { retryAfterMs: brokerRetryAfterMs },
)

const failedProblem = problemOf({ code: 'internal_error', message: 'Every attempt to decide failed.' })

const tooLarge = (bytesMax: number): Problem =>
  problemOf({ code: 'PAYLOAD_TOO_LARGE', message: `A task has at most ${bytesMax} bytes.` })

/** Callers find the routing code in the member `error`. */
function problemOf(error: { code: string; message: string }, more: Partial<Problem> = {}): Problem {
  return { code: routingProblemCode(error.code), detail: error.message, extensions: { error }, ...more }
}

export function refuse(problem: Problem): Wire {
  return { ok: false, problem, headers: {} }
}

function answerWire(answer: RouteAnswer, headers: Record<string, string>): Wire {
  if (answer.ok) {
    const { replayed, ...body } = answer
    if (replayed === true) headers['idempotent-replayed'] = 'true'
    return { ok: true, answer: { status: 200, headers, body } }
  }
  const { error, errors, context } = answer
  const problem = problemOf(error, {
    extensions: { error, context },
    ...(errors !== undefined && { errors }),
    ...(routingStatus(error.code) === 503 && { retryAfterMs: brokerRetryAfterMs }),
  })
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
