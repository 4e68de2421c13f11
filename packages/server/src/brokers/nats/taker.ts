/**
 * Takes messages from the broker and has them worked on.
 *
 *   asked for ──arrives──► buffered ──a place is free──► under way ──work ends──► gone from here
 *
 * One request is out at a time, for as many as there is room for: what is asked for, buffered and under way is never
 * more than twice `atOnce`. A request ends when all came, when the broker says so, or when nothing is heard for a while.
 *
 * An ack may cross with the same message on its way to us again, or be lost with the connection: what was acked of late
 * is acked once more when it comes, and not worked on again.
 */
import { type Msg, type NatsConnection, nanos, nuid, type Subscription } from '@nats-io/transport-node'
import type { Delivery } from '../port.js'
import { ack, JetStreamDelivery, originOf } from './delivery.js'
import { type BrokerLog, type Link, within } from './link.js'
import type { Names } from './names.js'

export interface TakerOptions {
  readonly link: Link
  readonly names: Names
  readonly atOnce: number
  readonly maxDeliver: number
  readonly ackWaitMs: number
  readonly log: BrokerLog
  work(delivery: Delivery): Promise<void>
}

const expiresMs = 30_000
/** The broker sends one when it has nothing else to send. */
const heartbeatMs = 1_000
const silentMs = 3 * heartbeatMs
/** After a fault of the request, or of the work. */
const pauseMs = 250
const failedWorkDelayMs = 1_000
const drainTimeoutMs = 1_000
/** So many of those that were acked are remembered. One that is forgotten is worked on twice, not lost. */
const ackedMax = 16_384

export class Taker {
  readonly #o: TakerOptions
  readonly #held = new Map<number, JetStreamDelivery>()
  readonly #buffer: JetStreamDelivery[] = []
  /** When each was stored, by its number; the oldest first. */
  readonly #acked = new Map<number, number>()
  readonly #nextSubject: string
  readonly #keepingAlive: NodeJS.Timeout
  readonly #watching: NodeJS.Timeout
  #nc: NatsConnection | null = null
  #subscription: Subscription | null = null
  #inbox = ''
  #requests = 0
  /** Of the request that is out; 0: none is. */
  #left = 0
  #heardAt = 0
  #underWay = 0
  #pausing: NodeJS.Timeout | null = null
  #stopping = false
  #idle: (() => void) | null = null

