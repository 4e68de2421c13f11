/**
 * - `unavailable`  no connection, or the server is starting, stopping or out of connections: retry later
 * - `timeout`      the statement or a lock took longer than allowed
 * - `conflict`     serialization failure or deadlock: the transaction may be retried at once
 * - `data`         the server, or a user's trigger, refused the values (classes 22, 23 and P0): a retry fails the same way
 * - `disk_full`    no space for data or WAL
 * - `other`        our defect, or an unsuitable server
 */
export type StoreFaultCode = 'unavailable' | 'timeout' | 'data' | 'conflict' | 'disk_full' | 'other'

/** Fixed texts: the driver's message stays in `cause`, for logs, and never reaches a caller. */
const MESSAGES: Record<StoreFaultCode, string> = {
  unavailable: 'the database is not available',
  timeout: 'the database did not answer in time',
  data: 'the database refused the values',
  conflict: 'the transaction lost against another one',
  disk_full: 'the database has no disk space left',
  other: 'the database statement failed',
}

export class StoreFault extends Error {
  override readonly name = 'StoreFault'
  readonly code: StoreFaultCode
  /** The server's SQLSTATE, if the server reported the fault. */
  readonly sqlState: string | undefined
  /** The violated constraint, so that an adapter can distinguish an expected duplicate from a defect. */
  readonly constraint: string | undefined

  constructor(
    code: StoreFaultCode,
    options?: { cause?: unknown; sqlState?: string; constraint?: string; raised?: string },
  ) {
    super(options?.raised ?? MESSAGES[code], { cause: options?.cause })
    this.code = code
    this.sqlState = options?.sqlState
    this.constraint = options?.constraint
  }
}

const BY_STATE: Readonly<Record<string, StoreFaultCode>> = {
  '25006': 'unavailable', // read_only_sql_transaction: a standby, or a primary that was just demoted
  '25P03': 'unavailable', // idle_in_transaction_session_timeout
  '40001': 'conflict',
  '40P01': 'conflict',
  '53100': 'disk_full',
  '53200': 'unavailable', // out_of_memory
  '53300': 'unavailable', // too_many_connections
  '55P03': 'timeout', // lock_not_available
  '57014': 'timeout', // query_canceled: statement_timeout cancels
  '57P01': 'unavailable',
  '57P02': 'unavailable',
  '57P03': 'unavailable',
  '57P05': 'unavailable', // idle_session_timeout
}

const BY_CLASS: Readonly<Record<string, StoreFaultCode>> = {
  '08': 'unavailable',
  '22': 'data',
  '23': 'data',
  '40': 'conflict',
  '53': 'unavailable',
  '58': 'unavailable', // system_error, e.g. an I/O error: the caller cannot fix it
  SP: 'data', // raised by our functions: their texts may be shown
  P0: 'data', // raised by a user's trigger or function: the user's own rule about these values
}

const BY_ERRNO: Readonly<Record<string, StoreFaultCode>> = {
  ECONNREFUSED: 'unavailable',
  ECONNRESET: 'unavailable',
  ECONNABORTED: 'unavailable',
  EPIPE: 'unavailable',
  ENOTFOUND: 'unavailable',
  EAI_AGAIN: 'unavailable',
  EHOSTUNREACH: 'unavailable',
  EHOSTDOWN: 'unavailable',
  ENETUNREACH: 'unavailable',
  ENETDOWN: 'unavailable',
  EADDRNOTAVAIL: 'unavailable',
  ENOENT: 'unavailable', // the socket file of a server that is down
  EMFILE: 'unavailable',
  ENFILE: 'unavailable',
  ETIMEDOUT: 'unavailable',
  ENOSPC: 'disk_full',
}

/** Errors made by node-postgres itself have no code; their texts are fixed in the pinned version. */
const BY_DRIVER_MESSAGE: readonly [RegExp, StoreFaultCode][] = [
  [/^Query read timeout$/, 'timeout'],
  [/^timeout exceeded when trying to connect$/, 'unavailable'],
  [/^timeout expired$/, 'unavailable'],
  [/^Connection terminated/, 'unavailable'],
  [/^Client (was closed|has encountered a connection error) and is not queryable$/, 'unavailable'],
]

const poolEnded = 'Cannot use a pool after calling end on the pool'

/** Raised by our functions, with a reason that readers of the ticket may see. */
const RAISED_STATE = 'SP001'

const SQL_STATE = /^[0-9A-Z]{5}$/

/** Translates any error from node-postgres. A StoreFault passes unchanged. */
export function toStoreFault(error: unknown): StoreFault {
  if (error instanceof StoreFault) return error
  if (error instanceof AggregateError) {
    // One error per address tried (::1 and 127.0.0.1).
    const [first] = error.errors
    return new StoreFault(first === undefined ? 'unavailable' : toStoreFault(first).code, { cause: error })
  }
  if (!(error instanceof Error)) return new StoreFault('other', { cause: error })
  const code = 'code' in error && typeof error.code === 'string' ? error.code : undefined
  if (code !== undefined && code in BY_ERRNO) return new StoreFault(BY_ERRNO[code] ?? 'other', { cause: error })
  // EPIPE and others are five capitals too, so errno comes first; only server errors carry a severity.
  if (code !== undefined && SQL_STATE.test(code) && 'severity' in error) {
    const constraint = 'constraint' in error && typeof error.constraint === 'string' ? error.constraint : undefined
    const raised = code === RAISED_STATE ? error.message : undefined
    return new StoreFault(bySqlState(code), {
      cause: error,
      sqlState: code,
      ...(constraint && { constraint }),
      ...(raised !== undefined && { raised }),
    })
  }
  if (error.message === poolEnded) {
    return new StoreFault('unavailable', { cause: error, raised: 'this intake is closed, and so are its connections' })
  }
  const known = BY_DRIVER_MESSAGE.find(([pattern]) => pattern.test(error.message))
  return new StoreFault(known?.[1] ?? 'other', { cause: error })
}

export function bySqlState(sqlState: string): StoreFaultCode {
  return BY_STATE[sqlState] ?? BY_CLASS[sqlState.slice(0, 2)] ?? 'other'
}
