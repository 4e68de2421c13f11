/**
 * The connection to the broker, made in the background and made again for ever.
 *
 *   away ──dialled──► connected ──streams and consumer are there──► ready
 *     ▲                   │ lost                                      │ lost: away; they are gone: connected
 *     └───────────────────┴───────────────────────────────────────────┘      close(), from any ──► closed
 *
 * The library's own reconnecting is off: its first connection cannot be called off, it throws away what is published
 * meanwhile, and it keeps inboxes to which the server still owes messages of requests that we have given up.
 */
import { connect, type NatsConnection } from '@nats-io/transport-node'
import { parseAddress } from './server-address.js'

export interface BrokerLog {
  info(fields: object, message: string): void
  warn(fields: object, message: string): void
  error(fields: object, message: string): void
}

export interface LinkOptions {
  url: string
  log: BrokerLog
  /** Sees to it that all that we need is in the broker. Rejects when it cannot. */
  prepare(nc: NatsConnection): Promise<void>
}

interface Owed {
  subject: string
  data: Uint8Array
}

const dialTimeoutMs = 5_000
/** A connection that is dead without a word is given up after three of these. */
const pingIntervalMs = 2_000
const pingsUnansweredMax = 2
const retryMs = { first: 50, max: 2_000 }
/** Of acks while away. One that is dropped is given out again: worked on twice, not lost. */
const owedMax = 16_384
const flushTimeoutMs = 1_000
/** While it stays away, a line in the log as often as this. */
const complainMs = 30_000

export class Link {
  readonly #o: LinkOptions
  readonly #address: ReturnType<typeof parseAddress>
  readonly #onReady: ((nc: NatsConnection) => void)[] = []
  readonly #onLost: (() => void)[] = []
  readonly #closing = new AbortController()
  #nc: NatsConnection | null = null
  #ready = false
  #payloadMax: number | null = null
  #owed: Owed[] = []
  #mending: { nc: NatsConnection; done: Promise<void> } | null = null
  #complainedAt = Number.NEGATIVE_INFINITY
  #life: Promise<void> | null = null

  constructor(options: LinkOptions) {
    this.#o = options
    this.#address = parseAddress(options.url)
  }

  /** The connection while it is ready, else null. */
  get ready(): NatsConnection | null {
    return this.#ready ? this.#nc : null
  }

  get isClosed(): boolean {
    return this.#closing.signal.aborted
  }

  /** What the server takes in one message, as it said last. */
  get serverPayloadMax(): number | null {
    return this.#payloadMax
  }

  /** Called each time it becomes ready. Subscriptions of an earlier connection are gone then. */
  onReady(callback: (nc: NatsConnection) => void): void {
    this.#onReady.push(callback)
  }

  onLost(callback: () => void): void {
    this.#onLost.push(callback)
  }

  start(): void {
    this.#life ??= this.#live()
  }

  /** Sends it now, or when the connection is back. */
  post(subject: string, data: Uint8Array): void {
    const nc = this.ready
    if (nc !== null && !nc.isClosed()) {
      nc.publish(subject, data)
    } else if (!this.isClosed) {
      if (this.#owed.length === owedMax) this.#owed.shift()
      this.#owed.push({ subject, data })
    }
  }

  /** The broker has said that something of ours is not there. Resolves when it is again, or the connection is lost. */
  mend(): Promise<void> {
    const nc = this.#nc
    if (nc === null) return Promise.resolve()
    // One of an earlier connection may hang until its requests time out.
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
      // Acks that are written but not sent would be worked on again by others.
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
      this.#complain(error, 'the broker cannot be reached; trying on')
    }
    return null
  }

  /** What the server complains of: a permission that is missing, a message that it refused. */
  async #listen(nc: NatsConnection): Promise<void> {
    for await (const status of nc.status()) {
      if (status.type === 'error') this.#o.log.warn({ err: status.error }, 'the broker complains')
    }
  }

  /** Tries until it is prepared or the connection has ended. */
  async #prepare(nc: NatsConnection): Promise<void> {
    for (let waitMs = retryMs.first; !nc.isClosed() && !this.isClosed; waitMs = Math.min(waitMs * 2, retryMs.max)) {
      try {
        this.#payloadMax = nc.info?.max_payload ?? this.#payloadMax
        await this.#o.prepare(nc)
        if (!nc.isClosed() && nc === this.#nc && !this.isClosed) this.#becomeReady(nc)
        return
      } catch (error) {
        if (nc.isClosed() || nc !== this.#nc || this.isClosed) return
        this.#unready()
        this.#complain(error, 'the broker is there, but its streams cannot be had; trying on')
        await this.#pause(waitMs)
      }
    }
  }

  #becomeReady(nc: NatsConnection): void {
    if (this.#ready) return
    this.#ready = true
    this.#complainedAt = Number.NEGATIVE_INFINITY
    this.#o.log.info({ broker: this.#address.shown, version: nc.info?.version }, 'the broker is there')
    for (const callback of this.#onReady) callback(nc)
    const owed = this.#owed
    this.#owed = []
    for (const { subject, data } of owed) this.post(subject, data)
  }

  #unready(): void {
    if (!this.#ready) return
    this.#ready = false
    for (const callback of this.#onLost) callback()
  }

  #lost(fault: unknown): void {
    this.#unready()
    this.#nc = null
    if (!this.isClosed) this.#complain(fault, 'the connection to the broker is lost; connecting again')
  }

  #complain(error: unknown, message: string): void {
    const now = performance.now()
    if (now - this.#complainedAt < complainMs) return
    this.#complainedAt = now
    this.#o.log.warn({ err: error, broker: this.#address.shown }, message)
  }

  /** Ends at once when it is closed. */
  #pause(ms: number): Promise<void> {
    const { signal } = this.#closing
    if (signal.aborted) return Promise.resolve()
    return new Promise((resolve) => {
      const done = () => {
        clearTimeout(timer)
        signal.removeEventListener('abort', done)
        resolve()
      }
      const timer = setTimeout(done, ms)
      signal.addEventListener('abort', done)
    })
  }
}

/** Whether it was done, or the time was over, or it failed: the caller goes on the same way. */
export async function within(work: Promise<void>, ms: number): Promise<void> {
  let timer: NodeJS.Timeout | undefined
  const over = new Promise<void>((resolve) => {
    timer = setTimeout(resolve, ms)
  })
  await Promise.race([work.catch(() => undefined), over])
  clearTimeout(timer)
}
