/** The public surface of the client. */
import { type ClientOptions, sender } from './http.js'
import { type Operations, operations } from './operations.js'

export type {
  OperationStatus,
  OperationView,
  ProblemCode,
  ProblemDocument,
  QueuedAnswer,
  QueuedReason,
} from '@spillway/protocol/wire'
export { SpillwayError, type SpillwayErrorCode } from './error.js'
export type { ClientOptions } from './http.js'
export type { Operations, Order, SubmitOptions, Submitted, WaitOptions } from './operations.js'

export interface Client {
  readonly operations: Operations
}

export function createClient(options: ClientOptions): Client {
  return { operations: operations(sender(options)) }
}
