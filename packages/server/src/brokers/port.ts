/**
 * A broker as the router's intake: messages of one subject, shared by all routers, each kept until it is acked.
 *
 *   published ──taken──► with a router ──ack──► gone
 *                            ├──putBack(delay), or not heard of for the ack wait──► taken again, deliveries + 1
 *                            └──bury──► dead letter, whole, with its reason
 */

/** One message in the hands of this router. Exactly one of `ack`, `putBack` and `bury` ends it; later calls do nothing. */
export interface Delivery {
  readonly data: Uint8Array
  header(name: string): string | undefined
  /** How often it was handed out, this time included: the broker's own count. */
  readonly deliveries: number
  /** When the broker stored it: milliseconds since 1970, by its clock. */
  readonly storedAtMs: number
  /** Names it in logs and dead letters: its number in the broker. */
  readonly id: string
  ack(): void
  putBack(delayMs: number): void
  /** Holds off redelivery for another ack wait. */
  stillWorking(): void
}

export interface Outgoing {
  readonly data: Uint8Array
  /** The broker drops a second one with the same id (within its window). */
  readonly id?: string
  readonly headers?: Readonly<Record<string, string>>
  /** After this instant (milliseconds since 1970) nobody needs the answer: it is not worked on. */
  readonly deadlineMs?: number
}

export interface Backlog {
  /** Not handed out yet. */
  readonly pending: number
  /** Handed out, not acked. */
  readonly ackPending: number
  /** Since the consumer was made, as far as the broker tells. */
  readonly delivered: number
  /** Of those not acked, how many were handed out more than once. */
  readonly redelivered: number
}

export interface Redriven {
  readonly moved: number
  readonly skipped: number
  /** Of those skipped, the ones that the broker did not take; absent: none. */
  readonly refused?: readonly { id: string; reason: string }[]
}

export interface BrokerDeadLetter {
  /** Its number among the dead letters. */
  readonly id: string
  /** In lists empty if it is longer than asked for. */
  readonly data: Uint8Array
  readonly dataBytes: number
  /** Of one that was repeated all values, with commas between. In lists empty if they are longer than asked for. */
  readonly headers: Readonly<Record<string, string>>
  readonly headersBytes: number
  readonly reason: string
  readonly detail: string
  readonly deliveries: number
  readonly diedAt: Date
}

/** A message that was handed out as often as is allowed and is in nobody's hands, found by this process. */
export interface ExhaustedMessage {
  header(name: string): string | undefined
  readonly storedAtMs: number
  /** Its number among the dead letters. */
  readonly letter: string
  readonly reason: string
  readonly detail: string
}

export interface ExhaustedListener {
  /** It is among the dead letters, and still with the broker. When this throws, all is done again later. */
  keep(message: ExhaustedMessage): Promise<void>
  /** It has left the broker: once for each, over all processes. */
  buried(message: ExhaustedMessage): void
}

export interface RouterBroker {
  readonly subject: string
  /** The durable consumer's name. */
  readonly consumer: string
  readonly isConnected: boolean
  /** What keeps it from being connected, for people, where that is known. */
  readonly trouble: string | null
  /** What one message may have, headers included; null until the broker has told. */
  readonly payloadBytesMax: number | null
  /** Resolves when the broker has stored it. Throws BrokerFault. */
  publish(message: Outgoing): Promise<{ duplicate: boolean }>
  /** Publishes it and waits for the answer that the router gives to it. Throws BrokerFault. */
  ask(message: Outgoing, timeoutMs: number, signal?: AbortSignal): Promise<Uint8Array>
  /** Whether it asked to be answered (header `Spillway-Reply-To`), in a place where we may. */
  canAnswer(delivery: Delivery): boolean
  /** Answers the one who published this, if it can be. Throws BrokerFault `too_large`. */
  answer(delivery: Delivery, data: Uint8Array): void
  /**
   * Hands every message to `work`, at most `atOnce` of them under way; takes none from the broker beyond that and a
   * buffer of as many again. Goes on over lost connections, until stopped; `stop` waits for what is under way.
   */
  take(atOnce: number, work: (delivery: Delivery) => Promise<void>): { stop(): Promise<void> }
  /** Null while the broker does not answer. */
  backlog(): Promise<Backlog | null>
  /** How many may be handed out and not acked, over all routers. */
  limitAckPending(count: number): Promise<void>
  /**
   * Whole to the dead letters, with the reason, then acked: a crash in between buries it once. `keep` hears the number of the
   * dead letter before the ack; when it throws, so does this, and the message is still there.
   */
  bury(
    delivery: Delivery,
    why: { reason: string; detail: string },
    keep?: (letter: string) => Promise<void>,
  ): Promise<void>
  /** One listener, for what dies without being in anybody's hands. */
  onExhausted(listener: ExhaustedListener): void
  /** Oldest first. Data and headers of more than `partBytesMax` bytes (default: none) are left out. */
  deadLetters(limit: number, after: string | null, partBytesMax?: number): Promise<BrokerDeadLetter[]>
  /** One of them, whole. */
  deadLetter(id: string): Promise<BrokerDeadLetter | null>
  /** Publishes them again, whole, as new ones, oldest first, and takes them from the dead letters. */
  redrive(ids: readonly string[]): Promise<Redriven>
  purge(ids: readonly string[]): Promise<number>
  close(): Promise<void>
}

export type BrokerFaultCode = 'unavailable' | 'timeout' | 'too_large' | 'aborted'

/** Nothing is known of what was published; `too_large` and `unavailable` before sending: it was not. */
export class BrokerFault extends Error {
  override readonly name = 'BrokerFault'
  readonly code: BrokerFaultCode

  constructor(code: BrokerFaultCode, message: string, options?: ErrorOptions) {
    super(message, options)
    this.code = code
  }
}
