import type { IntakeLog } from 'spillway/workload'
import type { Buffers } from '../../http/buffers.js'

export interface MessagesOptions {
  /** Of the store's tables, quoted for SQL. */
  schema: string
  /** Operations that may wait for a push to join them; beyond that what would have to wait is refused. */
  pendingMax: number
  /** Consumer groups that a queue may have. */
  groupsMax: number
  /** 32 bytes; null: no queue can be encrypted. */
  encryptionKey: Uint8Array | null
  /** A page of a list, and the payloads of a pop, end at this size. */
  pageBytesMax: number
  /** Space for what is handed out, reserved before it is taken. */
  buffers: Buffers
  log: IntakeLog
  metrics: MessagesMetrics
}

interface Counter {
  inc(by?: number): void
}

/** What is counted, where it is decided. */
export interface MessagesMetrics {
  pushed: { labels(status: 'stored' | 'pending' | 'duplicate' | 'failed'): Counter }
  popped: Counter
  answered: { labels(outcome: 'done' | 'retry' | 'dead' | 'skipped' | 'unknown' | 'lost'): Counter }
  waiting: { set(value: number): void }
}
