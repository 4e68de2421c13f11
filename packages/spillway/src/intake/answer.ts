import type { QueuedAnswer, QueuedReason } from '@spillway/protocol/wire'
import type { RateStatus, Refusal } from './refusal.js'

/** The result of every submission: done, queued or refused. `Result` is what the handler returns. */
export type Answer<Result = unknown> =
  | { kind: 'done'; operationId: string; result: Result; replayed: boolean; rate?: RateStatus }
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
