export const operationStatuses = ['pending', 'processing', 'completed', 'failed', 'cancelled'] as const
export type OperationStatus = (typeof operationStatuses)[number]

/** Why a request was queued instead of run at once. */
export type QueuedReason = 'maintaining_order' | 'system_busy' | 'requested' | 'still_running' | 'retrying'

/** The body of every 202. */
export interface QueuedAnswer {
  status: 'queued'
  operationId: string
  /** Position in its lane; 0 = next. */
  queuePosition: number
  estimatedWaitSeconds: number
  /** The same, rounded up, as text: "3s". */
  estimatedWait: string
  reason: QueuedReason
}

/** A ticket, as `GET /api/v1/operations/:id` shows it. */
export interface OperationView {
  id: string
  operation_type: string
  queue: string
  partition: string
  priority: number
  status: OperationStatus
  created_at: string
  processing_started_at: string | null
  processed_at: string | null
  attempt: number
  max_attempts: number
  retry_count: number
  error_message: string | null
  latency_seconds: number | null
  queuePosition: number | null
  result: unknown
  /** What its handler said last, while that attempt runs; not in lists. */
  progress?: { value: number; note: string | null; at: string }
  /** Why it failed: `expired`, or (not in lists) what its handler said with FailOperation. */
  code?: string
  /** The last error with its stack; for operators only, and not in lists. */
  error_stack?: string
  /** In lists: the bytes of a result that is left out (null), and of an error message that is shortened. */
  result_bytes?: number
  error_message_bytes?: number
  /** Something was left out; the single item has it whole. */
  truncated?: true
}

export interface DeadLetterView extends OperationView {
  identity: string
  payload: unknown
  /** In lists: the bytes of a payload that is left out (null). */
  payload_bytes?: number
}

/** A lane that holds operations, as `GET /api/v1/lanes` shows it. */
export interface LaneView {
  queue: string
  partition: string
  /** Unfinished operations. */
  depth: number
  /** Since its first operation was accepted. */
  oldest_age_seconds: number
  paused: boolean
  /** A pause of the whole queue, of this lane, or of the type of its first operation. */
  paused_by: 'queue' | 'partition' | 'type' | null
  /** Its first operation: the others wait for it. */
  head: {
    id: string
    operation_type: string
    status: 'pending' | 'processing'
    attempt: number
    max_attempts: number
    /** When a delayed one, or one that failed, runs next; null: it runs, waits for a slot, or is paused. */
    next_attempt_at: string | null
  }
  /** In words, for people. Null: its first operation runs, or is about to. */
  waiting_because: string | null
}

/** The parts of an answer that `http.request` keeps. */
export interface ForwardResult {
  status: number
  headers: Record<string, string>
  body: unknown
  truncated?: true
}
