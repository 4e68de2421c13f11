/**
 * Takes messages from the broker and processes them.
 *
 *   requested ──arrives──► buffered ──a place is free──► running ──work ends──► removed
 *
 * One request is open at a time, for the free capacity: requested, buffered and running messages never exceed twice
 * `atOnce`. A request ends when all messages arrived, when the broker ends it, or after a silence.
 *
 * An ack can cross with a redelivery or be lost with the connection. A message that was acked recently is acked again
 * when it arrives, and not processed again.
 */
import { type Msg, type NatsConnection, nanos, nuid, type Subscription } from '@nats-io/transport-node'
import { type Periodic, periodic } from 'spillway/workload'
import { ack, Delivery, originOf } from './delivery.js'
import { type Link, within } from './link.js'

const expiresMs = 30_000
/** The broker sends one when it has no messages. */
const heartbeatMs = 1_000
const silentMs = 3 * heartbeatMs
/** After a failed request or failed work. */
const pauseMs = 250
const failedWorkDelayMs = 1_000
const drainTimeoutMs = 1_000
/** How many acked messages to remember. A forgotten one may be processed twice, but is not lost. */
const ackedMax = 16_384

export class Taker {
  readonly #link: Link
  readonly #atOnce: number
  readonly #work: (delivery: Delivery) => Promise<void>
  readonly #held = new Map<number, Delivery>()
  readonly #buffer: Delivery[] = []
  /** Store time by sequence, oldest first. */
  readonly #acked = new Map<number, number>()
  readonly #nextSubject: string
  readonly #keepingAlive: Periodic
  readonly #watching: Periodic
  #nc: NatsConnection | null = null
  #subscription: Subscription | null = null
  #inbox = ''
  #requests = 0
  /** Messages left in the open request; 0: no request is open. */
  #left = 0
  #heardAt = 0
  #underWay = 0
  #pausing: NodeJS.Timeout | null = null
  #stopping = false
  #idle: (() => void) | null = null

