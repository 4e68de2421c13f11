import type { IntakeLog } from 'spillway/workload'
import type { Buffers } from '../../traffic/buffers.js'

export interface MessagesOptions {
  /** Of the store's tables, quoted for SQL. */
  schema: string
  /** How many operations may wait when a push joins them; beyond that a push that must wait is refused. */
  pendingMax: number
  /** How many consumer groups a queue may have. */
  groupsMax: number
  /** 32 bytes; null: no queue can be encrypted. */
  encryptionKey: Uint8Array | null
  /** A page of a list, and the payloads of a pop, end at this size. */
  pageBytesMax: number
  /** Space for the answers of pops, reserved before messages are taken. */
  buffers: Buffers
  log: IntakeLog
  metrics: MessagesMetrics
}

interface Counter {
  inc(by?: number): void
}

/** Counted where it is decided. */
export interface MessagesMetrics {
  pushed: { labels(status: 'stored' | 'pending' | 'duplicate' | 'failed'): Counter }
  popped: Counter
  answered: { labels(outcome: 'done' | 'retry' | 'dead' | 'skipped' | 'unknown' | 'lost'): Counter }
  waiting: { set(value: number): void }
}
