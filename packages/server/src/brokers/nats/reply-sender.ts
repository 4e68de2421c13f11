/**
 * Sends replies to the callers that asked. An inbox without a reader drops its messages, and after a broker restart a
 * caller may reconnect later than we do.
 *
 *   given ──connected──► sent ──no complaint for a moment──► forgotten
 *     ▲                    └──no reader──► waits, longer each time ──► sent, or finally forgotten
 *     └── the connection is lost: resent when it is back
 */
import { type Msg, nuid } from '@nats-io/transport-node'
import type { Link } from './link.js'

interface Reply {
  readonly subject: string
  readonly data: Uint8Array
  tries: number
  isSent: boolean
  /** When to look at it next (monotonic clock): to send it again or to forget it. */
  dueAt: number
}

const repliesMax = 16_384
/** The server reports a missing reader within this time. */
const complaintMs = 1_000
/** Doubles with each retry: more than six seconds in total. */
const retryMs = 100
const triesMax = 7
const tickMs = 100
const noResponders = 503

export class ReplySender {
  readonly #link: Link
  readonly #inbox = `_INBOX.${nuid.next()}.`
  readonly #replies = new Map<string, Reply>()
  #count = 0
  #clock: NodeJS.Timeout | null = null

  constructor(link: Link) {
    this.#link = link
    link.subscribe(`${this.#inbox}*`, { callback: (error, message) => this.#retryUnread(error, message) })
    // Recently sent replies may have been lost with the connection. Sending twice is harmless: the caller takes the first one.
    link.on('ready', () => {
      for (const [token, reply] of this.#replies) this.#transmit(token, reply)
    })
  }

  send(subject: string, data: Uint8Array): void {
    if (this.#link.isClosed) return
    // The oldest reply is the least likely to have a waiting caller.
    const [oldest] = this.#replies.size >= repliesMax ? this.#replies.keys() : []
    if (oldest !== undefined) this.#replies.delete(oldest)
    this.#count += 1
    const token = this.#count.toString(36)
    const reply = { subject, data, tries: 0, isSent: false, dueAt: 0 }
    this.#replies.set(token, reply)
    this.#clock ??= setInterval(() => this.#tick(), tickMs)
    this.#transmit(token, reply)
  }

  close(): void {
    if (this.#clock !== null) clearInterval(this.#clock)
    this.#clock = null
    this.#replies.clear()
  }

  #transmit(token: string, reply: Reply): void {
    const nc = this.#link.ready
    if (nc === null || nc.isClosed()) return
    reply.isSent = true
    reply.dueAt = performance.now() + complaintMs
    nc.publish(reply.subject, reply.data, { reply: `${this.#inbox}${token}` })
  }

  #retryUnread(error: Error | null, message: Msg): void {
    if (error !== null || message.headers?.code !== noResponders) return
    const token = message.subject.slice(this.#inbox.length)
    const reply = this.#replies.get(token)
    if (reply === undefined) return
    reply.tries += 1
    if (reply.tries === triesMax) this.#replies.delete(token)
    reply.isSent = false
    reply.dueAt = performance.now() + retryMs * 2 ** (reply.tries - 1)
  }

  #tick(): void {
    const now = performance.now()
    for (const [token, reply] of this.#replies) {
      if (reply.dueAt > now) continue
      if (reply.isSent) this.#replies.delete(token)
      else this.#transmit(token, reply)
    }
    if (this.#replies.size > 0 || this.#clock === null) return
    clearInterval(this.#clock)
    this.#clock = null
  }
}
