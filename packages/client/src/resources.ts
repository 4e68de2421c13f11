/** The parts that every resource is made from. */
import type { Clock } from './clock.js'
import type { Send } from './http/call.js'
import type { Settings } from './options.js'

export interface Parts {
  send: Send
  settings: Settings
  clock: Clock
}

export interface Page<T> {
  items: T[]
  /** Null: this is the last page. */
  next_cursor: string | null
}

export interface PageOptions {
  limit?: number
  /** `next_cursor` of the page before. */
  cursor?: string
}
