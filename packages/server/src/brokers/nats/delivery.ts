/**
 * One delivered message.
 *
 *   held ──ack, putBack──► ended
 *     └──bury──► being buried ──stored as a dead letter──► ended
 *                     └──failed──► held
 */
import type { Msg, MsgHdrs } from '@nats-io/transport-node'
import type { Delivery } from '../port.js'
import type { Link } from './link.js'

const words = new TextEncoder()
/** The message is finished. */
export const ack = words.encode('+ACK')
const nak = words.encode('-NAK')
const inProgress = words.encode('+WPI')
const nanosPerMs = 1_000_000

/** The ack subject holds delivery count and time: `$JS.ACK[.domain.account].stream.consumer.deliveries.seq.…`. */
export interface Origin {
  readonly deliveries: number
  readonly sequence: number
  readonly storedAtMs: number
}

export function originOf(reply: string): Origin | null {
  const tokens = reply.split('.')
  if (tokens[0] !== '$JS' || tokens[1] !== 'ACK' || tokens.length < 9) return null
  const at = tokens.length === 9 ? 4 : 6
  const [deliveries, sequence, storedAt] = [tokens[at], tokens[at + 1], tokens[at + 3]].map(Number)
  if (!deliveries || !sequence || !storedAt) return null
  return { deliveries, sequence, storedAtMs: Math.floor(storedAt / nanosPerMs) }
}

export class JetStreamDelivery implements Delivery {
  readonly storedAtMs: number
  readonly sequence: number
  readonly #message: Msg
  readonly #link: Link
  readonly #onEnded: (delivery: JetStreamDelivery, isDone: boolean) => void
  #deliveries: number
  #reply: string
  #ended = false
  #burying = false

  /** `onEnded`: acked, buried or put back. */
  constructor(
    message: Msg,
    origin: Origin,
    link: Link,
    onEnded: (delivery: JetStreamDelivery, isDone: boolean) => void,
  ) {
    this.#message = message
    this.#reply = message.reply ?? ''
    this.#link = link
    this.#onEnded = onEnded
    this.#deliveries = origin.deliveries
    this.sequence = origin.sequence
    this.storedAtMs = origin.storedAtMs
  }

  get data(): Uint8Array {
    return this.#message.data
  }

  get deliveries(): number {
    return this.#deliveries
  }

  get id(): string {
    return `${this.sequence}`
  }

  get isEnded(): boolean {
    return this.#ended
  }

  /** Null if there are none or they cannot be parsed: anybody may publish. */
  get headers(): MsgHdrs | null {
    try {
      return this.#message.headers ?? null
    } catch {
      return null
    }
  }

  header(name: string): string | undefined {
    const headers = this.headers
    return headers === null ? undefined : headerOf(headers, name)
  }

  ack(): void {
    if (!this.#burying) this.#end(ack)
  }

  putBack(delayMs: number): void {
    if (this.#burying) return
    const delay = Math.max(0, Math.round(delayMs)) * nanosPerMs
    this.#end(delay === 0 ? nak : words.encode(`-NAK {"delay":${delay}}`))
  }

  /** Holds off redelivery for another ack wait. */
  stillWorking(): void {
    // Without a connection there is no redelivery to hold off, and a queued signal would be useless later.
    if (!this.#ended && this.#link.ready !== null) this.#link.post(this.#reply, inProgress)
  }

  /** The broker redelivered a message that we still hold. Work continues, and its outcome settles the later delivery. */
  adopt(reply: string, origin: Origin): void {
    this.#reply = reply
    this.#deliveries = Math.max(this.#deliveries, origin.deliveries)
  }

  /** Runs `store`, then acks. Returns false and does nothing if the message has ended or is being buried. */
  async buryWith(store: () => Promise<void>): Promise<boolean> {
    if (this.#ended || this.#burying) return false
    this.#burying = true
    try {
      await store()
    } finally {
      this.#burying = false
    }
    this.#end(ack)
    return true
  }

  #end(word: Uint8Array): void {
    if (this.#ended) return
    this.#ended = true
    this.#link.post(this.#reply, word)
    this.#onEnded(this, word === ack)
  }
}

/** Ignores case. */
export function headerOf(headers: MsgHdrs, name: string): string | undefined {
  const wanted = name.toLowerCase()
  for (const [key, values] of headers) {
    if (key.length === wanted.length && key.toLowerCase() === wanted) return values[0]
  }
  return undefined
}
