import type { QueuedAnswer, QueuedReason } from '@spillway/protocol/wire'
import type { StoredAnswer, Ticket } from '../store/port.js'
import type { Outcome } from '../work/attempt.js'
import type { RateStatus, Refusal } from './refusal.js'

/** The result of every submission: done, queued or refused. */
export type Answer =
  | { kind: 'done'; operationId: string; result: unknown; replayed: boolean; rate?: RateStatus }
  | { kind: 'failed'; operationId: string; error: string; result: unknown; replayed: boolean; rate?: RateStatus }
  | {
      kind: 'queued'
      operationId: string
      place: number
      waitMs: number
      reason: QueuedReason
      replayed: boolean
      rate?: RateStatus
    }
  | { kind: 'refused'; refusal: Refusal }

/** The body of a 202. */
export function queuedBody(answer: Extract<Answer, { kind: 'queued' }>): QueuedAnswer {
  const seconds = Math.max(0, answer.waitMs / 1_000)
  return {
    status: 'queued',
    operationId: answer.operationId,
    queuePosition: answer.place,
    estimatedWaitSeconds: Math.round(seconds * 1_000) / 1_000,
    estimatedWait: `${Math.ceil(seconds)}s`,
    reason: answer.reason,
  }
}

/** For an operation that has left its lane. */
export function settledAnswer(operationId: string, outcome: Exclude<Outcome, { kind: 'retry' | 'released' }>): Answer {
  switch (outcome.kind) {
    case 'completed':
      return { kind: 'done', operationId, result: outcome.result ?? null, replayed: false }
    case 'failed':
      return { kind: 'failed', operationId, error: outcome.error, result: outcome.result ?? null, replayed: false }
    case 'cancelled':
      return { kind: 'failed', operationId, error: 'The operation was cancelled.', result: null, replayed: false }
  }
}

/** The answer that an idempotency key stored. */
export function replayed(operationId: string, answer: StoredAnswer): Answer {
  switch (answer.v) {
    case 'queue':
      return {
        kind: 'queued',
        operationId,
        place: answer.place,
        waitMs: answer.wait_ms,
        reason: answer.reason,
        replayed: true,
      }
    case 'done':
      return { kind: 'done', operationId, result: answer.result, replayed: true }
    case 'failed':
      return { kind: 'failed', operationId, error: answer.error, result: answer.result ?? null, replayed: true }
    case 'cancelled':
      return { kind: 'failed', operationId, error: 'The operation was cancelled.', result: null, replayed: true }
  }
}

/** Null while the operation is not finished. */
export function finishedAnswer(ticket: Ticket): Extract<Answer, { kind: 'done' | 'failed' }> | null {
  switch (ticket.status) {
    case 'completed':
      return { kind: 'done', operationId: ticket.id, result: ticket.result, replayed: false }
    case 'failed':
      return {
        kind: 'failed',
        operationId: ticket.id,
        error: ticket.error ?? '',
        result: ticket.result,
        replayed: false,
      }
    case 'cancelled':
      return {
        kind: 'failed',
        operationId: ticket.id,
        error: 'The operation was cancelled.',
        result: null,
        replayed: false,
      }
    default:
      return null
  }
}
