/**
 * A connection to Redis. Connects in the background and always reconnects.
 *
 *   away ──dialled──► connected ──prepared──► ready
 *     ▲                   │ lost   ▲            │ lost: away
 *     │                   │        └─refused()──┤ it answers, but refuses what we need: prepared again
 *     └───────────────────┴─────────────────────┘      close(), from any ──► closed
 *
 * Each connection is a new object: the library's reconnect would resend commands that their callers have abandoned, and
 * does not detect a hanging handshake.
 */
import { setTimeout as delay } from 'node:timers/promises'
import { Redis } from 'ioredis'
import { type IntakeLog, withDeadline } from 'spillway/workload'
import { answered, meaningOf, refusalOf } from './faults.js'
import { shownAddress } from './server.js'

export type RedisLog = Pick<IntakeLog, 'info' | 'warn' | 'error'>

export interface LinkOptions {
  url: string
  /** The connection's name in the server's client list. */
  clientName: string
  log: RedisLog
  /** For one command, or for a batch sent together. */
  timeoutMs: number
  /** Checks that Redis does everything we need. Rejects if not. */
  prepare(redis: Redis): Promise<void>
  onReady?: () => void
  /** Whether another link already logs this outage. */
  isLogged?: () => boolean
}

const dialTimeoutMs = 2_000
const retryMs = { first: 50, max: 2_000 }
/** A silent connection is detected after this time plus one timeout. A refusal is rechecked at the same interval. */
const beatMs = 1_000
/** An abandoned connection is closed without waiting for a goodbye. */
const goodbyeMs = 50

export class Link {
  readonly #o: LinkOptions
  /** For the log. */
  readonly #address: string
  readonly #closing = new AbortController()
  readonly #life: Promise<void>
  #redis: Redis | null = null
  #isReady = false
  #why = 'not connected yet'
  #hasWarned = false
  /** Of this or any earlier connection: a dial's first error says more than its last. */
  #dialError: unknown = null

  constructor(options: LinkOptions) {
    this.#o = options
    this.#address = shownAddress(options.url)
    this.#life = this.#live()
  }

  get isReady(): boolean {
    return this.#isReady
  }

  /** Why it is not ready, for people. */
  get why(): string {
    return this.#why
  }

  /** Rejects with the driver's error. Closes a connection that does not answer in time. */
  async run<T>(work: (redis: Redis) => Promise<T>): Promise<T> {
    const redis = this.#redis
    if (redis === null) throw new Error('there is no connection')
    try {
      return await answered(work(redis), this.#o.timeoutMs)
    } catch (error) {
      if (refusalOf(error) === null) this.#abandon(redis, error)
      throw error
    }
  }

  /** The server refused a command that we need: not ready until it accepts it again. */
  refused(error: unknown): void {
    this.#unready(error)
    // A former master that is now a replica: the name may lead to the new master.
    if (refusalOf(error) === 'READONLY' && this.#redis !== null) this.#abandon(this.#redis, error)
  }

  async close(): Promise<void> {
    this.#closing.abort()
    this.#isReady = false
    this.#redis?.disconnect()
    await this.#life
  }

  async #live(): Promise<void> {
    const { signal } = this.#closing
    for (let waitMs = retryMs.first; !signal.aborted; waitMs = Math.min(waitMs * 2, retryMs.max)) {
      const redis = this.#make()
      const ended = new Promise<void>((resolve) => redis.once('end', resolve))
      try {
        await answered(redis.connect(), dialTimeoutMs)
        this.#redis = redis
        if (signal.aborted) redis.disconnect()
        if (await this.#hold(redis, ended)) waitMs = retryMs.first
      } catch (error) {
        this.#unready(this.#dialError ?? error)
      }
      redis.disconnect()
      await ended
      this.#redis = null
      await pause(waitMs * (0.5 + Math.random() / 2), signal)
    }
  }

  #make(): Redis {
    this.#dialError = null
    const redis = new Redis(this.#o.url, {
      lazyConnect: true,
      retryStrategy: () => null,
      enableOfflineQueue: false,
      autoResubscribe: false,
      autoResendUnfulfilledCommands: false,
      connectTimeout: dialTimeoutMs,
      disconnectTimeout: goodbyeMs,
      connectionName: this.#o.clientName,
    })
    redis.on('error', (error: unknown) => {
      this.#dialError ??= error
    })
    redis.once('close', () => {
      if (this.#redis === redis) this.#unready(this.#dialError ?? new Error('closed by the server'))
    })
    return redis
  }

  /** Runs until the connection is lost. True if it became ready. */
  async #hold(redis: Redis, ended: Promise<void>): Promise<boolean> {
    let wasReady = false
    let hasEnded = false
    const over = ended.then(() => {
      hasEnded = true
    })
    while (!hasEnded && !this.#closing.signal.aborted) {
      try {
        if (this.#isReady) {
          await answered(redis.ping(), this.#o.timeoutMs)
        } else {
          await answered(this.#o.prepare(redis), this.#o.timeoutMs)
          if (!hasEnded && redis.status === 'ready') this.#becomeReady()
          wasReady ||= this.#isReady
        }
      } catch (error) {
        const refusal = refusalOf(error)
        this.#unready(error)
        if (refusal === null || refusal === 'READONLY') this.#abandon(redis, error)
      }
      await withDeadline(over, beatMs, () => undefined)
    }
    return wasReady
  }

  #abandon(redis: Redis, error: unknown): void {
    if (this.#redis === redis) this.#unready(error)
    redis.disconnect()
  }

  #becomeReady(): void {
    if (this.#closing.signal.aborted) return
    this.#isReady = true
    if (this.#hasWarned || this.#o.isLogged === undefined) {
      this.#o.log.info({ redis: this.#address, connection: this.#o.clientName }, 'connected to Redis')
    }
    this.#hasWarned = false
    this.#o.onReady?.()
  }

  #unready(error: unknown): void {
    const isLoss = this.#isReady
    this.#isReady = false
    if (this.#closing.signal.aborted) return
    this.#why = meaningOf(error)
    // The link that does not log first cannot know at the moment of loss whether the other has noticed.
    const isLogged = this.#o.isLogged !== undefined && (isLoss || this.#o.isLogged())
    if (this.#hasWarned || isLogged) return
    this.#hasWarned = true
    this.#o.log.warn(
      { err: error, redis: this.#address, connection: this.#o.clientName },
      `cannot use Redis: ${this.#why}; retrying`,
    )
  }
}

/** Ends early when the signal fires. */
function pause(ms: number, signal: AbortSignal): Promise<void> {
  return delay(ms, undefined, { signal }).catch(() => undefined)
}
