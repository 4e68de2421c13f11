/** Operations that leave a lane, in the store's form. */
import type { Claimed, Leaving, StoredAnswer } from '../store/port.js'
import type { Outcome } from './attempt.js'

/** Throws for a result that JSON cannot express. `keepsPlace`: the applied rows exist, so they keep their capacity. */
export function leave(op: Claimed, outcome: Outcome, startedAt: number, now: number, keepsPlace = false): Leaving {
  if (outcome.kind === 'retry' || outcome.kind === 'released') {
    throw new Error(`an operation that comes again does not leave its lane (${outcome.kind})`)
  }
  return {
    seq: op.seq,
    type: op.type,
    status: outcome.kind,
    result: outcome.kind === 'cancelled' ? null : toJson(outcome.result),
    error: outcome.kind === 'failed' ? outcome.error : outcome.kind === 'cancelled' ? 'cancelled while running' : null,
    startedMsAgo: Math.max(0, Math.round(now - startedAt)),
    counted: true,
    gate: keepsPlace && outcome.kind === 'completed' ? null : op.gate,
    idempotencyKey: op.idempotencyKey,
    answer: op.idempotencyKey === null ? null : answerOf(outcome),
  }
}

function answerOf(outcome: Outcome): StoredAnswer {
  switch (outcome.kind) {
    case 'completed':
      return { v: 'done', result: outcome.result ?? null }
    case 'failed':
      return { v: 'failed', error: outcome.error, ...(outcome.result !== undefined && { result: outcome.result }) }
    default:
      return { v: 'cancelled' }
  }
}

const toJson = (value: unknown): string | null => (value === undefined || value === null ? null : JSON.stringify(value))
