/**
 * One delivered message.
 *
 *   held ──ack, putBack──► ended
 *     └──bury──► being buried ──stored as a dead letter──► ended
 *                     └──failed──► held
 */
import type { Msg, MsgHdrs } from '@nats-io/transport-node'
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

/** One message held by this router. Exactly one of `ack`, `putBack` and `bury` ends it; later calls do nothing. */
export class Delivery {
  readonly data: Uint8Array
  /** Null if there are none or they cannot be parsed: anybody may publish. */
  readonly headers: MsgHdrs | null
  /** The broker's sequence. `id` names the message in logs and dead letters. */
  readonly sequence: number
  readonly id: string
  /** When the broker stored it: milliseconds since 1970, by its clock. */
  readonly storedAtMs: number
  /** The broker's delivery count, including this one. */
  deliveries: number
  readonly #link: Link
  readonly #onEnded: (delivery: Delivery, isDone: boolean) => void
  #reply: string
  #ended = false
  #burying = false

  /** `onEnded`: acked, buried or put back. */
  constructor(message: Msg, origin: Origin, link: Link, onEnded: (delivery: Delivery, isDone: boolean) => void) {
    this.data = message.data
    this.headers = readableHeaders(() => message.headers)
    this.sequence = origin.sequence
    this.id = `${origin.sequence}`
    this.storedAtMs = origin.storedAtMs
    this.deliveries = origin.deliveries
    this.#reply = message.reply ?? ''
    this.#link = link
    this.#onEnded = onEnded
  }

  get isEnded(): boolean {
    return this.#ended
  }

  header(name: string): string | undefined {
    return headerOf(this.headers, name)
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
    this.deliveries = Math.max(this.deliveries, origin.deliveries)
  }

  /** Runs `store`, then acks. Does nothing if the message has ended or is being buried. */
  async buryWith(store: () => Promise<void>): Promise<void> {
    if (this.#ended || this.#burying) return
    this.#burying = true
    try {
      await store()
    } finally {
      this.#burying = false
    }
    this.#end(ack)
  }

  #end(word: Uint8Array): void {
    if (this.#ended) return
    this.#ended = true
    this.#link.post(this.#reply, word)
    this.#onEnded(this, word === ack)
  }
}

/** Null if there are none or they cannot be parsed. */
export function readableHeaders(read: () => MsgHdrs | undefined): MsgHdrs | null {
  try {
    return read() ?? null
  } catch {
    return null
  }
}

/** Ignores case. */
export function headerOf(headers: MsgHdrs | null, name: string): string | undefined {
  const wanted = name.toLowerCase()
  for (const [key, values] of headers ?? []) {
    if (key.length === wanted.length && key.toLowerCase() === wanted) return values[0]
  }
  return undefined
}
