/** What is in the body of an answer. Asked by those who call, and by the checker. */

/** A petition has the id of the operation that brought it; a push has one when it is queued. */
export function operationIdOf(body: unknown): string | null {
  const id = isRecord(body) ? (body.operationId ?? body.petition_id) : null
  return typeof id === 'string' ? id : null
}

/** The app's own routes answer an operation that failed for good with a problem document: accepted, and ended. */
export const hasFailed = ({ status, code, body }: { status?: number; code?: string; body?: unknown }): boolean =>
  status === 500 && code === 'operation_failed' && operationIdOf(body) !== null

/** Of a push of one message: as a list when it is stored, in `results` when it waits. */
export function pushResultOf(body: unknown): Record<string, unknown> | null {
  const results: unknown = isRecord(body) && !Array.isArray(body) ? body.results : body
  if (!Array.isArray(results) || results.length !== 1) return null
  const first: unknown = results[0]
  return isRecord(first) ? first : null
}

export function messageIdOf(body: unknown): string | null {
  const id = pushResultOf(body)?.message_id
  return typeof id === 'string' ? id : null
}

export interface Message {
  id: string
  transactionId: string
  queue: string
  partition: string
  partitionId: string
  leaseId: string
  consumerGroup: string
  data: unknown
}

const texts = ['id', 'transactionId', 'queue', 'partition', 'partitionId', 'leaseId', 'consumerGroup'] as const

/** Null: that is no answer with messages. */
export function messagesOf(body: unknown): Message[] | null {
  const messages: unknown = isRecord(body) ? body.messages : null
  if (!Array.isArray(messages) || messages.length === 0) return null
  const all: readonly unknown[] = messages
  return all.every(isMessage) ? [...all] : null
}

const isMessage = (value: unknown): value is Message =>
  isRecord(value) && texts.every((name) => typeof value[name] === 'string')

export const isRecord = (value: unknown): value is Record<string, unknown> =>
  typeof value === 'object' && value !== null
