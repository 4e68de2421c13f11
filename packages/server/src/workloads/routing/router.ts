/**
 * The router: takes messages from the broker, decides, answers, acks.
 *
 *   taken ──answered──► acked
 *     ├──expired, invalid, undecidable──► answered with the reason; dead-lettered if nobody can be answered (invalid: both)
 *     └──the store fails──► put back for 1, 5, 15 s ──last delivery──► dead-lettered; a waiting caller is asked to retry
 *
 * Nothing is shed here: accepted messages are processed in any state. A router that dies holds nothing: the broker
 * redelivers unacked messages and counts.
 */
import { codeOf, type Periodic, periodic, traceIdOf } from 'spillway/workload'
import type { RouterBroker } from '../../brokers/nats/broker.js'
import type { Delivery } from '../../brokers/nats/delivery.js'
import { BrokerFault } from '../../brokers/nats/faults.js'
import { keepBurial, ticketOf } from './burials.js'
import type { RoutingParts } from './context.js'
import { readTask } from './envelope.js'
import { answerTask, type RouteAnswer } from './processing.js'
import { encodeAnswer } from './task-runner.js'

const putBackMs = [1_000, 5_000, 15_000]
const limitEveryMs = 5_000

/** How a delivery ends. */
type End =
  | { kind: 'ack'; status: string; answer?: RouteAnswer }
  | { kind: 'bury'; status: string; reason: string; detail: string; answer?: RouteAnswer }
  | { kind: 'put-back'; delayMs: number }

export class Router {
  readonly #parts: RoutingParts
  #taking: { stop(): Promise<void> } | undefined
  #limiting: Periodic | undefined
  #isStopped = false
  #sentLimit = 0

  constructor(parts: RoutingParts) {
    this.#parts = parts
  }

  start(): void {
    const { broker, intake, settings, isRouter } = this.#parts
    if (this.#isStopped) return
    if (broker === null) {
      intake.wakeAll()
    } else if (isRouter) {
      this.#taking = broker.take(settings.concurrency, (delivery) => this.#work(broker, delivery))
      this.#limiting = periodic(limitEveryMs, () => this.#limit(broker))
      void this.#limit(broker)
    }
  }

  async stop(): Promise<void> {
    this.#isStopped = true
    void this.#limiting?.stop()
    await this.#taking?.stop()
  }

  /** Twice the concurrency of all routers, because their buffers hold the same number again. */
  async #limit(broker: RouterBroker): Promise<void> {
    const { intake, settings, log } = this.#parts
    const wanted = 2 * Math.max(settings.concurrency, intake.fleet.sumOf('router'))
    if (!broker.isConnected || wanted === this.#sentLimit) return
    try {
      await broker.limitAckPending(wanted)
      this.#sentLimit = wanted
    } catch (fault) {
      log.warn({ err: fault, wanted }, 'the broker did not accept the limit of unacked messages')
    }
  }

  async #work(broker: RouterBroker, delivery: Delivery): Promise<void> {
    const { metrics, signals } = this.#parts
    metrics.delivered.inc()
    if (delivery.deliveries > 1) metrics.redelivered.inc()
    signals.began()
    const end = await this.#handle(delivery).catch((fault: unknown) => this.#failed(delivery, fault))
    await this.#finish(broker, delivery, end)
  }

