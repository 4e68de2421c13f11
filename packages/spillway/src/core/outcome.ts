/** Thrown by a handler: try again, after `afterMs` if given, else after the usual back-off. Counts as an attempt. */
export class RetryOperation extends Error {
  override readonly name = 'RetryOperation'
  readonly code = 'retry'
  readonly afterMs: number | undefined
  readonly result: unknown

  constructor(message: string, options: { afterMs?: number; result?: unknown; cause?: unknown } = {}) {
    super(message, { cause: options.cause })
    this.afterMs = options.afterMs
    this.result = options.result
  }
}

/** Thrown by a handler: this will never work. The operation becomes a dead letter at once. */
export class FailOperation extends Error {
  override readonly name = 'FailOperation'
  readonly code = 'failed'
  readonly result: unknown

  constructor(message: string, options: { result?: unknown; cause?: unknown } = {}) {
    super(message, { cause: options.cause })
    this.result = options.result
  }
}

/**
 * Thrown by a handler of a definition with `announces`: this process may not run the operation. It is left to a process that
 * may, without counting as an attempt. It fails with this message when there is none for a minute.
 */
export class LeaveOperation extends Error {
  override readonly name = 'LeaveOperation'
  readonly code = 'left'
  /** Operations with the same key have the same needs: the minute is counted for all of them together. */
  readonly key: string
  /** Whether a process that announced this may run it. */
  readonly may: (announced: string) => boolean

  constructor(message: string, options: { key: string; may: (announced: string) => boolean }) {
    super(message)
    this.key = options.key
    this.may = options.may
  }
}

/** Of an operation that was still queued when its time was over. */
export const expiredText = 'It expired in the queue before it could start.'

/** The reason of `ctx.signal` when it fires. */
export class OperationAborted extends Error {
  override readonly name = 'OperationAborted'
  readonly code: 'timeout' | 'cancelled' | 'lease_lost' | 'stopping'

  constructor(code: 'timeout' | 'cancelled' | 'lease_lost' | 'stopping') {
    super(
      {
        timeout: 'the operation took longer than its timeout',
        cancelled: 'the operation was cancelled',
        lease_lost: 'this process lost its lease on the lane',
        stopping: 'this process is stopping',
      }[code],
    )
    this.code = code
  }
}
