import { number } from '../checks.js'
import { later } from '../clock.js'
import { SpillwayError } from '../error.js'
import type { Messages } from './messages.js'

export interface Renewal {
  /** The lease is extended to this many seconds from now, every third of that time. Default 60. */
  seconds?: number
  /** When it is extended first: before a third of the queue's own `leaseTime`. Default 1,000. */
  firstMs?: number
  /**
   * The queue's own `leaseTime`: without an extension by then, the lease counts as lost. Default: three times `firstMs`, and
   * at least 3.
   */
  leaseSeconds?: number
}

export interface KeptLease {
  /** Aborted when the lease is lost, or may be lost because it could not be extended in time. */
  readonly lost: AbortSignal
  /** The server confirmed that the lease is lost. */
  readonly isGone: boolean
  release(): void
}

type Times = Required<Renewal>

/** Throws for invalid values. */
export function timesOf({ seconds = 60, firstMs = 1_000, leaseSeconds }: Renewal): Times {
  return {
    seconds: number('renewal.seconds', seconds, 1),
    firstMs: number('renewal.firstMs', firstMs),
    leaseSeconds: number('renewal.leaseSeconds', leaseSeconds ?? Math.max(3, (3 * firstMs) / 1_000)),
  }
}

/**
 * Keeps the lease while messages are processed. A pop does not say how long the lease is, so it is extended early, to a
 * known time. Work that finishes before costs nothing.
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
      // Only the server's answer counts: a proxy's error says nothing about the lease.
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
