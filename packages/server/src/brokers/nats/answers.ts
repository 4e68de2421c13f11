/**
 * Sends answers to the callers that asked. An inbox without a reader drops its messages, and after a broker restart a
 * caller may reconnect later than we do.
 *
 *   given ──connected──► sent ──no complaint for a moment──► forgotten
 *     ▲                    └──no reader──► waits, longer each time ──► sent, or finally forgotten
 *     └── the connection is lost: resent when it is back
 */
import { type Msg, type NatsConnection, nuid } from '@nats-io/transport-node'
import type { Link } from './link.js'

interface Answer {
  readonly subject: string
  readonly data: Uint8Array
  tries: number
  isSent: boolean
  /** When to look at it next (monotonic clock): to send it again or to forget it. */
  dueAt: number
}

const answersMax = 16_384
/** The server reports a missing reader within this time. */
const complaintMs = 1_000
/** Doubles with each retry: more than six seconds in total. */
const retryMs = 100
const triesMax = 7
const tickMs = 100
const noResponders = 503

export class Answers {
  readonly #link: Link
  readonly #inbox = `_INBOX.${nuid.next()}.`
  readonly #answers = new Map<string, Answer>()
  #count = 0
  #clock: NodeJS.Timeout | null = null
  #subscribed: NatsConnection | null = null

  constructor(link: Link) {
    this.#link = link
    link.onReady((nc) => this.#begin(nc))
  }

  give(subject: string, data: Uint8Array): void {
    if (this.#link.isClosed) return
    // The oldest answer is the least likely to have a waiting caller.
    const [oldest] = this.#answers.size >= answersMax ? this.#answers.keys() : []
    if (oldest !== undefined) this.#answers.delete(oldest)
    this.#count += 1
    const token = this.#count.toString(36)
    const answer = { subject, data, tries: 0, isSent: false, dueAt: 0 }
    this.#answers.set(token, answer)
    this.#clock ??= setInterval(() => this.#tick(), tickMs)
    this.#send(token, answer)
  }

  close(): void {
    if (this.#clock !== null) clearInterval(this.#clock)
    this.#clock = null
    this.#answers.clear()
  }

  #begin(nc: NatsConnection): void {
    if (this.#subscribed !== nc) {
      this.#subscribed = nc
      nc.subscribe(`${this.#inbox}*`, { callback: (error, message) => this.#heed(error, message) })
    }
    // Recently sent answers may have been lost with the connection. Sending twice is harmless: the caller takes the first one.
    for (const [token, answer] of this.#answers) this.#send(token, answer)
  }

  #send(token: string, answer: Answer): void {
    const nc = this.#link.ready
    if (nc === null || nc.isClosed()) return
    answer.isSent = true
    answer.dueAt = performance.now() + complaintMs
    nc.publish(answer.subject, answer.data, { reply: `${this.#inbox}${token}` })
  }

  #heed(error: Error | null, message: Msg): void {
    if (error !== null || message.headers?.code !== noResponders) return
    const token = message.subject.slice(this.#inbox.length)
    const answer = this.#answers.get(token)
    if (answer === undefined) return
    answer.tries += 1
    if (answer.tries === triesMax) this.#answers.delete(token)
    answer.isSent = false
    answer.dueAt = performance.now() + retryMs * 2 ** (answer.tries - 1)
  }

  #tick(): void {
    const now = performance.now()
    for (const [token, answer] of this.#answers) {
      if (answer.dueAt > now) continue
      if (answer.isSent) this.#answers.delete(token)
      else this.#send(token, answer)
    }
    if (this.#answers.size > 0 || this.#clock === null) return
    clearInterval(this.#clock)
    this.#clock = null
  }
}
