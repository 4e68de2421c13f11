import type { QueuedAnswer, QueuedReason } from '@spillway/protocol/wire'
import type { RateTold, Refusal } from './refusal.js'

/** Done, queued or not now: what every submission comes to. */
export type Answer =
  | { kind: 'done'; operationId: string; result: unknown; replayed: boolean; rate?: RateTold }
  | { kind: 'failed'; operationId: string; error: string; result: unknown; replayed: boolean; rate?: RateTold }
  | {
      kind: 'queued'
      operationId: string
      place: number
      waitMs: number
      reason: QueuedReason
      replayed: boolean
      rate?: RateTold
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
