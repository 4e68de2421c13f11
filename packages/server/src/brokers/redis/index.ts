/**
 * The stream log in Redis, with two connections: one for commands, one for notifications of other processes' appends.
 * Notifications are hints: nothing is kept for processes that are not listening.
 *
 *   deaf ──subscribed──► hearing   (all readers check everything: earlier notifications are lost)
 *     ▲                     │ lost
 *     └─────────────────────┘
 */
import { randomUUID } from 'node:crypto'
import type { Redis } from 'ioredis'
import type { Append, Cursor, EndKind, StreamKey, StreamLog } from 'spillway/workload'
import { appendArguments, appendScript, appendScriptSha } from './append-script.js'
import { asLogFault, refusalOf } from './faults.js'
import { Link, type RedisLog } from './link.js'
import { type Names, namesFor } from './names.js'
import { serverInfo } from './server.js'
import { type CursorRead, type Entry, endOf, Reader } from './stream-reader.js'

export { probeRedis, type RedisProbe } from './server.js'

export interface RedisStreamsOptions {
  /** `redis://[[user]:password@]host[:port][/database]`, or `rediss://…` for TLS. */
  url: string
  /** Prefix of all keys and channels: the schema's name, so that several installations can share one Redis. */
  prefix: string
  /** How long a stream is kept after its end. */
  retentionMs: number
  /** Maximum duration of a stream. One whose writer died is kept for this time plus its retention. */
  longestMs: number
  /** Default 2,000. For an append, a read or a look at the head. */
  timeoutMs?: number
  log: RedisLog
}

type Heard = (ids: readonly string[] | null) => void

const defaultTimeoutMs = 2_000
const trialTtlMs = 10_000

/** Connects in the background and never stops retrying. */
export class RedisStreams implements StreamLog {
  readonly name = 'redis'
  readonly #o: RedisStreamsOptions
  readonly #names: Names
  readonly #link: Link
  readonly #bell: Link
  readonly #reader: Reader
  readonly #heard: Heard[] = []
  /** Prefix of each notification, so that a process ignores its own. */
  readonly #self = randomUUID()
  #warnedOfPolicy: string | null = null
  #isBellRefused = false

