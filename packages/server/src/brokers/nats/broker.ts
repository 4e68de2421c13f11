/**
 * A broker as the router's intake: messages of one subject, shared by all routers, each kept until it is acked.
 *
 *   published ──taken──► with a router ──ack──► gone
 *                            ├──putBack(delay), or silent for the ack wait──► taken again, deliveries + 1
 *                            └──bury──► dead letter, complete, with its reason
 *
 * Calls that fail throw BrokerFault.
 */
import { withDeadline } from 'spillway/workload'
import { DeadLetters, type Death } from './dead-letters.js'
import type { Delivery } from './delivery.js'
import { Exhausted, type ExhaustedListener } from './exhausted.js'
import { asBrokerFault, BrokerFault } from './faults.js'
import { type BrokerLog, Link } from './link.js'
import { defaultSubject, headerNames, namesFor } from './names.js'
import { Outbox, type Outgoing } from './outbox.js'
import { ReplySender } from './reply-sender.js'
import { Taker } from './taker.js'

export interface NatsBrokerOptions {
  /** `nats://[user:password@|token@]host[:port]`, or `tls://…`; separate several with commas. */
  url: string
  /** Default `beamline.router.v1.decide`. */
  subject?: string
  /** Maximum deliveries before a message becomes a dead letter. */
  maxDeliver: number
  /** Default 30,000. A message without any sign of progress for this time is redelivered. */
  ackWaitMs?: number
  /** How often to look for exhausted messages whose advisory was missed. Default 10,000. */
  exhaustedLookMs?: number
  log: BrokerLog
}

export interface Backlog {
  /** Not delivered yet. */
  readonly pending: number
  /** Delivered, not acked. */
  readonly ackPending: number
  /** Since the consumer was created, as far as the broker reports. */
  readonly delivered: number
  /** Unacked messages that were delivered more than once. */
  readonly redelivered: number
}

const defaultAckWaitMs = 30_000
const defaultExhaustedLookMs = 10_000
/** The state is read about once a second, so an old figure is useless. */
const backlogTimeoutMs = 2_000
/** The publisher names the reply subject. Only inboxes are allowed, so that nobody can make us write to other subjects. */
const inboxes = /^_INBOX[^\s*>]*$/

export class RouterBroker {
  readonly subject: string
  /** The durable consumer's name. */
  readonly consumer: string
  readonly deadLetters: DeadLetters
  readonly #link: Link
  readonly #outbox: Outbox
  readonly #replies: ReplySender
  readonly #exhausted: Exhausted
  readonly #takers = new Set<Taker>()

  /** Connects in the background. Never stops retrying. */
  constructor({ subject = defaultSubject, ackWaitMs = defaultAckWaitMs, ...options }: NatsBrokerOptions) {
    const names = namesFor(subject)
    this.subject = subject
    this.consumer = names.consumer
    this.#link = new Link({ ...options, names, ackWaitMs })
    this.#outbox = new Outbox(this.#link)
    this.#replies = new ReplySender(this.#link)
    this.deadLetters = new DeadLetters(this.#link, this.#outbox)
    const lookMs = options.exhaustedLookMs ?? defaultExhaustedLookMs
    this.#exhausted = new Exhausted(this.#link, this.deadLetters, lookMs)
  }

  get isConnected(): boolean {
    return this.#link.ready !== null
  }

  /** Why it is not connected, for people, if known. */
  get trouble(): string | null {
    return this.isConnected ? null : this.#link.trouble
  }

  /** Maximum message size, headers included; null until the broker reports it. */
  get payloadBytesMax(): number | null {
    return this.#link.topology?.messageBytesMax ?? null
  }

  /** Resolves when the broker has stored it. */
  publish(message: Outgoing): Promise<{ duplicate: boolean }> {
    return this.#outbox.publish(message)
  }

  /** Publishes it and waits for the router's answer. */
  ask(message: Outgoing, timeoutMs: number, signal?: AbortSignal): Promise<Uint8Array> {
    return this.#outbox.ask(message, timeoutMs, signal)
  }

  /** Whether it has a header `Spillway-Reply-To` with a subject that we may write to. */
  canAnswer(delivery: Delivery): boolean {
    return inboxes.test(delivery.header(headerNames.replyTo) ?? '')
  }

  /** Answers the publisher if possible. Throws BrokerFault `too_large`. */
  answer(delivery: Delivery, data: Uint8Array): void {
    const replyTo = delivery.header(headerNames.replyTo)
    if (replyTo === undefined || !this.canAnswer(delivery)) return
    const max = this.#link.serverPayloadMax
    if (max !== null && data.length > max) throw new BrokerFault('too_large', `the answer has more than ${max} bytes`)
    this.#replies.send(replyTo, data)
  }

  /**
   * Calls `work` for every message, with at most `atOnce` running; takes at most the same number again into a buffer.
   * Continues over lost connections until stopped; `stop` waits for running work.
   */
  take(atOnce: number, work: (delivery: Delivery) => Promise<void>): { stop(): Promise<void> } {
    const taker = new Taker(this.#link, atOnce, work)
    this.#takers.add(taker)
    return {
      stop: async () => {
        await taker.stop()
        this.#takers.delete(taker)
      },
    }
  }

  /** Null while the broker does not answer. */
  async backlog(): Promise<Backlog | null> {
    const { names } = this.#link
    if (!this.isConnected) return null
    try {
      const asked = this.#link.api().consumers.info(names.stream, names.consumer)
      const info = await withDeadline(asked, backlogTimeoutMs, () => null)
      return (
        info && {
          pending: info.num_pending,
          ackPending: info.num_ack_pending,
          delivered: info.delivered.consumer_seq,
          redelivered: info.num_redelivered,
        }
      )
    } catch {
      void this.#link.mend()
      return null
    }
  }

  /** Maximum delivered but unacked messages over all routers. */
  async limitAckPending(count: number): Promise<void> {
    const { names } = this.#link
    if (!Number.isInteger(count) || count < 1) throw new RangeError(`${count} is no number of messages`)
    this.#link.ackPendingMax = count
    if (!this.isConnected) return
    try {
      await this.#link.api().consumers.update(names.stream, names.consumer, { max_ack_pending: count })
    } catch (error) {
      throw asBrokerFault(error, 'change the consumer')
    }
  }

  /**
   * Stores it as a complete dead letter with the reason, then acks: a crash in between still gives one dead letter.
   * `keep` gets its number before the ack; if it throws, this throws too, and the message stays.
   */
  async bury(delivery: Delivery, why: Death, keep?: (letter: string) => Promise<void>): Promise<void> {
    await delivery.buryWith(async () => {
      const letter = await this.deadLetters.store(delivery, why)
      await keep?.(letter)
    })
  }

  /** One listener, for messages that died while no router held them. */
  onExhausted(listener: ExhaustedListener): void {
    this.#exhausted.onExhausted(listener)
  }

  async close(): Promise<void> {
    for (const taker of this.#takers) taker.abandon()
    this.#takers.clear()
    this.#outbox.close()
    await this.#exhausted.close()
    await this.#link.close()
    this.#replies.close()
  }
}
