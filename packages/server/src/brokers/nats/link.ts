/**
 * The connection to the broker. Connects in the background and always reconnects.
 *
 *   away ──dialled──► connected ──streams and consumer exist────► ready
 *     ▲                   │ lost                                    │ lost: away; they are missing: connected
 *     └───────────────────┴─────────────────────────────────────────┘      close(), from any ──► closed
 *
 * The library's reconnect is off: its first connection cannot be cancelled, it drops messages published while
 * disconnected, and it keeps inboxes for replies to requests that we have abandoned.
 */
import { EventEmitter } from 'node:events'
import { setTimeout as delay } from 'node:timers/promises'
import { type JetStreamManager, jetstreamManager } from '@nats-io/jetstream'
import { connect, type NatsConnection, type SubscriptionOptions } from '@nats-io/transport-node'
import { type IntakeLog, withDeadline } from 'spillway/workload'
import { BrokerFault } from './faults.js'
import type { Names } from './names.js'
import { parseAddress } from './server-address.js'
import { ensureTopology, type Topology } from './topology.js'

/** As much of a log as the links need. */
export type BrokerLog = Pick<IntakeLog, 'info' | 'warn' | 'error'>

export interface LinkOptions {
  url: string
  log: BrokerLog
  names: Names
  /** Maximum deliveries before a message becomes a dead letter. */
  maxDeliver: number
  /** A message without any sign of progress for this time is redelivered. */
  ackWaitMs: number
}

const dialTimeoutMs = 5_000
const apiTimeoutMs = 5_000
/** A silent connection is closed after three of these. */
const pingIntervalMs = 2_000
const pingsUnansweredMax = 2
const retryMs = { first: 50, max: 2_000 }
/** Acks queued while disconnected. A message whose ack is dropped is redelivered: processed twice, not lost. */
const owedMax = 16_384
const flushTimeoutMs = 1_000
/** Log interval while disconnected. */
const warnEveryMs = 30_000

/** `ready`: each time that it becomes ready. */
export class Link extends EventEmitter<{ ready: [NatsConnection]; lost: [] }> {
  readonly names: Names
  readonly log: BrokerLog
  readonly maxDeliver: number
  readonly ackWaitMs: number
  /** Maximum delivered but unacked messages over all routers, for the consumer, now or when it is created. Null: the broker's. */
  ackPendingMax: number | null = null
  /** Null until the broker reported it. */
  topology: Topology | null = null
  /** Why it did not become ready, for people, if known. */
  trouble: string | null = null
  /** The server's maximum message size, as last reported. */
  serverPayloadMax: number | null = null
  readonly #address: ReturnType<typeof parseAddress>
  readonly #life: Promise<void>
  readonly #subscriptions: { subject: string; options: SubscriptionOptions }[] = []
  readonly #closing = new AbortController()
  #nc: NatsConnection | null = null
  #ready = false
  #subscribedOn: NatsConnection | null = null
  #jsm: JetStreamManager | null = null
  #owed: { subject: string; data: Uint8Array }[] = []
  #mending: { nc: NatsConnection; done: Promise<void> } | null = null
  #warnedAt = Number.NEGATIVE_INFINITY

  constructor(options: LinkOptions) {
    super()
    this.names = options.names
    this.log = options.log
    this.maxDeliver = options.maxDeliver
    this.ackWaitMs = options.ackWaitMs
    this.#address = parseAddress(options.url)
    this.#life = this.#live()
  }

  /** The connection if ready, else null. */
  get ready(): NatsConnection | null {
    return this.#ready ? this.#nc : null
  }

  get isClosed(): boolean {
    return this.#closing.signal.aborted
  }

