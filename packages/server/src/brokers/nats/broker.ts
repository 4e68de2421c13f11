import { type JetStreamManager, jetstreamManager } from '@nats-io/jetstream'
import { errors, type NatsConnection } from '@nats-io/transport-node'
import {
  type Backlog,
  BrokerFault,
  type Delivery,
  type ExhaustedListener,
  type Outgoing,
  type Redriven,
  type RouterBroker,
} from '../port.js'
import { DeadLetters, requireReady } from './dead-letters.js'
import { JetStreamDelivery } from './delivery.js'
import { Exhausted } from './exhausted.js'
import { asBrokerFault } from './faults.js'
import { type BrokerLog, Link } from './link.js'
import { defaultSubject, headerNames, type Names, namesFor } from './names.js'
import { Outbox } from './outbox.js'
import { ReplySender } from './reply-sender.js'
import { Taker } from './taker.js'
import { ensureTopology, setAckPendingMax, type Topology } from './topology.js'

export interface NatsBrokerOptions {
  /** `nats://[user:password@|token@]host[:port]`, or `tls://…`; separate several with commas. */
  url: string
  /** Default `beamline.router.v1.decide`. */
  subject?: string
  /** Maximum deliveries before a message becomes a dead letter. */
  maxDeliver: number
  /** Default 30,000. A message without any sign of progress for this time is redelivered. */
  ackWaitMs?: number
  /** Of the streams. Default: unchanged for existing streams, one for new ones. */
  replicas?: number
  /** How often to look for exhausted messages whose advisory was missed. Default 10,000. */
  exhaustedLookMs?: number
  log: BrokerLog
}

const defaultAckWaitMs = 30_000
const defaultExhaustedLookMs = 10_000
const apiTimeoutMs = 5_000
/** The state is read about once a second, so an old figure is useless. */
const backlogTimeoutMs = 2_000
/** The publisher names the reply subject. Only inboxes are allowed, so that nobody can make us write to other subjects. */
const inboxes = /^_INBOX[^\s*>]*$/

/** Returns at once and connects in the background. Never stops retrying. */
export function connectNats(options: NatsBrokerOptions): RouterBroker {
  return new NatsBroker(options)
}

class NatsBroker implements RouterBroker {
  readonly #names: Names
  readonly #o: NatsBrokerOptions & { ackWaitMs: number }
  readonly #link: Link
  readonly #outbox: Outbox
  readonly #replies: ReplySender
  readonly #dead: DeadLetters
  readonly #exhausted: Exhausted
  readonly #takers = new Set<Taker>()
  #jsm: JetStreamManager | null = null
  #backlogApi: JetStreamManager | null = null
  #topology: Topology | null = null
  #ackPendingMax: number | null = null
  #trouble: string | null = null

