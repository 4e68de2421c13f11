import { type DestinationStream, type Logger, pino } from 'pino'
import { type LogLevel, maskUrlPasswords } from './config/index.js'

export type { Logger } from 'pino'

/** Never logged, at any depth: confidential data of callers, and credentials. */
const unwritten: ReadonlySet<string> = new Set([
  'payload',
  'body',
  'result',
  'authorization',
  'proxy-authorization',
  'cookie',
  'set-cookie',
  'password',
  'secret',
  'token',
  'apikey',
  'api_key',
  'jwtsecret',
  'idempotency-key',
])

const redacted = '[redacted]'
const depthMax = 6

/** JSON lines. `destination` is standard output unless a test passes another. */
export function createLogger(options: { level: LogLevel; destination?: DestinationStream }): Logger {
  return pino(
    {
      level: options.level,
      // Not `pid`: log lines about another process (the embedded server) use that field.
      base: { process: process.pid },
      timestamp: pino.stdTimeFunctions.isoTime,
      formatters: {
        level: (label) => ({ level: label }),
        log: (line) => scrubObject(line, 0),
      },
      // pino does not apply the formatters to a child's bindings, but it applies the redaction.
      redact: { paths: [...unwritten].map((key) => `["${key}"]`), censor: redacted },
      serializers: { err: (error: unknown) => describeError(error) },
      hooks: {
        logMethod(args, method) {
          for (const [index, arg] of args.entries()) {
            if (typeof arg === 'string') args[index] = maskUrlPasswords(arg)
          }
          return method.apply(this, args)
        },
      },
    },
    options.destination ?? pino.destination({ dest: 1, sync: true }),
  )
}

/**
 * An error as it is logged. Only these members, because drivers attach row values to their errors (PostgreSQL's `detail`
 * quotes the conflicting key), and those are payload.
 */
export function describeError(error: unknown, depth = 0): unknown {
  if (!(error instanceof Error)) return scrub(error, depth)
  return {
    type: error.name,
    message: maskUrlPasswords(error.message),
    ...('code' in error && (typeof error.code === 'string' || typeof error.code === 'number')
      ? { code: error.code }
      : {}),
    stack: maskUrlPasswords(error.stack ?? ''),
    ...(error.cause !== undefined && depth < depthMax ? { cause: describeError(error.cause, depth + 1) } : {}),
  }
}

function scrub(value: unknown, depth: number): unknown {
  if (typeof value === 'string') return maskUrlPasswords(value)
  if (typeof value !== 'object' || value === null) return value
  if (value instanceof Error) return depth === 0 ? value : describeError(value, depth)
  if (depth >= depthMax) return '[deep]'
  if (Array.isArray(value)) return value.map((one) => scrub(one, depth + 1))
  // Objects with a class (requests, sockets, dates) have their own serializers or toJSON.
  const prototype = Object.getPrototypeOf(value)
  return prototype === Object.prototype || prototype === null ? scrubObject(value, depth + 1) : value
}

function scrubObject(object: object, depth: number): Record<string, unknown> {
  const scrubbed: Record<string, unknown> = {}
  for (const [key, value] of Object.entries(object)) {
    scrubbed[key] = unwritten.has(key.toLowerCase()) ? redacted : scrub(value, key === 'err' ? 0 : depth + 1)
  }
  return scrubbed
}
