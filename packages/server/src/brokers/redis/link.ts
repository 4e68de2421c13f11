/**
 * A connection to Redis, made in the background and made again for ever.
 *
 *   away ──dialled──► connected ──prepared──► ready
 *     ▲                   │ lost   ▲            │ lost: away
 *     │                   │        └─refused()──┤ it answers, but refuses what we need: prepared again
 *     └───────────────────┴─────────────────────┘      close(), from any ──► closed
 *
 * Each connection is an object of its own: the library's reconnecting would send commands again that their callers have
 * given up, and does not notice a handshake that hangs.
 */
import { Redis } from 'ioredis'
import { answered, meaningOf, refusalOf } from './faults.js'
import { parseAddress, type ServerAddress } from './server-address.js'

export interface RedisLog {
  info(fields: object, message: string): void
  warn(fields: object, message: string): void
  error(fields: object, message: string): void
}

export interface LinkOptions {
  url: string
  /** As the server lists it among its clients. */
  clientName: string
  log: RedisLog
  /** Of a command, or of all that are sent together. */
  timeoutMs: number
  /** Sees to it that all that we need can be done. Rejects when it cannot. */
  prepare(redis: Redis): Promise<void>
  onReady?: () => void
  /** Whether somebody else has this outage in the log. */
  isTold?: () => boolean
}

const dialTimeoutMs = 2_000
const retryMs = { first: 50, max: 2_000 }
/** A connection that is dead without a word is found after so long and one timeout; a refusal is asked about as often. */
const beatMs = 1_000
/** What is given up is to be gone: no farewell is waited for. */
const goodbyeMs = 50

export class Link {
  readonly #o: LinkOptions
  readonly #address: ServerAddress
  readonly #closing = new AbortController()
  readonly #life: Promise<void>
  #redis: Redis | null = null
  #isReady = false
  #why = 'not connected yet'
  #hasComplained = false
  /** Of this or any earlier connection: the first error of a dial says more than the last. */
  #dialError: unknown = null

  constructor(options: LinkOptions) {
    this.#o = options
    this.#address = parseAddress(options.url)
    this.#life = this.#live()
  }

  get isReady(): boolean {
    return this.#isReady
  }

  /** Why it is not ready, for people. */
  get why(): string {
    return this.#why
  }

  /** Rejects with the driver's error. A connection that does not answer in time is given up. */
  async run<T>(work: (redis: Redis) => Promise<T>): Promise<T> {
    const redis = this.#redis
    if (redis === null) throw new Error('there is no connection')
    try {
      return await answered(work(redis), this.#o.timeoutMs)
    } catch (error) {
      if (refusalOf(error) === null) this.#giveUp(redis, error)
      throw error
    }
  }

  /** The server has refused what it must not: not ready until it no longer does. */
  refused(error: unknown): void {
    this.#unready(error)
    // A replica that was the master: the name may lead to the new one now.
    if (refusalOf(error) === 'READONLY' && this.#redis !== null) this.#giveUp(this.#redis, error)
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
    const redis = new Redis(this.#address.url, {
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

  /** Until it is lost. True when it was of use. */
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
        if (refusal === null || refusal === 'READONLY') this.#giveUp(redis, error)
      }
      const rest = new AbortController()
      await Promise.race([over, pause(beatMs, AbortSignal.any([rest.signal, this.#closing.signal]))])
      rest.abort()
    }
    return wasReady
  }

  #giveUp(redis: Redis, error: unknown): void {
    if (this.#redis === redis) this.#unready(error)
    redis.disconnect()
  }

  #becomeReady(): void {
    if (this.#closing.signal.aborted) return
    this.#isReady = true
    if (this.#hasComplained || this.#o.isTold === undefined) {
      this.#o.log.info({ redis: this.#address.shown, connection: this.#o.clientName }, 'Redis is there')
    }
    this.#hasComplained = false
    this.#o.onReady?.()
  }

  #unready(error: unknown): void {
    const isLoss = this.#isReady
    this.#isReady = false
    if (this.#closing.signal.aborted) return
    this.#why = meaningOf(error)
    // One who does not tell first cannot know at the moment of the loss whether the other has noticed it yet.
    const isTold = this.#o.isTold !== undefined && (isLoss || this.#o.isTold())
    if (this.#hasComplained || isTold) return
    this.#hasComplained = true
    this.#o.log.warn(
      { err: error, redis: this.#address.shown, connection: this.#o.clientName },
      `Redis cannot be used: ${this.#why}; trying on`,
    )
  }
}

/** Ends at once with the signal. */
function pause(ms: number, signal: AbortSignal): Promise<void> {
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
