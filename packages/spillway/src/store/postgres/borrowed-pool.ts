/**
 * The connections of a pool that belongs to the user, whose own code takes them too. So:
 *
 * - Nothing stays on a connection: all that a statement needs is set for its transaction alone (pinned-query.ts).
 * - The user's code may hold all of them: who waits is refused in time, and does not wait in the pool any longer than that.
 * - The pool is never ended here, and nothing of ours listens to it after `end`.
 *
 *   asked ──the pool gives one──► borrowed ──► given back
 *     └──connectTimeoutMs are over──► fault; what the pool gives later goes to the next one that waits, or back at once
 */
import type pg from 'pg'
import { withDeadline } from '../../time/with-deadline.js'
import { StoreFault, toStoreFault } from './faults.js'
import type { Log } from './options.js'
import { types } from './types.js'

/** What we use of a connection, and of a pool. */
export type Connection = Pick<pg.PoolClient, 'query' | 'on' | 'off' | 'release'>
export interface ConnectionSource {
  connect(): Promise<Connection>
  readonly idleCount: number
  /** Waits for what was taken to be given back. */
  end(): Promise<void>
}

interface Waiter {
  start(connection: Connection): void
  fail(fault: unknown): void
}

type Release = (destroy?: Error | boolean) => void

const ignore = (): void => undefined

export class BorrowedPool implements ConnectionSource {
  readonly #pool: pg.Pool
  readonly #max: number
  readonly #log: Log
  readonly #connectTimeoutMs: number
  #waiting: Waiter[] = []
  /** Calls of the pool's `connect` that it has not answered. */
  #asked = 0
  #borrowed = 0
  #isEnded = false
  #isListening = false
  #onEmpty: (() => void) | undefined

  /** `max`: connections that are out at once. */
  constructor(pool: pg.Pool, max: number, connectTimeoutMs: number, log: Log) {
    this.#pool = pool
    this.#max = max
    this.#connectTimeoutMs = connectTimeoutMs
    this.#log = log
  }

  get idleCount(): number {
    return this.#pool.idleCount
  }

  connect(): Promise<Connection> {
    if (this.#isEnded) return Promise.reject(new StoreFault('unavailable', { cause: new Error('the store is closed') }))
    this.#listen()
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => waiter.fail(this.#exhausted()), this.#connectTimeoutMs)
      const leave = (): void => {
        clearTimeout(timer)
        this.#waiting = this.#waiting.filter((other) => other !== waiter)
      }
      const waiter: Waiter = {
        start: (connection) => {
          leave()
          resolve(connection)
        },
        fail: (fault) => {
          leave()
          reject(fault)
        },
      }
      this.#waiting.push(waiter)
      this.#ask()
    })
  }

  async end(): Promise<void> {
    this.#isEnded = true
    for (const waiter of this.#waiting) waiter.fail(new StoreFault('unavailable'))
    if (this.#borrowed > 0) {
      await new Promise<void>((resolve) => {
        this.#onEmpty = resolve
      })
    }
    this.#pool.off('error', this.#onError)
  }

  /** Without a listener, the loss of an idle connection ends the process. */
  #listen(): void {
    if (this.#isListening) return
    this.#isListening = true
    this.#pool.on('error', this.#onError)
  }

  readonly #onError = (error: Error): void => {
    if (!this.#pool.ending) this.#log.warn({ err: toStoreFault(error) }, 'an idle database connection was lost')
  }

  /** No more calls than waiters: a call whose waiter has left serves the next. */
  #ask(): void {
    while (this.#asked < this.#waiting.length && this.#asked + this.#borrowed < this.#max) {
      this.#asked++
      // The callback, not the promise, whose result comes later: an error event in between, without a listener, ends the process.
      this.#pool.connect((error, client, release) => {
        this.#asked--
        if (client === undefined) this.#waiting[0]?.fail(this.#faultOf(error))
        else this.#lend(client, release)
      })
    }
  }

  #lend(client: pg.PoolClient, release: Release): void {
    if (isInTransaction(client)) {
      this.#log.warn(
        {},
        'a connection came back to the pool of postgres({ pool }) inside a transaction, and was closed: COMMIT or ROLLBACK before client.release()',
      )
      client.on('error', ignore)
      release(true)
      this.#ask()
      return
    }
    const [waiter] = this.#waiting
    if (waiter === undefined) {
      release()
      return
    }
    client.on('error', ignore)
    this.#borrowed++
    let isOut = true
    const giveBack: Release = (destroy) => {
      if (!isOut) return
      isOut = false
      // A connection that is closed may still report why it was lost.
      if (destroy === undefined || destroy === false) client.off('error', ignore)
      release(destroy)
      this.#borrowed--
      if (this.#borrowed === 0) this.#onEmpty?.()
      this.#ask()
    }
    waiter.start(connectionOn(client, giveBack))
  }

  #exhausted(): StoreFault {
    const { totalCount, idleCount, options } = this.#pool
    return new StoreFault('unavailable', {
      cause: new Error(
        `the pool of postgres({ pool }) had no free connection within ${this.#connectTimeoutMs} ms: ${totalCount - idleCount} of ${options.max} are in use`,
      ),
    })
  }

  #faultOf(error: unknown): StoreFault {
    if (!this.#pool.ending) return toStoreFault(error)
    const raised =
      'the pool of postgres({ pool }) was ended while the intake uses it; call intake.close() before pool.end()'
    return new StoreFault('unavailable', { cause: new Error(raised, { cause: error }), raised })
  }
}

/** Types and time limit go with each statement: the user's client has its own, and older drivers know no limit for one. */
function connectionOn(client: pg.PoolClient, release: Release): Connection {
  const query = (given: string | pg.QueryConfig | pg.Submittable): unknown => {
    if (typeof given === 'object' && 'submit' in given) return client.query(given)
    const config: pg.QueryConfig & { query_timeout?: number } = typeof given === 'string' ? { text: given } : given
    const answer = client.query({ ...config, types })
    const ms = config.query_timeout
    return ms === undefined ? answer : withDeadline(answer, ms, late)
  }
  return { query: query as pg.PoolClient['query'], on: client.on.bind(client), off: client.off.bind(client), release }
}

const late = (): never => {
  throw new StoreFault('timeout')
}

/** Newer drivers know; with older ones our BEGIN finds a transaction that failed, and not one that is open. */
function isInTransaction(client: pg.PoolClient): boolean {
  const status = (client as { getTransactionStatus?: () => unknown }).getTransactionStatus?.call(client)
  return status === 'T' || status === 'E'
}
