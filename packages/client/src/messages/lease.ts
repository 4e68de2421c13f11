import { number } from '../checks.js'
import { later } from '../clock.js'
import { SpillwayError } from '../error.js'
import type { Messages } from './messages.js'

export interface Renewal {
  /** The lease is extended to so many seconds from then, each third of it. Default 60. */
  seconds?: number
  /** When it is extended first: before a third of the queue's own `leaseTime`. Default 1,000. */
  firstMs?: number
  /**
   * The queue's own `leaseTime`: the lease is taken for lost when it was not extended by then. Default: three times
   * `firstMs`, and at least 3.
   */
  leaseSeconds?: number
}

export interface KeptLease {
  /** Aborted when the messages are no longer ours, or may be others' as the lease could not be extended in time. */
  readonly lost: AbortSignal
  /** The server has said so. */
  readonly isGone: boolean
  release(): void
}

type Times = Required<Renewal>

/** Throws for what is none. */
export function timesOf({ seconds = 60, firstMs = 1_000, leaseSeconds }: Renewal): Times {
  return {
    seconds: number('renewal.seconds', seconds, 1),
    firstMs: number('renewal.firstMs', firstMs),
    leaseSeconds: number('renewal.leaseSeconds', leaseSeconds ?? Math.max(3, (3 * firstMs) / 1_000)),
  }
}

/**
 * Keeps messages while they are worked on. How long the queue leases them for is not told with a pop, so that it is
 * extended soon, to a time that is known; work that is done before costs nothing.
 */
export function keepLease(messages: Pick<Messages, 'extend'>, leaseId: string, times: Times | false): KeptLease {
  const lost = new AbortController()
  if (times === false) return { lost: lost.signal, isGone: false, release: () => undefined }
  const released = new AbortController()
  const { seconds, firstMs, leaseSeconds } = times
  const thirdMs = (seconds * 1_000) / 3
  let isGone = false
  let why: unknown = new Error('the lease could not be extended in time')
  let next = later(Math.min(firstMs, thirdMs, (leaseSeconds * 1_000) / 3), extend)
  let end = later(leaseSeconds * 1_000, lose)

  async function extend(): Promise<void> {
    const askedAt = performance.now()
    let nextMs = thirdMs
    try {
      await messages.extend(leaseId, { seconds: Math.ceil(seconds), deadlineMs: thirdMs, signal: released.signal })
      if (released.signal.aborted) return
      clearTimeout(end)
      end = later(askedAt + seconds * 1_000 - performance.now(), lose)
    } catch (fault) {
      if (released.signal.aborted) return
      why = fault
      // Of the server itself: what a proxy says is no word about the lease.
      isGone = fault instanceof SpillwayError && fault.problem !== null && !fault.retryable
      if (isGone) return lose()
      nextMs = Math.min(thirdMs, 1_000)
    }
    next = later(nextMs, extend)
  }

  function release(): void {
    released.abort()
    clearTimeout(next)
    clearTimeout(end)
  }

  function lose(): void {
    release()
    lost.abort(why)
  }

  return {
    lost: lost.signal,
    get isGone() {
      return isGone
    },
    release,
  }
}