  async #handle(delivery: Delivery): Promise<End> {
    const { settings, config } = this.#parts
    if (delivery.deliveries > settings.maxDeliver) return this.#exhausted(delivery, 'it was handed out too often')
    const read = readTask(delivery.data, { bytesMax: config.server.bodyLimitBytes })
    if (!read.ok) {
      const { code, message, errors, correlation } = read
      const answer: RouteAnswer = {
        ...{ ok: false, error: { code, message }, context: correlation },
        ...(errors !== undefined && { errors }),
      }
      return { kind: 'bury', status: 'invalid', reason: code, detail: message, answer }
    }
    const { task, text } = read
    const deadline = deadlineOf(delivery)
    if (deadline !== null && deadline <= Date.now()) {
      return this.#refused(delivery, 'expired', {
        ok: false,
        error: { code: 'DEADLINE_EXPIRED', message: 'The deadline of this message has passed.' },
        context: { request_id: task.request_id },
      })
    }
    const answer = await answerTask(this.#parts, task, {
      text,
      traceId: traceIdOf(delivery.header('traceparent')),
      key: delivery.header('Spillway-Idempotency-Key'),
      // If nobody gets the answer, the stored decision is all that remains.
      isTicket: delivery.header('Spillway-Ticket') !== undefined || !this.#isHeard(delivery),
      isRepeat: delivery.deliveries > 1,
    })
    return answer.ok ? { kind: 'ack', status: 'ok', answer } : this.#refused(delivery, 'undecided', answer)
  }

  #isHeard(delivery: Delivery): boolean {
    return this.#parts.broker?.canAnswer(delivery) === true
  }

  /** A waiting caller gets the reason; otherwise it is dead-lettered, because nobody would learn of it. */
  #refused(delivery: Delivery, status: string, answer: Extract<RouteAnswer, { ok: false }>): End {
    if (this.#isHeard(delivery)) return { kind: 'ack', status, answer }
    return { kind: 'bury', status, reason: answer.error.code, detail: answer.error.message }
  }

  #failed(delivery: Delivery, fault: unknown): End {
    const { settings, log } = this.#parts
    log.warn({ err: fault, message: delivery.id, deliveries: delivery.deliveries }, 'a message failed')
    if (delivery.deliveries >= settings.maxDeliver) {
      // A waiting caller can retry when the store is back, and the message itself is fine.
      const isAsked = this.#isHeard(delivery) && ticketOf(delivery) === null
      return isAsked && isStoreAway(fault) ? storeAway : this.#exhausted(delivery, 'every attempt failed')
    }
    return { kind: 'put-back', delayMs: putBackMs[delivery.deliveries - 1] ?? putBackMs.at(-1) ?? 0 }
  }

  #exhausted({ deliveries }: Delivery, detail: string): End {
    const message = `It was tried ${deliveries} times: ${detail}.`
    const answer: RouteAnswer = { ok: false, error: { code: 'internal_error', message }, context: {} }
    return { kind: 'bury', status: 'exhausted', reason: 'max_deliver', detail: message, answer }
  }

  async #finish(broker: RouterBroker, delivery: Delivery, end: End): Promise<void> {
    const { metrics, log, signals } = this.#parts
    if (end.kind === 'put-back') {
      delivery.putBack(end.delayMs)
      return signals.putBack()
    }
    try {
      if (end.kind === 'bury') {
        const { reason, detail, answer } = end
        const code = answer?.ok === false ? answer.error.code : reason
        // The ticket ends before the message leaves the broker: the answer may reach nobody, and the message would be
        // published again.
        await broker.bury(delivery, { reason, detail }, (letter) =>
          keepBurial(this.#parts, delivery, letter, `${code}: ${detail}`),
        )
        metrics.buried(reason).inc()
      }
    } catch (fault) {
      // The broker keeps it, and redelivers it or reports it as exhausted.
      log.error({ err: fault, message: delivery.id, reason: end.kind }, 'a message could not be dead-lettered')
      return signals.putBack()
    }
    if (end.answer !== undefined) this.#answer(broker, delivery, end.answer)
    if (end.kind === 'ack') delivery.ack()
    // Answering an invalid message with its error is not our failure.
    const isGood = end.status === 'ok' || end.status === 'undecided' || end.status === 'invalid'
    signals.ended(end.status, Math.max(0, Date.now() - delivery.storedAtMs), isGood)
  }

  #answer(broker: RouterBroker, delivery: Delivery, answer: RouteAnswer): void {
    try {
      broker.answer(delivery, encodeAnswer(answer))
    } catch (fault) {
      if (!(fault instanceof BrokerFault) || fault.code !== 'too_large') throw fault
      const error = { code: 'internal_error', message: 'The answer is larger than what the broker takes.' } as const
      broker.answer(delivery, encodeAnswer({ ok: false, error, context: answer.context }))
    }
  }
}

const storeAway: End = {
  ...{ kind: 'ack', status: 'exhausted' },
  answer: {
    ok: false,
    error: { code: 'store_unavailable', message: 'The store did not answer. Nothing was decided; try again later.' },
    context: {},
  },
}

function isStoreAway(fault: unknown): boolean {
  return ['unavailable', 'timeout', 'disk_full'].includes(codeOf(fault) ?? '')
}

function deadlineOf(delivery: Delivery): number | null {
  const text = delivery.header('Spillway-Deadline')
  if (text === undefined) return null
  const at = /^\d{1,15}$/.test(text) ? Number(text) : Date.parse(text)
  return Number.isFinite(at) ? at : null
}
