/** Waiting for an operation, as every resource does that may be answered with a ticket. */

import type { OperationView, QueuedAnswer } from '@spillway/protocol/wire'
import { segment } from '../checks.js'
import { SpillwayError } from '../error.js'
import type { CallOptions } from '../http/call.js'
import type { Parts } from '../resources.js'

/** Less than the 60 s after which proxies take an idle answer for lost. */
const sliceMsMax = 25_000

/** What makes a body an OperationView. */
export const viewMembers = ['processed_at']

export const operationPath = (id: string): string => `/api/v1/operations/${segment(id)}`

/** Resolves when it is finished, or with what is known when the time is up. */
export async function waitFor(
  { send, settings, clock }: Parts,
  id: string,
  { timeoutMs, signal }: { timeoutMs: number; signal?: AbortSignal | undefined },
): Promise<OperationView> {
  const deadline = clock.now() + timeoutMs
  let seen: OperationView | null = null
  for (;;) {
    const leftMs = Math.max(0, deadline - clock.now())
    const waitMs = Math.min(sliceMsMax, leftMs)
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
        deadlineMs: leftMs,
        graceMs: settings.attemptTimeoutMs,
      })
      seen = body as OperationView
      if (seen.processed_at !== null || clock.now() >= deadline) return seen
    } catch (fault) {
      if (seen !== null && fault instanceof SpillwayError && fault.retryable) return seen
      throw fault
    }
  }
}

/** Tells the hook, and where it is to be waited for, waits. Null: it is still queued, or is not waited for. */
export async function finishedOf(
  parts: Parts,
  queued: QueuedAnswer,
  options: CallOptions & { isPolled: boolean },
): Promise<OperationView | null> {
  const { settings } = parts
  const { operationId: id, queuePosition: position, estimatedWaitSeconds: etaSeconds } = queued
  settings.hooks.onQueued({ id, position, etaSeconds })
  if (!options.isPolled) return null
  const timeoutMs = options.deadlineMs ?? settings.deadlineMs
  const view = await waitFor(parts, id, { timeoutMs, signal: options.signal })
  return view.processed_at === null ? null : view
}