  constructor(options: RedisStreamsOptions) {
    const { url, log, timeoutMs = defaultTimeoutMs } = options
    this.#o = options
    this.#names = namesFor(options.prefix)
    const link = new Link({ url, log, timeoutMs, clientName: 'spillway', prepare: (redis) => this.#prepare(redis) })
    this.#link = link
    this.#bell = new Link({
      ...{ url, log, timeoutMs, clientName: 'spillway-bell' },
      prepare: (redis) => this.#subscribe(redis),
      onReady: () => this.#notify(null),
      isLogged: () => !link.isReady,
    })
    this.#reader = new Reader({
      names: this.#names,
      send: (work) => link.run(work),
      onForeignKey: (id) => this.#logForeignKey(id),
    })
  }

  get isUp(): boolean {
    return this.#link.isReady
  }

  /** The last known state. */
  check(): { ok: boolean; detail?: string } {
    return this.#link.isReady ? { ok: true } : { ok: false, detail: this.#link.why }
  }

  async append(appends: readonly Append[]): Promise<('written' | 'lost')[]> {
    if (appends.length === 0) return []
    const outcomes = await this.#to(
      'append',
      () => this.#appendAll(appends),
      (error) => this.#link.refused(error),
    )
    this.#ring(appends.filter(({ ring }, i) => ring && outcomes[i] === 'written'))
    return outcomes
  }

  read(cursors: readonly Cursor[]): Promise<CursorRead[]> {
    return this.#to('read', () => this.#reader.read(cursors))
  }

  async head(key: StreamKey): Promise<{ last: number; end: EndKind | null }> {
    const [entry] = await this.#run(
      'read the end of a stream',
      (redis) => redis.xrevrange(this.#names.stream(key.id), '+', '-', 'COUNT', 1) as Promise<Entry[]>,
    )
    return entry === undefined ? { last: 0, end: null } : { last: Number.parseInt(entry[0], 10), end: endOf(entry[1]) }
  }

  readonly marks = {
    begin: async (id: string): Promise<void> => {
      const keepMs = this.#o.longestMs + this.#o.retentionMs
      await this.#run('note that a stream begins', (redis) => redis.set(this.#names.mark(id), '', 'PX', keepMs))
    },
    isLost: async (id: string): Promise<boolean> =>
      (await this.#run('check whether a stream exists', (redis) => redis.exists(this.#names.mark(id)))) === 0,
  }

  onBell(heard: Heard): void {
    this.#heard.push(heard)
  }

  async close(): Promise<void> {
    await Promise.all([this.#bell.close(), this.#link.close()])
  }

  #run<T>(doing: string, work: (redis: Redis) => Promise<T>): Promise<T> {
    return this.#to(doing, () => this.#link.run(work))
  }

  /** Converts the driver's errors. `onRefused`: the server answered with an error. */
  async #to<T>(doing: string, work: () => Promise<T>, onRefused?: (error: unknown) => void): Promise<T> {
    try {
      return await work()
    } catch (error) {
      if (refusalOf(error) !== null) onRefused?.(error)
      throw asLogFault(error, doing)
    }
  }

  /** Checks that Redis is writable, has our script, and does not evict data that is still needed. */
  async #prepare(redis: Redis): Promise<void> {
    await redis.script('LOAD', appendScript)
    await redis.set(this.#names.trial, '', 'PX', trialTtlMs)
    const policy = (await serverInfo(redis))?.evictsBy ?? null
    if (policy !== null && policy !== this.#warnedOfPolicy) {
      const advice = 'Redis evicts streams when its memory is full: set maxmemory-policy to noeviction'
      this.#o.log.warn({ policy }, advice)
    }
    this.#warnedOfPolicy = policy
  }

  async #subscribe(redis: Redis): Promise<void> {
    // May run again on the same connection if the first try was refused.
    redis.removeAllListeners('message')
    redis.on('message', (_: string, message: string) => {
      const [from, ...ids] = message.split(' ')
      if (from !== this.#self && ids.length > 0) this.#notify(ids)
    })
    await redis.subscribe(this.#names.bell)
  }

  #notify(ids: readonly string[] | null): void {
    for (const heard of this.#heard) heard(ids)
  }

  /** Rejects with the first refusal that concerns more than one key; the call may then be retried. */
  async #appendAll(appends: readonly Append[], isSecondTry = false): Promise<('written' | 'lost')[]> {
    const answers = await this.#link.run((redis) => {
      const pipeline = redis.pipeline()
      const before = new Map<string, Append>()
      for (const append of appends) {
        const { key, writer } = append
        const place = `${key.id} ${writer}`
        const args = appendArguments(this.#names.stream(key.id), append, before.get(place) ?? null, this.#o)
        before.set(place, append)
        pipeline.evalsha(appendScriptSha, 1, ...args)
      }
      return pipeline.exec()
    })
    const outcomes: ('written' | 'lost')[] = []
    for (const [i, append] of appends.entries()) {
      const [error, result] = answers?.[i] ?? [new Error('there is no answer')]
      const refusal = refusalOf(error)
      if (refusal === 'NOSCRIPT' && !isSecondTry) {
        await this.#link.run((redis) => redis.script('LOAD', appendScript))
        return this.#appendAll(appends, true)
      }
      // Concerns only this stream: the others of the call must not fail each time it is retried.
      if (refusal === 'WRONGTYPE') this.#logForeignKey(append.key.id)
      else if (error) throw error
      outcomes.push(result === 1 ? 'written' : 'lost')
    }
    return outcomes
  }

  /** Runs after the append's result is known; nobody waits for it. */
  #ring(appends: readonly Append[]): void {
    const ids = [...new Set(appends.map(({ key }) => key.id))]
    if (ids.length === 0) return
    this.#link
      .run((redis) => redis.publish(this.#names.bell, [this.#self, ...ids].join(' ')))
      .then(
        () => {
          this.#isBellRefused = false
        },
        (error: unknown) => {
          // A lost connection is already logged, and readers poll after it.
          if (refusalOf(error) === null || this.#isBellRefused) return
          this.#isBellRefused = true
          this.#o.log.warn({ err: error }, 'Redis refuses notifications: readers in other processes get chunks late')
        },
      )
  }

  #logForeignKey(id: string): void {
    this.#o.log.error({ stream: id }, 'a stream key in Redis has the wrong type; the stream is lost')
  }
}