  constructor(options: NatsBrokerOptions) {
    const { log, maxDeliver } = options
    this.#o = { ...options, ackWaitMs: options.ackWaitMs ?? defaultAckWaitMs }
    const names = namesFor(options.subject ?? defaultSubject)
    this.#names = names
    const link = new Link({ url: options.url, log, prepare: (nc) => this.#prepare(nc) })
    this.#link = link
    const api = (): JetStreamManager => requireReady(link.ready === null ? null : this.#jsm)
    this.#outbox = new Outbox(link, () => this.payloadBytesMax)
    this.#replies = new ReplySender(link)
    this.#dead = new DeadLetters({ names, outbox: this.#outbox, api, payloadMax: () => link.serverPayloadMax })
    this.#exhausted = new Exhausted({
      link,
      names,
      maxDeliver,
      dead: this.#dead,
      log,
      lookMs: options.exhaustedLookMs ?? defaultExhaustedLookMs,
      api,
      isWorkQueue: () => this.#topology?.isWorkQueue ?? false,
    })
    link.start()
  }

  get subject(): string {
    return this.#names.subject
  }

  get consumer(): string {
    return this.#names.consumer
  }

  get isConnected(): boolean {
    return this.#link.ready !== null
  }

  get trouble(): string | null {
    return this.isConnected ? null : this.#trouble
  }

  get payloadBytesMax(): number | null {
    return this.#topology?.messageBytesMax ?? null
  }

  publish(message: Outgoing): Promise<{ duplicate: boolean }> {
    return this.#outbox.publish(this.#names.subject, message)
  }

  ask(message: Outgoing, timeoutMs: number, signal?: AbortSignal): Promise<Uint8Array> {
    return this.#outbox.ask(this.#names.subject, message, timeoutMs, signal)
  }

  canAnswer(delivery: Delivery): boolean {
    return inboxes.test(delivery.header(headerNames.replyTo) ?? '')
  }

  answer(delivery: Delivery, data: Uint8Array): void {
    const replyTo = delivery.header(headerNames.replyTo)
    if (replyTo === undefined || !this.canAnswer(delivery)) return
    const max = this.#link.serverPayloadMax
    if (max !== null && data.length > max) throw new BrokerFault('too_large', `the answer has more than ${max} bytes`)
    this.#replies.send(replyTo, data)
  }

  take(atOnce: number, work: (delivery: Delivery) => Promise<void>): { stop(): Promise<void> } {
    const { maxDeliver, ackWaitMs, log } = this.#o
    const taker = new Taker({ link: this.#link, names: this.#names, atOnce, maxDeliver, ackWaitMs, log, work })
    this.#takers.add(taker)
    return {
      stop: async () => {
        await taker.stop()
        this.#takers.delete(taker)
      },
    }
  }

  async backlog(): Promise<Backlog | null> {
    const api = this.#link.ready === null ? null : this.#backlogApi
    if (api === null) return null
    try {
      const info = await api.consumers.info(this.#names.stream, this.#names.consumer)
      return {
        pending: info.num_pending,
        ackPending: info.num_ack_pending,
        delivered: info.delivered.consumer_seq,
        redelivered: info.num_redelivered,
      }
    } catch (error) {
      if (!(error instanceof errors.TimeoutError)) void this.#link.mend()
      return null
    }
  }

  async limitAckPending(count: number): Promise<void> {
    if (!Number.isInteger(count) || count < 1) throw new RangeError(`${count} is no number of messages`)
    if (this.#ackPendingMax === count) return
    // Stored, so that a consumer created later gets it too.
    this.#ackPendingMax = count
    if (this.#link.ready === null || this.#jsm === null) return
    try {
      await setAckPendingMax(this.#jsm, this.#names, count)
    } catch (error) {
      throw asBrokerFault(error, 'change the consumer')
    }
  }

  async bury(
    delivery: Delivery,
    why: { reason: string; detail: string },
    keep?: (letter: string) => Promise<void>,
  ): Promise<void> {
    if (!(delivery instanceof JetStreamDelivery)) throw new TypeError('the delivery is of another broker')
    await delivery.buryWith(async () => {
      const letter = await this.#dead.store(delivery, why)
      await keep?.(letter)
    })
  }

  onExhausted(listener: ExhaustedListener): void {
    this.#exhausted.onExhausted(listener)
  }

  deadLetters(limit: number, after: string | null, partBytesMax = Number.POSITIVE_INFINITY) {
    return this.#dead.list(limit, after, partBytesMax)
  }

  deadLetter(id: string) {
    return this.#dead.get(id)
  }

  redrive(ids: readonly string[]): Promise<Redriven> {
    return this.#dead.redrive(ids)
  }

  purge(ids: readonly string[]): Promise<number> {
    return this.#dead.purge(ids)
  }

  async close(): Promise<void> {
    for (const taker of this.#takers) taker.abandon()
    this.#takers.clear()
    this.#outbox.close()
    await this.#exhausted.close()
    await this.#link.close()
    this.#replies.close()
  }

  async #prepare(nc: NatsConnection): Promise<void> {
    try {
      await this.#ensure(nc)
      this.#trouble = null
    } catch (error) {
      // A server without JetStream may reach it through its cluster, so report this only after a failure.
      const isLacking = nc.info?.jetstream !== true
      this.#trouble = isLacking ? 'NATS is reachable, but has no JetStream (nats-server -js)' : null
      throw this.#trouble === null ? error : new BrokerFault('unavailable', this.#trouble, { cause: error })
    }
  }

  async #ensure(nc: NatsConnection): Promise<void> {
    const options = { checkAPI: false }
    const jsm = await jetstreamManager(nc, { ...options, timeout: apiTimeoutMs })
    this.#topology = await ensureTopology(
      jsm,
      {
        names: this.#names,
        maxDeliver: this.#o.maxDeliver,
        ackWaitMs: this.#o.ackWaitMs,
        ackPendingMax: this.#ackPendingMax,
        replicas: this.#o.replicas ?? null,
        payloadMax: nc.info?.max_payload ?? 1_048_576,
      },
      this.#o.log,
    )
    this.#jsm = jsm
    this.#backlogApi = await jetstreamManager(nc, { ...options, timeout: backlogTimeoutMs })
  }
}
