/**
 * Publishes and waits for acks and answers, with one inbox and one timer for all.
 *
 *   sent ──the broker has stored it──► stored ──the router's answer──► answered
 *     │ answered already: answered         └─ a plain publish is done here
 *     │ refused, or no ack in time ──► failed
 *     └ connection lost ──back──► sent again, under the same id: the broker keeps one of them
 */
import { type Msg, type MsgHdrs, type NatsConnection, headers as newHeaders, nuid } from '@nats-io/transport-node'
import { apiCodes, BrokerFault } from './faults.js'
import type { Link } from './link.js'
import { headerNames } from './names.js'

export interface Outgoing {
  readonly data: Uint8Array
  /** The broker drops a second message with the same id (within its window). */
  readonly id?: string
  readonly headers?: Readonly<Record<string, string>>
  /** After this time (milliseconds since 1970) nobody needs the answer, and the message is not processed. */
  readonly deadlineMs?: number
}

export interface Letter {
  readonly subject: string
  readonly data: Uint8Array
  readonly headers: MsgHdrs
}

export interface Published {
  readonly duplicate: boolean
  /** The stream sequence; for a duplicate, that of the first. */
  readonly sequence: number
}

interface Waiting {
  readonly letter: Letter
  readonly onStored: (published: Published) => void
  readonly onAnswer: ((data: Uint8Array) => void) | null
  readonly onFault: (fault: BrokerFault) => void
  isStored: boolean
  isSentAgain: boolean
  /** Both by the monotonic clock. */
  readonly storeBy: number
  readonly answerBy: number
}

interface PubAck {
  seq?: number
  duplicate?: boolean
  error?: { err_code?: number; description?: string }
}

const storeTimeoutMs = 5_000
const waitingMax = 16_384
/** Maximum delay of a timeout. One timer for all is cheaper than one each. */
const tickMs = 25
const noResponders = 503
const nobodyWaits = 'nobody waits for the answer'
const text = new TextDecoder()

export class Outbox {
  readonly #link: Link
  readonly #inbox = `_INBOX.${nuid.next()}.`
  readonly #waiting = new Map<string, Waiting>()
  #count = 0
  #clock: NodeJS.Timeout | null = null