  /** Calls `work` for every message, with at most `atOnce` running. */
  constructor(link: Link, atOnce: number, work: (delivery: Delivery) => Promise<void>) {
    this.#link = link
    this.#atOnce = atOnce
    this.#work = work
    this.#nextSubject = `$JS.API.CONSUMER.MSG.NEXT.${link.names.stream}.${link.names.consumer}`
    this.#keepingAlive = periodic(link.ackWaitMs / 3, () => this.#stillWorking())
    this.#watching = periodic(heartbeatMs, () => this.#watch())
    link.on('ready', this.#begin)
    link.on('lost', this.#end)
    if (link.ready !== null) this.#begin(link.ready)
  }

  /** Takes no more messages, returns the buffered ones, and waits for the running ones. */
  async stop(): Promise<void> {
    this.#stopping = true
    void this.#watching.stop()
    if (this.#pausing !== null) clearTimeout(this.#pausing)
    const subscription = this.#subscription
    this.#subscription = null
    this.#putBackBuffered()
    // Messages that arrive meanwhile are put back.
    if (subscription !== null && !subscription.isClosed()) await within(subscription.drain(), drainTimeoutMs)
    if (this.#underWay > 0) {
      await new Promise<void>((resolve) => {
        this.#idle = resolve
      })
    }
    void this.#keepingAlive.stop()
  }

  /** The broker is closed: its messages are redelivered elsewhere. */
  abandon(): void {
    this.#stopping = true
    void this.#watching.stop()
    void this.#keepingAlive.stop()
    if (this.#pausing !== null) clearTimeout(this.#pausing)
    this.#buffer.length = 0
    this.#end()
  }

  /** Uses a new inbox each time, so that late replies to an earlier request are dropped. */
  #begin = (nc: NatsConnection): void => {
    if (this.#stopping) return
    this.#end()
    this.#nc = nc
    const inbox = `_INBOX.${nuid.next()}.`
    this.#inbox = inbox
    const callback = (error: Error | null, message: Msg): void => {
      if (error === null) this.#receive(message, inbox)
      else this.#link.log.error({ err: error }, 'the broker refuses to deliver messages')
    }
    this.#subscription = nc.subscribe(`${inbox}*`, { callback })
    this.#request()
  }

  #end = (): void => {
    if (this.#subscription !== null && !this.#subscription.isClosed()) this.#subscription.unsubscribe()
    this.#subscription = null
    this.#nc = null
    this.#left = 0
  }

  #request(): void {
    const atOnce = this.#atOnce
    const room = 2 * atOnce - this.#underWay - this.#buffer.length
    // Not for every single message: a request costs as much as a message.
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
      if (message.subject === `${this.#inbox}${this.#requests}`) this.#onStatus(message)
      return
    }
    const origin = originOf(message.reply ?? '')
    if (origin === null) return
    if (this.#left > 0) this.#left -= 1
    const held = this.#held.get(origin.sequence)
    // Compares the time too: a deleted and recreated stream counts from one again.
    if (held !== undefined && held.storedAtMs === origin.storedAtMs) {
      held.adopt(message.reply ?? '', origin)
    } else if (this.#acked.get(origin.sequence) === origin.storedAtMs) {
      this.#link.post(message.reply ?? '', ack)
    } else {
      const onEnded = (ended: Delivery, isDone: boolean): void => {
        this.#release(ended)
        if (isDone) this.#remember(ended)
      }
      const delivery = new Delivery(message, origin, this.#link, onEnded)
      this.#held.set(origin.sequence, delivery)
      this.#buffer.push(delivery)
    }
    if (this.#stopping) this.#putBackBuffered()
    this.#run()
    this.#request()
  }

  /** The broker's status message for the open request. */
  #onStatus(message: Msg): void {
    const code = message.headers?.code ?? 0
    if (code === 100) return
    this.#left = 0
    // 408: the request expired, which is normal when idle. 404: no messages.
    if (code === 408 || code === 404) {
      this.#request()
      return
    }
    this.#link.log.warn(
      { code, said: message.headers?.description ?? '' },
      'the broker ended a request for messages; checking its consumer',
    )
    this.#mend()
  }

  #watch(): void {
    if (this.#left === 0) {
      this.#request()
    } else if (performance.now() - this.#heardAt > silentMs) {
      this.#link.log.warn({}, 'the broker is silent; checking its consumer')
      this.#mend()
    }
  }

  /** Recreates a deleted consumer or stream, then starts over. */
  #mend(): void {
    const nc = this.#nc
    this.#end()
    if (nc === null || this.#pausing !== null || this.#stopping) return
    this.#pausing = setTimeout(() => {
      void this.#link.mend().then(() => {
        this.#pausing = null
        const { ready } = this.#link
        if (ready !== null) this.#begin(ready)
      })
    }, pauseMs)
  }

  #run(): void {
    while (this.#underWay < this.#atOnce) {
      const delivery = this.#buffer.shift()
      if (delivery === undefined) return
      this.#underWay += 1
      void this.#workOn(delivery)
    }
  }

  async #workOn(delivery: Delivery): Promise<void> {
    try {
      await this.#work(delivery)
      if (!delivery.isEnded) {
        this.#link.log.warn({ message: delivery.id }, 'a message was processed and not acked; it will be redelivered')
        this.#release(delivery)
      }
    } catch (error) {
      this.#link.log.error({ err: error, message: delivery.id, deliveries: delivery.deliveries }, 'a message failed')
      delivery.putBack(failedWorkDelayMs)
    }
    this.#underWay -= 1
    this.#run()
    this.#request()
    if (this.#underWay === 0) this.#idle?.()
  }

  #release(delivery: Delivery): void {
    if (this.#held.get(delivery.sequence) === delivery) this.#held.delete(delivery.sequence)
  }

  #remember({ sequence, storedAtMs }: Delivery): void {
    const [oldest] = this.#acked.size >= ackedMax ? this.#acked.keys() : []
    if (oldest !== undefined) this.#acked.delete(oldest)
    this.#acked.set(sequence, storedAtMs)
  }

  /** A message at its last delivery would die without an attempt, so it is processed after all. */
  #putBackBuffered(): void {
    const { maxDeliver } = this.#link
    const kept = this.#buffer.filter(({ deliveries }) => deliveries >= maxDeliver)
    for (const delivery of this.#buffer) if (delivery.deliveries < maxDeliver) delivery.putBack(0)
    this.#buffer.splice(0, this.#buffer.length, ...kept)
  }

  #stillWorking(): void {
    for (const delivery of this.#held.values()) delivery.stillWorking()
  }
}
