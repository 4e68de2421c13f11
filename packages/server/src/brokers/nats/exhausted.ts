/**
 * Messages that reached the delivery limit when their last router died. The broker keeps them but no longer delivers
 * them. It sends one advisory; messages whose advisory was missed are found by counting.
 */
import type { StoredMsg } from '@nats-io/jetstream'
import type { Msg } from '@nats-io/transport-node'
import { type Periodic, periodic } from 'spillway/workload'
import { type DeadLetters, deleteMessage, nextFrom } from './dead-letters.js'
import { headerOf, readableHeaders } from './delivery.js'
import { asBrokerFault } from './faults.js'
import { type Link, within } from './link.js'

/** A message that reached the delivery limit and that no router holds, found by this process. */
export interface ExhaustedMessage {
  header(name: string): string | undefined
  readonly storedAtMs: number
  /** Its sequence among the dead letters. */
  readonly letter: string
  readonly reason: string
  readonly detail: string
}

export interface ExhaustedListener {
  /** The dead letter is stored and the broker still has the message. If this throws, everything is retried later. */
  keep(message: ExhaustedMessage): Promise<void>
  /** The message has left the broker. Called once per message over all processes. */
  buried(message: ExhaustedMessage): void
}

const perLookMax = 256
const namedMax = 16_384
const closeTimeoutMs = 1_000
const reason = 'max_deliver'

export class Exhausted {
  readonly #link: Link
  readonly #dead: DeadLetters
  readonly #looking: Periodic
  /** Messages named by advisories and not buried yet: delivery count by sequence. */
  readonly #named = new Map<number, number>()
  #listener: ExhaustedListener | null = null
  /** At the last look, no router held a message up to this sequence. */
  #settled = 0

  constructor(link: Link, dead: DeadLetters, lookMs: number) {
    this.#link = link
    this.#dead = dead
    const { stream, consumer } = link.names
    link.subscribe(`$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.${stream}.${consumer}`, {
      queue: consumer,
      callback: (error, message) => {
        if (error !== null) link.log.warn({ err: error }, 'cannot listen for messages that used up their deliveries')
        else this.#onAdvisory(message)
      },
    })
    this.#looking = periodic(lookMs, () => this.#buryLeftOver(), {
      jitter: 0.1,
      onFault: (error) => {
        if (link.ready !== null)
          link.log.warn({ err: error }, 'could not look for messages that used up their deliveries')
      },
    })
  }

  onExhausted(listener: ExhaustedListener): void {
    this.#listener = listener
  }

  /** Call it while the connection is open: a request on a closing connection may hang. */
  async close(): Promise<void> {
    await within(this.#looking.stop(), closeTimeoutMs)
  }

  #onAdvisory(message: Msg): void {
    const named = parseAdvisory(message)
    if (named === null) return
    const { seq, deliveries } = named
    if (this.#named.size < namedMax) this.#named.set(seq, deliveries)
    this.#buryNamed(seq, deliveries).catch((error: unknown) => {
      this.#link.log.warn(
        { err: error, message: `${seq}` },
        'could not dead-letter a message that used up its deliveries, retrying',
      )
    })
  }

  async #buryNamed(seq: number, deliveries: number): Promise<void> {
    const stored = await this.#link.api().streams.getMessage(this.#link.names.stream, { seq })
    if (stored !== null) await this.#bury(stored, deliveries)
    this.#named.delete(seq)
  }

  async #buryLeftOver(): Promise<void> {
    if (this.#link.ready === null) return
    for (const [seq, deliveries] of this.#named) await this.#buryNamed(seq, deliveries)
    // Leftover messages can be counted only if acked messages leave the stream.
    if (this.#link.topology?.isWorkQueue !== true) return
    const { stream, subject } = this.#link.names
    const found = await this.#leftOver()
    if (found === null) return
    // An acked message leaves its stream slightly later than its consumer, so only messages left over twice in a row are dead.
    const last = Math.min(found.last, this.#settled)
    this.#settled = found.last
    let next = found.first
    for (let count = 0; count < perLookMax && next <= last; count += 1) {
      const stored = await nextFrom(this.#link, stream, subject, next)
      if (stored === null || stored.seq > last) return
      await this.#bury(stored, this.#link.maxDeliver)
      next = stored.seq + 1
    }
  }

  /**
   * In this range, every message in the stream was delivered and no router holds it. The stream is queried first: later
   * messages only make the consumer's figures larger.
   */
  async #leftOver(): Promise<{ first: number; last: number } | null> {
    const { stream, consumer } = this.#link.names
    try {
      const jsm = this.#link.api()
      const { state } = await jsm.streams.info(stream)
      const info = await jsm.consumers.info(stream, consumer)
      if (state.messages <= info.num_pending + info.num_ack_pending || info.num_ack_pending > 0) return null
      return { first: state.first_seq, last: Math.min(info.delivered.stream_seq, state.last_seq) }
    } catch (error) {
      throw asBrokerFault(error, 'count its messages')
    }
  }

  async #bury(stored: StoredMsg, deliveries: number): Promise<void> {
    const detail = `handed out ${deliveries} times, and not acked`
    const headers = readableHeaders(() => stored.header)
    const corpse = { sequence: stored.seq, storedAtMs: stored.time.getTime(), deliveries }
    const letter = await this.#dead.store({ ...corpse, data: stored.data, headers }, { reason, detail })
    const header = (name: string) => headerOf(headers, name)
    const message = { header, storedAtMs: corpse.storedAtMs, letter, reason, detail }
    await this.#listener?.keep(message)
    // Another router may have found it too.
    if (!(await deleteMessage(this.#link, this.#link.names.stream, stored.seq))) return
    this.#listener?.buried(message)
    this.#link.log.warn(
      { message: `${stored.seq}`, deliveries },
      'a message that used up its deliveries is a dead letter now',
    )
  }
}

/** Null if it is not an advisory: an error thrown here would end the connection. */
function parseAdvisory(message: Msg): { seq: number; deliveries: number } | null {
  try {
    const { stream_seq: seq, deliveries } = message.json<{ stream_seq?: unknown; deliveries?: unknown }>()
    return typeof seq === 'number' && typeof deliveries === 'number' ? { seq, deliveries } : null
  } catch {
    return null
  }
}
