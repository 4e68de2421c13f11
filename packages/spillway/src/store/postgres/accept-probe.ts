/**
 * Whether a write can be accepted right now. Accepting needs a connection of its pool, a server that writes, and disk space,
 * so exactly that is tested, once a second:
 *
 *   an accept has just committed ──► proven, no test
 *   else ──► the heartbeat goes over a connection of accepting, after a check for disk space
 *              committed ──► proven
 *              failed, or late ──► over its own connection, as if nothing had been tried: a lease never depends on the probe
 *
 * After two failures in a row, with no commit between them, writes cannot be accepted; after one commit, they can. The
 * heartbeat is the test because it writes and commits each second anyway: an idle process sends nothing more than that.
 */
import { withDeadline } from '../../time/with-deadline.js'
import { type StoreFault, toStoreFault } from './faults.js'

/** A commit younger than this is proof enough. Less than the time between two heartbeats. */
const freshMs = 800
/** How long the heartbeat waits for the probe. */
const patienceMs = 250
const failuresMax = 2

export class AcceptProbe {
  readonly #now: () => number
  #provenAt = Number.NEGATIVE_INFINITY
  #failures = 0
  #fault: StoreFault | null = null
  #isAsking = false

  constructor(now: () => number = () => performance.now()) {
    this.#now = now
  }

  /** Null while writes can be accepted. */
  get fault(): StoreFault | null {
    return this.#failures >= failuresMax ? this.#fault : null
  }

  /** A connection of accepting has committed something. */
  proven(): void {
    this.#provenAt = this.#now()
    this.#failures = 0
    this.#fault = null
  }

  async beat<T>(overAccept: () => Promise<T>, overOwn: () => Promise<T>): Promise<T> {
    if (this.#isAsking || this.#now() - this.#provenAt < freshMs) return overOwn()
    const answer = await withDeadline(this.#ask(overAccept), patienceMs, () => null)
    return answer === null ? overOwn() : answer.value
  }

  async #ask<T>(overAccept: () => Promise<T>): Promise<{ value: T } | null> {
    this.#isAsking = true
    const askedAt = this.#now()
    try {
      const value = await overAccept()
      this.proven()
      return { value }
    } catch (error) {
      const fault = toStoreFault(error)
      // A conflict with another transaction proves nothing, nor does a failure after which a commit succeeded.
      if (fault.code !== 'conflict' && this.#provenAt < askedAt) {
        this.#failures++
        this.#fault = fault
      }
      return null
    } finally {
      this.#isAsking = false
    }
  }
}