  constructor(link: Link) {
    this.#link = link
    link.subscribe(`${this.#inbox}*`, {
      callback: (error, message) => {
        // An error is a missing permission. The link logs it, and the waiting calls time out.
        if (error === null) this.#receive(message)
      },
    })
    link.on('ready', (nc) => this.#sendAgain(nc))
  }

  /** Resolves when the broker has stored it. The headers must contain a `Nats-Msg-Id`, because it may be sent twice. */
  async send(letter: Letter): Promise<Published> {
    const nc = this.#admit()
    return new Promise((onStored, onFault) => {
      const answerBy = Number.POSITIVE_INFINITY
      this.#put(nc, this.#nextToken(), { letter, onStored, onAnswer: null, onFault, answerBy })
    })
  }

  async publish(message: Outgoing): Promise<Published> {
    return this.send(this.#letter(message, null))
  }

  /** Publishes it and waits for the router's answer. */
  async ask(message: Outgoing, timeoutMs: number, signal?: AbortSignal): Promise<Uint8Array> {
    if (signal?.aborted) throw new BrokerFault('aborted', nobodyWaits)
    const nc = this.#admit()
    const token = this.#nextToken()
    const letter = this.#letter(message, `${this.#inbox}a${token}`)
    const onAbort = () => this.#fail(token, 'aborted', nobodyWaits)
    signal?.addEventListener('abort', onAbort, { once: true })
    try {
      return await new Promise((onAnswer, onFault) => {
        const answerBy = performance.now() + timeoutMs
        this.#put(nc, token, { letter, onStored: () => undefined, onAnswer, onFault, answerBy })
      })
    } finally {
      signal?.removeEventListener('abort', onAbort)
    }
  }

  close(): void {
    for (const token of [...this.#waiting.keys()]) this.#fail(token, 'timeout', 'the connection was closed')
    if (this.#clock !== null) clearInterval(this.#clock)
    this.#clock = null
  }

  #admit(): NatsConnection {
    const nc = this.#link.ready
    if (nc === null) throw new BrokerFault('unavailable', 'the broker is not connected')
    if (this.#waiting.size >= waitingMax) throw new BrokerFault('unavailable', `${waitingMax} are waiting already`)
    return nc
  }

  #nextToken(): string {
    this.#count += 1
    return this.#count.toString(36)
  }

  #letter({ data, id, headers: own, deadlineMs }: Outgoing, replyTo: string | null): Letter {
    const headers = newHeaders()
    for (const name in own) headers.append(name, own[name] ?? '')
    headers.set(headerNames.messageId, id ?? nuid.next())
    if (deadlineMs !== undefined) headers.set(headerNames.deadline, `${deadlineMs}`)
    if (replyTo !== null) headers.set(headerNames.replyTo, replyTo)
    // The server would close the connection, and every other request would fail with it.
    const max = this.#link.topology?.messageBytesMax
    if (max !== undefined && data.length + sizeOf(headers) > max) {
      throw new BrokerFault('too_large', `the message has more than ${max} bytes, its headers included`)
    }
    return { subject: this.#link.names.subject, data, headers }
  }

  #put(nc: NatsConnection, token: string, waiting: Omit<Waiting, 'isStored' | 'isSentAgain' | 'storeBy'>): void {
    const storeBy = performance.now() + storeTimeoutMs
    this.#waiting.set(token, { ...waiting, isStored: false, isSentAgain: false, storeBy })
    this.#clock ??= setInterval(() => this.#tick(), tickMs)
    this.#transmit(nc, token, waiting.letter)
  }

  #transmit(nc: NatsConnection, token: string, { subject, data, headers }: Letter): void {
    // A connection that has just closed is soon reported as lost. Then the message is sent again.
    if (!nc.isClosed()) nc.publish(subject, data, { headers, reply: `${this.#inbox}s${token}` })
  }

  #sendAgain(nc: NatsConnection): void {
    for (const [token, waiting] of this.#waiting) {
      if (waiting.isStored) continue
      waiting.isSentAgain = true
      this.#transmit(nc, token, waiting.letter)
    }
  }

  #receive(message: Msg): void {
    const name = message.subject.slice(this.#inbox.length)
    const token = name.slice(1)
    const waiting = this.#waiting.get(token)
    if (waiting === undefined) return
    if (name.startsWith('s')) {
      this.#stored(token, waiting, message)
    } else if (waiting.onAnswer !== null) {
      this.#waiting.delete(token)
      waiting.onAnswer(message.data)
    }
  }

  #stored(token: string, waiting: Waiting, message: Msg): void {
    if (message.data.length === 0 && message.headers?.code === noResponders) {
      void this.#link.mend()
      this.#fail(token, 'unavailable', 'no stream of the broker accepts the message')
      return
    }
    const ack = parseAck(message.data)
    if (ack === null || ack.error !== undefined) {
      const tooLarge = ack?.error?.err_code === apiCodes.messageTooLarge
      const said = ack?.error?.description ?? 'no reason'
      this.#fail(token, tooLarge ? 'too_large' : 'unavailable', `the broker refused the message: ${said}`)
      return
    }
    // A message sent twice may be its own duplicate.
    const duplicate = ack.duplicate === true && !waiting.isSentAgain
    if (waiting.onAnswer === null) {
      this.#waiting.delete(token)
      waiting.onStored({ duplicate, sequence: ack.seq ?? 0 })
    } else if (duplicate) {
      this.#fail(token, 'timeout', 'the broker has a message with this id already: the answer goes to its sender')
    } else {
      waiting.isStored = true
    }
  }

  #tick(): void {
    const now = performance.now()
    for (const [token, { isStored, storeBy, answerBy }] of this.#waiting) {
      if (now >= answerBy) this.#fail(token, 'timeout', 'no answer came in time')
      else if (!isStored && now >= storeBy)
        this.#fail(token, 'timeout', 'the broker did not confirm the message in time')
    }
    if (this.#waiting.size > 0 || this.#clock === null) return
    clearInterval(this.#clock)
    this.#clock = null
  }

  #fail(token: string, code: BrokerFault['code'], message: string): void {
    const waiting = this.#waiting.get(token)
    this.#waiting.delete(token)
    waiting?.onFault(new BrokerFault(code, message))
  }
}

/** The size on the wire, with the version line before and the empty line after. */
export function sizeOf(headers: MsgHdrs): number {
  let bytes = 12
  for (const [name, values] of headers) {
    for (const value of values) bytes += name.length + Buffer.byteLength(value) + 4
  }
  return bytes
}

/** Null if it is not an ack: anybody may write to an inbox. */
function parseAck(data: Uint8Array): PubAck | null {
  try {
    const value: unknown = JSON.parse(text.decode(data))
    return typeof value === 'object' && value !== null ? value : null
  } catch {
    return null
  }
}
