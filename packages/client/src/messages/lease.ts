import { SpillwayError } from '../error.js'
import type { Messages } from './messages.js'

export interface Renewal {
  /** The lease is extended to so many seconds from then, each third of it. Default 60. */
  seconds?: number
  /** When it is extended first: before a third of the queue's own `leaseTime`. Default 1,000. */
  firstMs?: number
}

export interface KeptLease {
  /** Aborted when the messages are no longer ours. */
  readonly lost: AbortSignal
  release(): void
}

/**
 * Keeps messages while they are worked on. How long the queue leases them for is not told with a pop, so that it is
 * extended soon, to a time that is known; work that is done before costs nothing.
 */
export function keepLease(messages: Pick<Messages, 'extend'>, leaseId: string, renewal: Renewal | false): KeptLease {
  const lost = new AbortController()
  if (renewal === false) return { lost: lost.signal, release: () => undefined }
  const released = new AbortController()
  const { seconds = 60, firstMs = 1_000 } = renewal
  const thirdMs = (seconds * 1_000) / 3
  let heldUntil = Number.POSITIVE_INFINITY
  let timer = setTimeout(extend, Math.min(firstMs, thirdMs))

  async function extend(): Promise<void> {
    const askedAt = performance.now()
    let nextMs = thirdMs
    try {
      await messages.extend(leaseId, { seconds: Math.ceil(seconds), deadlineMs: thirdMs, signal: released.signal })
      heldUntil = askedAt + seconds * 1_000
    } catch (fault) {
      if (released.signal.aborted) return
      const mayPass = fault instanceof SpillwayError && fault.retryable
      if (!mayPass || performance.now() >= heldUntil) {
        lost.abort(fault)
        return
      }
      nextMs = Math.min(thirdMs, 1_000)
    }
    if (!released.signal.aborted) timer = setTimeout(extend, nextMs)
  }

  return {
    lost: lost.signal,
    release: () => {
      released.abort()
      clearTimeout(timer)
    },
  }
}
