/**
 * Messages that reached the delivery limit when their last router died. The broker keeps them but no longer delivers
 * them. It sends one advisory; messages whose advisory was missed are found by counting.
 */
import type { JetStreamManager, StoredMsg } from '@nats-io/jetstream'
import type { Msg, NatsConnection } from '@nats-io/transport-node'
import { type Periodic, periodic } from 'spillway/workload'
import type { ExhaustedListener } from '../port.js'
import { type DeadLetters, deleteMessage, headersOf, nextFrom } from './dead-letters.js'
import { headerOf } from './delivery.js'
import { asBrokerFault } from './faults.js'
import { type BrokerLog, type Link, within } from './link.js'
import type { Names } from './names.js'

export interface ExhaustedOptions {
  readonly link: Link
  readonly names: Names
  readonly maxDeliver: number
  readonly dead: DeadLetters
  readonly log: BrokerLog
  readonly lookMs: number
  api(): JetStreamManager
  /** Leftover messages can be counted only if acked messages leave the stream. */
  isWorkQueue(): boolean
}

const perLookMax = 256
const namedMax = 16_384
const closeTimeoutMs = 1_000
const reason = 'max_deliver'

export class Exhausted {
  readonly #o: ExhaustedOptions
  readonly #looking: Periodic
  #subscribed: NatsConnection | null = null
  /** Messages named by advisories and not buried yet: delivery count by sequence. */
  readonly #named = new Map<number, number>()
  #listener: ExhaustedListener | null = null
  /** At the last look, no router held a message up to this sequence. */
  #settled = 0

  constructor(options: ExhaustedOptions) {
    this.#o = options
    options.link.onReady((nc) => this.#listen(nc))
    this.#looking = periodic(options.lookMs, () => this.#buryLeftOver(), {
      jitter: 0.1,
      onFault: (error) => {
        if (options.link.ready !== null) options.log.warn({ err: error }, 'looking for exhausted messages failed')
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

  #listen(nc: NatsConnection): void {
    if (this.#subscribed === nc) return
    this.#subscribed = nc
    const { stream, consumer } = this.#o.names
    nc.subscribe(`$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.${stream}.${consumer}`, {
      queue: consumer,
      callback: (error, message) => {
        if (error !== null) this.#o.log.warn({ err: error }, 'cannot listen for exhausted messages')
        else this.#onAdvisory(message)
      },
    })
  }

  #onAdvisory(message: Msg): void {
    const named = parseAdvisory(message)
    if (named === null) return
    const { seq, deliveries } = named
    if (this.#named.size < namedMax) this.#named.set(seq, deliveries)
    this.#buryNamed(seq, deliveries).catch((error: unknown) => {
      this.#o.log.warn({ err: error, message: `${seq}` }, 'an exhausted message could not be buried; retrying')
    })
  }

  async #buryNamed(seq: number, deliveries: number): Promise<void> {
    const stored = await this.#o.api().streams.getMessage(this.#o.names.stream, { seq })
    if (stored !== null) await this.#bury(stored, deliveries)
    this.#named.delete(seq)
  }

  async #buryLeftOver(): Promise<void> {
    if (this.#o.link.ready === null) return
    for (const [seq, deliveries] of this.#named) await this.#buryNamed(seq, deliveries)
    if (!this.#o.isWorkQueue()) return
    const jsm = this.#o.api()
    const { stream, subject } = this.#o.names
    const found = await this.#leftOver(jsm)
    if (found === null) return
    // An acked message leaves its stream slightly later than its consumer, so only messages left over twice in a row are dead.
    const last = Math.min(found.last, this.#settled)
    this.#settled = found.last
    let next = found.first
    for (let count = 0; count < perLookMax && next <= last; count += 1) {
      const stored = await nextFrom(jsm, stream, subject, next)
      if (stored === null || stored.seq > last) return
      await this.#bury(stored, this.#o.maxDeliver)
      next = stored.seq + 1
    }
  }

  /**
   * In this range, every message in the stream was delivered and no router holds it. The stream is queried first: later
   * messages only make the consumer's figures larger.
   */
  async #leftOver(jsm: JetStreamManager): Promise<{ first: number; last: number } | null> {
    const { stream, consumer } = this.#o.names
    try {
      const { state } = await jsm.streams.info(stream)
      const info = await jsm.consumers.info(stream, consumer)
      if (state.messages <= info.num_pending + info.num_ack_pending || info.num_ack_pending > 0) return null
      return { first: state.first_seq, last: Math.min(info.delivered.stream_seq, state.last_seq) }
    } catch (error) {
      throw asBrokerFault(error, 'count its messages')
    }
  }

  async #bury(stored: StoredMsg, deliveries: number): Promise<void> {
    const { dead, names } = this.#o
    const detail = `handed out ${deliveries} times, and not acked`
    const headers = headersOf(stored)
    const corpse = { sequence: stored.seq, storedAtMs: stored.time.getTime(), deliveries }
    const letter = await dead.store({ ...corpse, data: stored.data, headers }, { reason, detail })
    const header = (name: string) => (headers === null ? undefined : headerOf(headers, name))
    const message = { header, storedAtMs: corpse.storedAtMs, letter, reason, detail }
    await this.#listener?.keep(message)
    // Another router may have found it too.
    if (!(await deleteMessage(this.#o.api(), names.stream, stored.seq))) return
    this.#listener?.buried(message)
    this.#o.log.warn({ message: `${stored.seq}`, deliveries }, 'an exhausted message was buried')
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
