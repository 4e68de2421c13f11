import type { DeadLetterView, OperationView } from '@spillway/protocol/wire'
import type { DeadLetter, Ticket } from '../store/port.js'
import { CarriedJson } from './carried-json.js'

/** A ticket as callers see it; the stack of its last error is for operators. */
export function operationView(ticket: Ticket, withStack = false): OperationView {
  const { startedAt, finishedAt, createdAt } = ticket
  const attempt = ticket.attempts + (ticket.status === 'processing' ? 1 : 0)
  return {
    id: ticket.id,
    operation_type: ticket.type,
    queue: ticket.queue,
    partition: ticket.partition,
    priority: ticket.priority,
    status: ticket.status,
    created_at: createdAt.toISOString(),
    processing_started_at: startedAt?.toISOString() ?? null,
    processed_at: finishedAt?.toISOString() ?? null,
    attempt,
    max_attempts: ticket.maxAttempts,
    retry_count: Math.max(0, attempt - 1),
    error_message: ticket.error,
    latency_seconds: finishedAt === null ? null : Math.max(0, finishedAt.getTime() - createdAt.getTime()) / 1_000,
    queuePosition: ticket.place,
    result: ticket.result ?? null,
    ...(ticket.progress && { progress: { ...ticket.progress, at: ticket.progress.at.toISOString() } }),
    ...(ticket.said && { code: ticket.said.code }),
    ...(withStack && ticket.stack !== undefined && { error_stack: ticket.stack }),
    ...(ticket.errorBytes !== undefined && { error_message_bytes: ticket.errorBytes }),
    ...(ticket.resultBytes !== undefined && { result_bytes: ticket.resultBytes }),
    ...((ticket.errorBytes ?? ticket.resultBytes) !== undefined && { truncated: true }),
  }
}

export function deadLetterView(letter: DeadLetter, withStack = false): DeadLetterView {
  const { identity, payload, payloadBytes } = letter
  return {
    ...operationView(letter, withStack),
    identity,
    payload: payload === null ? null : new CarriedJson(payload),
    ...(payloadBytes !== undefined && { payload_bytes: payloadBytes, truncated: true }),
  }
}
