import type { DeadLetterView, OperationView } from '@spillway/protocol/wire'
import type { DeadLetter, Ticket } from '../store/port.js'
import { CarriedJson } from './carried-json.js'

/** A ticket as callers see it. */
export function operationView(ticket: Ticket): OperationView {
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
    ...(ticket.code && { code: ticket.code }),
    latency_seconds: finishedAt === null ? null : Math.max(0, finishedAt.getTime() - createdAt.getTime()) / 1_000,
    queuePosition: ticket.place,
    result: ticket.result ?? null,
    ...(ticket.errorBytes !== undefined && { error_message_bytes: ticket.errorBytes }),
    ...(ticket.resultBytes !== undefined && { result_bytes: ticket.resultBytes }),
    ...((ticket.errorBytes ?? ticket.resultBytes) !== undefined && { truncated: true }),
  }
}

export function deadLetterView(letter: DeadLetter): DeadLetterView {
  const { identity, payload, payloadBytes } = letter
  return {
    ...operationView(letter),
    identity,
    payload: payload === null ? null : new CarriedJson(payload),
    ...(payloadBytes !== undefined && { payload_bytes: payloadBytes, truncated: true }),
  }
}