  constructor(options: TakerOptions) {
    this.#o = options
    this.#nextSubject = `$JS.API.CONSUMER.MSG.NEXT.${options.names.stream}.${options.names.consumer}`
    this.#keepingAlive = setInterval(() => this.#stillWorking(), options.ackWaitMs / 3)
    this.#watching = setInterval(() => this.#watch(), heartbeatMs)
    options.link.onReady((nc) => this.#begin(nc))
    options.link.onLost(() => this.#end())
    const { ready } = options.link
    if (ready !== null) this.#begin(ready)
  }

  /** Whether it is in these hands. */
  holds(sequence: number): boolean {
    return this.#held.has(sequence)
  }

  /** Takes nothing more, gives back what is only buffered, and waits for what is under way. */
  async stop(): Promise<void> {
    this.#stopping = true
    clearInterval(this.#watching)
    if (this.#pausing !== null) clearTimeout(this.#pausing)
    const subscription = this.#subscription
    this.#subscription = null
    this.#putBackBuffered()
    // What is on its way to us meanwhile is put back as it arrives.
    if (subscription !== null && !subscription.isClosed()) await within(subscription.drain(), drainTimeoutMs)
    if (this.#underWay > 0) {
      await new Promise<void>((resolve) => {
        this.#idle = resolve
      })
    }
    clearInterval(this.#keepingAlive)
  }

  /** A taker whose broker is closed; what it holds comes again elsewhere. */
  abandon(): void {
    this.#stopping = true
    clearInterval(this.#watching)
    clearInterval(this.#keepingAlive)
    if (this.#pausing !== null) clearTimeout(this.#pausing)
    this.#buffer.length = 0
    this.#end()
  }

  /** A new inbox each time, so that what the broker owes to an earlier request goes nowhere. */
  #begin(nc: NatsConnection): void {
    if (this.#stopping) return
    this.#end()
    this.#nc = nc
    const inbox = `_INBOX.${nuid.next()}.`
    this.#inbox = inbox
    const callback = (error: Error | null, message: Msg): void => {
      if (error === null) this.#receive(message, inbox)
      else this.#o.log.error({ err: error }, 'the broker does not let us take messages')
    }
    this.#subscription = nc.subscribe(`${inbox}*`, { callback })
    this.#request()
  }

  #end(): void {
    if (this.#subscription !== null && !this.#subscription.isClosed()) this.#subscription.unsubscribe()
    this.#subscription = null
    this.#nc = null
    this.#left = 0
  }

  #request(): void {
    const { atOnce } = this.#o
    const room = 2 * atOnce - this.#underWay - this.#buffer.length
    // Not for each single one: a request costs as much as a message.
    if (this.#left > 0 || room < Math.ceil(atOnce / 2) || this.#stopping || this.#pausing !== null) return
    const nc = this.#nc
    if (nc === null || nc.isClosed()) return
    this.#left = room
    this.#requests += 1
    this.#heardAt = performance.now()
    const wish = { batch: room, expires: nanos(expiresMs), idle_heartbeat: nanos(heartbeatMs) }
    nc.publish(this.#nextSubject, JSON.stringify(wish), { reply: `${this.#inbox}${this.#requests}` })
  }

  #receive(message: Msg, inbox: string): void {
    this.#heardAt = performance.now()
    if (message.subject.startsWith(inbox)) {
      if (message.subject === `${this.#inbox}${this.#requests}`) this.#heed(message)
      return
    }
    const origin = originOf(message.reply ?? '')
    if (origin === null) return
    if (this.#left > 0) this.#left -= 1
    const held = this.#held.get(origin.sequence)
    // By its time too: a stream that was deleted and made again counts from one.
    if (held !== undefined && held.storedAtMs === origin.storedAtMs) {
      held.adopt(message.reply ?? '', origin)
    } else if (this.#acked.get(origin.sequence) === origin.storedAtMs) {
      this.#o.link.post(message.reply ?? '', ack)
    } else {
      const onEnded = (ended: JetStreamDelivery, isDone: boolean): void => {
        this.#release(ended)
        if (isDone) this.#remember(ended)
      }
      const delivery = new JetStreamDelivery(message, origin, this.#o.link, onEnded)
      this.#held.set(origin.sequence, delivery)
      this.#buffer.push(delivery)
    }
    if (this.#stopping) this.#putBackBuffered()
    this.#run()
    this.#request()
  }

  /** What the broker says about the request that is out. */
  #heed(message: Msg): void {
    const code = message.headers?.code ?? 0
    if (code === 100) return
    this.#left = 0
    // 408: it has expired, as all do on a quiet day. 404: there was nothing.
    if (code === 408 || code === 404) {
      this.#request()
      return
    }
    this.#o.log.warn({ code, said: message.headers?.description ?? '' }, 'the broker ended a request; looking after it')
    this.#mend()
  }

  #watch(): void {
    if (this.#left === 0) {
      this.#request()
    } else if (performance.now() - this.#heardAt > silentMs) {
      this.#o.log.warn({}, 'nothing is heard of the broker; looking after it')
      this.#mend()
    }
  }

  /** A consumer or a stream that somebody deleted is made again; then all begins anew. */
  #mend(): void {
    const nc = this.#nc
    this.#end()
    if (nc === null || this.#pausing !== null || this.#stopping) return
    this.#pausing = setTimeout(() => {
      void this.#o.link.mend().then(() => {
        this.#pausing = null
        const { ready } = this.#o.link
        if (ready !== null) this.#begin(ready)
      })
    }, pauseMs)
  }

  #run(): void {
    while (this.#underWay < this.#o.atOnce) {
      const delivery = this.#buffer.shift()
      if (delivery === undefined) return
      this.#underWay += 1
      void this.#workOn(delivery)
    }
  }

  async #workOn(delivery: JetStreamDelivery): Promise<void> {
    try {
      await this.#o.work(delivery)
      if (!delivery.isEnded) {
        this.#o.log.warn({ message: delivery.id }, 'a message was worked on and not acked: it will come again')
        this.#release(delivery)
      }
    } catch (error) {
      this.#o.log.error({ err: error, message: delivery.id, deliveries: delivery.deliveries }, 'a message failed')
      delivery.putBack(failedWorkDelayMs)
    }
    this.#underWay -= 1
    this.#run()
    this.#request()
    if (this.#underWay === 0) this.#idle?.()
  }

  #release(delivery: JetStreamDelivery): void {
    if (this.#held.get(delivery.sequence) === delivery) this.#held.delete(delivery.sequence)
  }

  #remember({ sequence, storedAtMs }: JetStreamDelivery): void {
    const [oldest] = this.#acked.size >= ackedMax ? this.#acked.keys() : []
    if (oldest !== undefined) this.#acked.delete(oldest)
    this.#acked.set(sequence, storedAtMs)
  }

  /** One at its last delivery would be dead without having been tried: it is worked on after all. */
  #putBackBuffered(): void {
    const { maxDeliver } = this.#o
    const kept = this.#buffer.filter(({ deliveries }) => deliveries >= maxDeliver)
    for (const delivery of this.#buffer) if (delivery.deliveries < maxDeliver) delivery.putBack(0)
    this.#buffer.splice(0, this.#buffer.length, ...kept)
  }

  #stillWorking(): void {
    for (const delivery of this.#held.values()) delivery.stillWorking()
  }
}
