/** Waits for an operation; used by every resource that may answer with a ticket. */

import type { OperationView, QueuedAnswer } from '@spillway/protocol/wire'
import { segment } from '../checks.js'
import { SpillwayError } from '../error.js'
import { textOf } from '../hooks.js'
import { type CallOptions, limitsOf } from '../http/call.js'
import { idleMs, quickMs } from '../policy/pause.js'
import type { Parts } from '../resources.js'

/** Less than the 60 s after which proxies drop an idle answer. */
const sliceMsMax = 25_000
/** Network time allowed for an answer that was held back. */
const answerMs = 1_000

/** The members that identify an OperationView. */
export const viewMembers = ['processed_at']

export const operationPath = (id: string): string => `/api/v1/operations/${segment(id)}`

/** With less time left, another request is pointless. */
const roomMsMin = 50

export async function getAt({ send }: Parts, path: string, options: CallOptions): Promise<OperationView> {
  const reading = { method: 'GET', service: 'operations', expects: viewMembers, isRepeatable: true } as const
  return (await send({ ...reading, path, ...limitsOf(options) })).body as OperationView
}

export async function cancelAt(parts: Parts, at: string, options: CallOptions): Promise<OperationView> {
  const { deadline } = restOf(parts, options)
  try {
    const asking = { method: 'POST', path: `${at}/cancel`, service: 'operations', isRepeatable: true } as const
    return (await parts.send({ ...asking, expects: viewMembers, ...limitsOf(options) })).body as OperationView
  } catch (fault) {
    // Repeated because an answer was lost: the first attempt may have cancelled it.
    const isOurs = fault instanceof SpillwayError && fault.code === 'operation_finished' && fault.attempts > 1
    const leftMs = Math.max(0, deadline - parts.clock.now())
    const view = isOurs ? await getAt(parts, at, { ...options, deadlineMs: leftMs }) : null
    if (view?.status === 'cancelled') return view
    throw fault
  }
}

/** Resolves when it is finished, or with the current state when the time is up. The first request gets at least `lookMs`. */
export async function waitFor(
  { send, clock }: Parts,
  path: string,
  { timeoutMs, lookMs, signal }: { timeoutMs: number; lookMs: number; signal: AbortSignal | undefined },
): Promise<OperationView> {
  const deadline = clock.now() + timeoutMs
  let seen: OperationView | null = null
  for (let quick = 0; ; ) {
    const askedAt = clock.now()
    const leftMs = Math.max(0, deadline - askedAt)
    // The answer must arrive in time, so the server is asked to hold it back for less than the time left.
    const waitMs = Math.min(sliceMsMax, Math.max(leftMs - answerMs, leftMs / 2))
    try {
      const { body } = await send({
        method: 'GET',
        path,
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

/** The time left of a call. */
export interface Rest {
  /** By the clock. */
  deadline: number
  signal: AbortSignal | undefined
  /** Of the ticket, if it is not the usual one. */
  path?: string
}

/** When the whole call, including waiting for its operation, must be over. */
export const restOf = ({ clock, settings }: Parts, { deadlineMs, signal }: CallOptions, waitMs = 0): Rest => ({
  deadline: clock.now() + (deadlineMs ?? settings.deadlineMs + waitMs),
  signal,
})

/** Waits in the time left. Null: not finished, or the request failed; the ticket is worth more to the caller than that error. */
export async function polled(
  parts: Parts,
  id: string,
  { deadline, signal, path = operationPath(id) }: Rest,
): Promise<OperationView | null> {
  const timeoutMs = deadline - parts.clock.now()
  if (timeoutMs < roomMsMin) return null
  try {
    const view = await waitFor(parts, path, { timeoutMs, lookMs: 0, signal })
    return view.processed_at === null ? null : view
  } catch (fault) {
    signal?.throwIfAborted()
    parts.settings.logger.warn('could not wait for a queued operation', { id, error: textOf(fault) })
    return null
  }
}

/** Calls the hook and, if configured, waits for the result. Null: still queued, or not waited for. */
export async function finishedOf(
  parts: Parts,
  queued: QueuedAnswer,
  { isPolled, ...rest }: Rest & { isPolled: boolean },
): Promise<OperationView | null> {
  const { operationId: id, queuePosition: position, estimatedWaitSeconds: etaSeconds } = queued
  parts.settings.hooks.onQueued({ id, position, etaSeconds })
  return isPolled ? polled(parts, id, rest) : null
}
