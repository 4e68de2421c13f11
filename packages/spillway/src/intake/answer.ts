import type { QueuedAnswer, QueuedReason } from '@spillway/protocol/wire'
import { failedCode, failedStatus } from '../core/outcome.js'
import type { RateStatus, Refusal } from './refusal.js'

/** The result of every submission: done, queued or refused. `Result` is what the handler returns. */
export type Answer<Result = unknown> =
  | { kind: 'done'; operationId: string; result: Result; replayed: boolean; rate?: RateStatus }
  | {
      /** For good: it will not be tried again. */
      kind: 'failed'
      operationId: string
      error: string
      /** The handler threw FailOperation: `error` is for the caller. False: an unexpected error. */
      expected: boolean
      /** What FailOperation says; else `operation_failed` and 500. */
      code: string
      status: number
      result: unknown
      replayed: boolean
      rate?: RateStatus
    }
  | {
      kind: 'queued'
      operationId: string
      position: number
      waitMs: number
      reason: QueuedReason
      replayed: boolean
      rate?: RateStatus
    }
  | { kind: 'refused'; refusal: Refusal }

export type FailedAnswer = Extract<Answer, { kind: 'failed' }>

export function failedAnswer(
  operationId: string,
  {
    error,
    result,
    said,
  }: { error: string | null; result?: unknown; said?: { code: string; status: number } | undefined },
): FailedAnswer {
  return {
    ...{ kind: 'failed', operationId, error: error ?? '', expected: said !== undefined },
    ...(said ?? { code: failedCode, status: failedStatus }),
    ...{ result: result ?? null, replayed: false },
  }
}

/** The body of a 202. */
export function queuedBody(answer: Extract<Answer, { kind: 'queued' }>): QueuedAnswer {
  const seconds = Math.max(0, answer.waitMs / 1_000)
  return {
    status: 'queued',
    operationId: answer.operationId,
    queuePosition: answer.position,
    estimatedWaitSeconds: Math.round(seconds * 1_000) / 1_000,
    estimatedWait: `${Math.ceil(seconds)}s`,
    reason: answer.reason,
  }
}