  /** Throws if not ready. */
  api(): JetStreamManager {
    if (this.ready === null || this.#jsm === null) throw new BrokerFault('unavailable', 'the broker is not connected')
    return this.#jsm
  }

  /** On the next connection and on every later one. */
  subscribe(subject: string, options: SubscriptionOptions): void {
    this.#subscriptions.push({ subject, options })
  }

  /** Sends it now, or after reconnecting. */
  post(subject: string, data: Uint8Array): void {
    const nc = this.ready
    if (nc !== null && !nc.isClosed()) {
      nc.publish(subject, data)
    } else if (!this.isClosed) {
      if (this.#owed.length === owedMax) this.#owed.shift()
      this.#owed.push({ subject, data })
    }
  }

  /** The broker reported a missing stream or consumer. Resolves when it exists again or the connection is lost. */
  mend(): Promise<void> {
    const nc = this.#nc
    if (nc === null) return Promise.resolve()
    // A repair on an earlier connection may hang until its requests time out.
    if (this.#mending?.nc === nc) return this.#mending.done
    const done = this.#prepare(nc).finally(() => {
      if (this.#mending?.nc === nc) this.#mending = null
    })
    this.#mending = { nc, done }
    return done
  }

  async close(): Promise<void> {
    const nc = this.#nc
    const wasReady = this.ready !== null
    this.#closing.abort()
    if (nc !== null) {
      // Messages whose acks are written but not sent would be redelivered to other routers.
      if (wasReady) await within(nc.flush(), flushTimeoutMs)
      await nc.close()
    }
    await this.#life
  }

  async #live(): Promise<void> {
    for (let waitMs = retryMs.first; !this.isClosed; waitMs = Math.min(waitMs * 2, retryMs.max)) {
      const nc = await this.#dial()
      if (nc === null) {
        await this.#pause(waitMs * (0.75 + Math.random() * 0.5))
        continue
      }
      this.#nc = nc
      const ended = nc.closed()
      await Promise.race([this.mend(), ended])
      if (this.#ready) waitMs = retryMs.first
      const fault = await ended
      this.#lost(fault)
      await this.#pause(retryMs.first * Math.random())
    }
  }

  async #dial(): Promise<NatsConnection | null> {
    try {
      const nc = await connect({
        ...this.#address.options,
        name: 'spillway',
        reconnect: false,
        timeout: dialTimeoutMs,
        pingInterval: pingIntervalMs,
        maxPingOut: pingsUnansweredMax,
        noAsyncTraces: true,
      })
      if (!this.isClosed) {
        void this.#listen(nc)
        return nc
      }
      await nc.close()
    } catch (error) {
      this.#warn(error, 'cannot reach the broker; retrying')
    }
    return null
  }

  /** The server's errors: a missing permission, a refused message. */
  async #listen(nc: NatsConnection): Promise<void> {
    for await (const status of nc.status()) {
      if (status.type === 'error') this.log.warn({ err: status.error }, 'the broker reported an error')
    }
  }

  /** Retries until prepared or disconnected. */
  async #prepare(nc: NatsConnection): Promise<void> {
    for (let waitMs = retryMs.first; !nc.isClosed() && !this.isClosed; waitMs = Math.min(waitMs * 2, retryMs.max)) {
      try {
        this.serverPayloadMax = nc.info?.max_payload ?? this.serverPayloadMax
        await this.#ensure(nc)
        if (!nc.isClosed() && nc === this.#nc && !this.isClosed) this.#becomeReady(nc)
        return
      } catch (error) {
        if (nc.isClosed() || nc !== this.#nc || this.isClosed) return
        this.#unready()
        this.#warn(error, 'connected to the broker, but its streams are not available; retrying')
        await this.#pause(waitMs)
      }
    }
  }

  /** Creates the streams and the consumer if missing. Rejects on failure. */
  async #ensure(nc: NatsConnection): Promise<void> {
    const payloadMax = nc.info?.max_payload ?? 1_048_576
    try {
      const jsm = await jetstreamManager(nc, { checkAPI: false, timeout: apiTimeoutMs })
      const { names, maxDeliver, ackWaitMs, ackPendingMax } = this
      this.topology = await ensureTopology(jsm, { names, maxDeliver, ackWaitMs, ackPendingMax, payloadMax }, this.log)
      this.#jsm = jsm
      this.trouble = null
    } catch (error) {
      // A server without JetStream may reach it through its cluster, so report this only after a failure.
      const isLacking = nc.info?.jetstream !== true
      this.trouble = isLacking ? 'NATS is reachable, but has no JetStream (nats-server -js)' : null
      throw this.trouble === null ? error : new BrokerFault('unavailable', this.trouble, { cause: error })
    }
  }

  #becomeReady(nc: NatsConnection): void {
    if (this.#ready) return
    this.#ready = true
    this.#warnedAt = Number.NEGATIVE_INFINITY
    this.log.info({ broker: this.#address.shown, version: nc.info?.version }, 'connected to the broker')
    if (this.#subscribedOn !== nc) {
      this.#subscribedOn = nc
      for (const { subject, options } of this.#subscriptions) nc.subscribe(subject, options)
    }
    this.emit('ready', nc)
    const owed = this.#owed
    this.#owed = []
    for (const { subject, data } of owed) this.post(subject, data)
  }

  #unready(): void {
    if (!this.#ready) return
    this.#ready = false
    this.emit('lost')
  }

  #lost(fault: unknown): void {
    this.#unready()
    this.#nc = null
    if (!this.isClosed) this.#warn(fault, 'connection to the broker lost; reconnecting')
  }

  #warn(error: unknown, message: string): void {
    const now = performance.now()
    if (now - this.#warnedAt < warnEveryMs) return
    this.#warnedAt = now
    this.log.warn({ err: error, broker: this.#address.shown }, message)
  }

  /** Ends early on close. */
  #pause(ms: number): Promise<void> {
    return delay(ms, undefined, { signal: this.#closing.signal }).catch(() => undefined)
  }
}

/** Resolves on success, failure or timeout: the caller continues the same way. */
export const within = (work: Promise<void>, ms: number): Promise<void> =>
  withDeadline(
    work.catch(() => undefined),
    ms,
    () => undefined,
  )
