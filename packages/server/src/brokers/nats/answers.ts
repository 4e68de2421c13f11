/**
 * Answers on their way to those who asked. An inbox that nobody reads drops what is written to it; after a fall of the
 * broker the one who asked may be back later than we are.
 *
 *   given ──connected──► sent ──no complaint for a moment──► forgotten
 *     ▲                    └──nobody reads there──► waits a little, longer each time ──► sent, or at last forgotten
 *     └── the connection is lost: when it is back
 */
import { type Msg, type NatsConnection, nuid } from '@nats-io/transport-node'
import type { Link } from './link.js'

interface Answer {
  readonly subject: string
  readonly data: Uint8Array
  tries: number
  isSent: boolean
  /** When it is looked at next, by the monotonic clock: to be sent again, or to be forgotten. */
  dueAt: number
}

const answersMax = 16_384
/** In so much time the server has said that nobody reads there. */
const complaintMs = 1_000
/** Doubled each time: more than six seconds in all. */
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
    // The oldest is the least likely to be waited for.
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
    // Those that were sent a moment ago may have been lost with the connection; twice is no harm, the first one counts.
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
