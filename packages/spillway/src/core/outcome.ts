import { checkOptions, isBoolean, type Rule, wholeNumber } from './options.js'

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

interface FailOptions {
  /** Of the answer in your own route. Default 500. */
  status?: number
  /** Of the answer, for programs. Default `operation_failed`. */
  code?: string
  /** Kept with the operation. */
  result?: unknown
  /** Keep a dead letter, although a caller was answered. Without one waiting, there is always one. Default false. */
  deadLetter?: boolean
  cause?: unknown
}

const failRules: Record<keyof FailOptions, Rule> = {
  status: (value) =>
    wholeNumber(400, 599)(value) === null && value !== 429 && value !== 503
      ? null
      : 'a whole number from 400 to 599, but not 429 or 503: those ask the caller to come back',
  code: (value) =>
    typeof value === 'string' && /^[A-Za-z0-9_.:-]{1,100}$/.test(value)
      ? null
      : '1 to 100 letters, digits, dots, colons, dashes or underscores',
  result: () => null,
  deadLetter: isBoolean,
  cause: () => null,
}

/**
 * Thrown by a handler: this will never work. The caller who waits is answered with the message, the status and the code; if
 * nobody waits, the operation becomes a dead letter.
 */
export class FailOperation extends Error {
  override readonly name = 'FailOperation'
  readonly status: number
  readonly code: string
  readonly result: unknown
  readonly deadLetter: boolean

  constructor(message: string, options: FailOptions = {}) {
    checkOptions('FailOperation', options, failRules)
    super(message, { cause: options.cause })
    this.status = options.status ?? failedStatus
    this.code = options.code ?? failedCode
    this.result = options.result
    this.deadLetter = options.deadLetter ?? false
  }
}

/** Of an operation that failed for good, if its handler did not say more. */
export const failedStatus = 500
export const failedCode = 'operation_failed'

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
export const expired = {
  error: 'It expired in the queue before it could start.',
  said: { code: 'expired', status: 504 },
}

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
