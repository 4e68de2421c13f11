/** Waiting for an operation, as every resource does that may be answered with a ticket. */

import type { OperationView, QueuedAnswer } from '@spillway/protocol/wire'
import { segment } from '../checks.js'
import { SpillwayError } from '../error.js'
import { textOf } from '../hooks.js'
import type { CallOptions } from '../http/call.js'
import { idleMs, quickMs } from '../policy/pause.js'
import type { Parts } from '../resources.js'

/** Less than the 60 s after which proxies take an idle answer for lost. */
const sliceMsMax = 25_000
/** What an answer that was held back may take on its way. */
const answerMs = 1_000

/** What makes a body an OperationView. */
export const viewMembers = ['processed_at']

export const operationPath = (id: string): string => `/api/v1/operations/${segment(id)}`

/** With less time left than this there is no point in asking once more. */
const roomMsMin = 50

/** Resolves when it is finished, or with what is known when the time is up. The first look has `lookMs`, if that is more. */
export async function waitFor(
  { send, clock }: Parts,
  id: string,
  { timeoutMs, lookMs, signal }: { timeoutMs: number; lookMs: number; signal: AbortSignal | undefined },
): Promise<OperationView> {
  const deadline = clock.now() + timeoutMs
  let seen: OperationView | null = null
  for (let quick = 0; ; ) {
    const askedAt = clock.now()
    const leftMs = Math.max(0, deadline - askedAt)
    // The answer has to be here in time: the server is asked to hold it back for less than is left.
    const waitMs = Math.min(sliceMsMax, Math.max(leftMs - answerMs, leftMs / 2))
    try {
      const { body } = await send({
        method: 'GET',
        path: operationPath(id),
        query: { wait: (waitMs / 1_000).toFixed(3) },
        service: 'operations',
        expects: viewMembers,
        isRepeatable: true,
        signal,
        waitMs,
        deadlineMs: seen === null ? Math.max(leftMs, lookMs) : leftMs,
      })
      seen = body as OperationView
      if (seen.processed_at !== null) return seen
      quick = clock.now() - askedAt < quickMs ? quick + 1 : 0
      const delayMs = quick === 0 ? 0 : idleMs(quick, clock.random())
      if (deadline - clock.now() - delayMs < roomMsMin) return seen
      if (delayMs > 0) await clock.sleep(delayMs, signal)
    } catch (fault) {
      if (seen !== null && fault instanceof SpillwayError && fault.retryable) return seen
      throw fault
    }
  }
}

/** What is left of a call's time. */
export interface Rest {
  /** By the clock. */
  deadline: number
  signal: AbortSignal | undefined
}

/** When all of a call, what it is answered with and what becomes of that, has to be over. */
export const restOf = ({ clock, settings }: Parts, { deadlineMs, signal }: CallOptions, waitMs = 0): Rest => ({
  deadline: clock.now() + (deadlineMs ?? settings.deadlineMs + waitMs),
  signal,
})

/** Waits for it in what is left. Null: it is not finished, or could not be asked for: its ticket is worth more than that error. */
export async function polled(parts: Parts, id: string, { deadline, signal }: Rest): Promise<OperationView | null> {
  const timeoutMs = deadline - parts.clock.now()
  if (timeoutMs < roomMsMin) return null
  try {
    const view = await waitFor(parts, id, { timeoutMs, lookMs: 0, signal })
    return view.processed_at === null ? null : view
  } catch (fault) {
    signal?.throwIfAborted()
    parts.settings.logger.warn('what was queued could not be waited for', { id, error: textOf(fault) })
    return null
  }
}

/** Tells the hook, and where it is to be waited for, waits. Null: it is still queued, or is not waited for. */
export async function finishedOf(
  parts: Parts,
  queued: QueuedAnswer,
  { isPolled, ...rest }: Rest & { isPolled: boolean },
): Promise<OperationView | null> {
  const { operationId: id, queuePosition: position, estimatedWaitSeconds: etaSeconds } = queued
  parts.settings.hooks.onQueued({ id, position, etaSeconds })
  return isPolled ? polled(parts, id, rest) : null
}
