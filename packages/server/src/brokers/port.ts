/**
 * A broker as the router's intake: messages of one subject, shared by all routers, each kept until it is acked.
 *
 *   published ──taken──► with a router ──ack──► gone
 *                            ├──putBack(delay), or silent for the ack wait──► taken again, deliveries + 1
 *                            └──bury──► dead letter, complete, with its reason
 */

/** One message held by this router. Exactly one of `ack`, `putBack` and `bury` ends it; later calls do nothing. */
export interface Delivery {
  readonly data: Uint8Array
  header(name: string): string | undefined
  /** The broker's delivery count, including this one. */
  readonly deliveries: number
  /** When the broker stored it: milliseconds since 1970, by its clock. */
  readonly storedAtMs: number
  /** The broker's sequence: names the message in logs and dead letters. */
  readonly id: string
  ack(): void
  putBack(delayMs: number): void
}

export interface Outgoing {
  readonly data: Uint8Array
  /** The broker drops a second message with the same id (within its window). */
  readonly id?: string
  readonly headers?: Readonly<Record<string, string>>
  /** After this time (milliseconds since 1970) nobody needs the answer, and the message is not processed. */
  readonly deadlineMs?: number
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

export interface Redriven {
  readonly moved: number
  readonly skipped: number
  /** The skipped ones that the broker refused; absent: none. */
  readonly refused?: readonly { id: string; reason: string }[]
}

export interface BrokerDeadLetter {
  /** Its sequence among the dead letters. */
  readonly id: string
  /** In lists: empty if longer than requested. */
  readonly data: Uint8Array
  readonly dataBytes: number
  /** A repeated header has all its values, separated by commas. In lists: empty if longer than requested. */
  readonly headers: Readonly<Record<string, string>>
  readonly headersBytes: number
  readonly reason: string
  readonly detail: string
  readonly deliveries: number
  readonly diedAt: Date
}

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

export interface RouterBroker {
  readonly subject: string
  /** The durable consumer's name. */
  readonly consumer: string
  readonly isConnected: boolean
  /** Why it is not connected, for people, if known. */
  readonly trouble: string | null
  /** Maximum message size, headers included; null until the broker reports it. */
  readonly payloadBytesMax: number | null
  /** Resolves when the broker has stored it. Throws BrokerFault. */
  publish(message: Outgoing): Promise<{ duplicate: boolean }>
  /** Publishes it and waits for the router's answer. Throws BrokerFault. */
  ask(message: Outgoing, timeoutMs: number, signal?: AbortSignal): Promise<Uint8Array>
  /** Whether it has a header `Spillway-Reply-To` with a subject that we may write to. */
  canAnswer(delivery: Delivery): boolean
  /** Answers the publisher if possible. Throws BrokerFault `too_large`. */
  answer(delivery: Delivery, data: Uint8Array): void
  /**
   * Calls `work` for every message, with at most `atOnce` running; takes at most the same number again into a buffer.
   * Continues over lost connections until stopped; `stop` waits for running work.
   */
  take(atOnce: number, work: (delivery: Delivery) => Promise<void>): { stop(): Promise<void> }
  /** Null while the broker does not answer. */
  backlog(): Promise<Backlog | null>
  /** Maximum delivered but unacked messages over all routers. */
  limitAckPending(count: number): Promise<void>
  /**
   * Stores it as a complete dead letter with the reason, then acks: a crash in between still gives one dead letter.
   * `keep` gets its number before the ack; if it throws, this throws too, and the message stays.
   */
  bury(
    delivery: Delivery,
    why: { reason: string; detail: string },
    keep?: (letter: string) => Promise<void>,
  ): Promise<void>
  /** One listener, for messages that died while no router held them. */
  onExhausted(listener: ExhaustedListener): void
  /** Oldest first. Data and headers longer than `partBytesMax` bytes (default: no limit) are left out. */
  deadLetters(limit: number, after: string | null, partBytesMax?: number): Promise<BrokerDeadLetter[]>
  /** One dead letter, complete. */
  deadLetter(id: string): Promise<BrokerDeadLetter | null>
  /** Publishes them again, complete, as new messages, oldest first, and deletes the dead letters. */
  redrive(ids: readonly string[]): Promise<Redriven>
  purge(ids: readonly string[]): Promise<number>
  close(): Promise<void>
}

export type BrokerFaultCode = 'unavailable' | 'timeout' | 'too_large' | 'aborted'

/** The outcome of the publish is unknown, except `too_large` and `unavailable` before sending: nothing was published. */
export class BrokerFault extends Error {
  override readonly name = 'BrokerFault'
  readonly code: BrokerFaultCode

  constructor(code: BrokerFaultCode, message: string, options?: ErrorOptions) {
    super(message, options)
    this.code = code
  }
}
