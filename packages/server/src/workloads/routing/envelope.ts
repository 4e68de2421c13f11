/** Parses a task from HTTP or the broker: returns it, or what is wrong with it. Never throws. */
import { DecideRequest } from '@spillway/protocol/schema'
import { limits, type RouteTask, type RoutingCode, taskVersion } from '@spillway/protocol/wire'
import type { RequestFault } from 'spillway/workload'
import {
  compileValidator,
  digestUuid,
  isUnstorable,
  isUuid as isUuidText,
  memberTexts,
  parseStrictJson,
} from 'spillway/workload'
import Type from 'typebox'

/** The ids that match an answer to its request. */
export interface RouteContext {
  request_id: string
  trace_id: string
}

export interface InvalidTask {
  ok: false
  code: RoutingCode
  message: string
  errors?: RequestFault[]
  /** Only valid ids. */
  correlation: Partial<RouteContext>
}

export type CheckedTask = { ok: true; task: RouteTask } | InvalidTask
/** `text`: as received. */
export type ReadTask = { ok: true; task: RouteTask; text: string } | InvalidTask

const traceId = /^[0-9a-f]{32}$/i

/** Malformed values of these have a separate code; the schema only checks that they are strings. */
const Shape = Type.Object(
  {
    ...DecideRequest.properties,
    request_id: Type.String(),
    tenant_id: Type.String(),
    trace_id: Type.Optional(Type.String()),
  },
  { additionalProperties: false },
)
const checkShape = compileValidator(Shape)

export function readTask(data: Uint8Array, { bytesMax }: { bytesMax: number }): ReadTask {
  if (data.byteLength === 0) return invalid('PAYLOAD_TOO_SMALL', 'The task is empty.')
  if (data.byteLength > bytesMax) {
    return invalid('PAYLOAD_TOO_LARGE', `The task has ${data.byteLength} bytes; ${bytesMax} are taken.`)
  }
  const parsed = parseStrictJson(Buffer.from(data.buffer, data.byteOffset, data.byteLength))
  if (!parsed.ok) return invalid('SCHEMA_VALIDATION_FAILED', 'The task cannot be read.', { errors: [parsed.fault] })
  const checked = checkTask(parsed.value)
  return checked.ok ? { ...checked, text: parsed.text } : checked
}

/** For a value that passed the strict parser. Undefined: there was no body. */
export function checkTask(value: unknown): CheckedTask {
  if (value === undefined) return invalid('PAYLOAD_TOO_SMALL', 'The request has no body.')
  const correlation = correlationOf(value)
  if (isRecord(value) && Object.hasOwn(value, 'version') && value.version !== taskVersion) {
    return invalid('VERSION_UNSUPPORTED', `This router speaks version ${JSON.stringify(taskVersion)} of tasks.`, {
      correlation,
      errors: [{ path: '/version', message: `must be ${JSON.stringify(taskVersion)}` }],
    })
  }
  const shape = checkShape(value)
  if (!shape.ok) return invalid('SCHEMA_VALIDATION_FAILED', notValid, { correlation, errors: shape.errors })
  // Validated against the schema that the type follows.
  const task = shape.value as RouteTask
  const hasRef = Object.hasOwn(task.task, 'payload_ref')
  if (hasRef === Object.hasOwn(task.task, 'payload')) {
    const message = 'must have exactly one of payload_ref and payload'
    return invalid('SCHEMA_VALIDATION_FAILED', notValid, { correlation, errors: [{ path: '/task', message }] })
  }
  const errors = correlationFaults(task)
  if (errors.length > 0) {
    return invalid('CORRELATION_FIELDS_INVALID', 'The task cannot be correlated.', { correlation, errors })
  }
  return { ok: true, task }
}

const notAsked: ReadonlySet<string> = new Set(['idempotency_key', 'request_id', 'trace_id'])

/**
 * The identity of a task for its idempotency key: tasks with the same digest ask for the same thing. Request id, trace
 * and the order of members do not count, because a retry changes them. Texts are compared as received.
 */
export function taskDigest(text: string): string {
  const asked = [...memberTexts(text)].filter(([name]) => !notAsked.has(name))
  return digestUuid(JSON.stringify(asked.sort(([a], [b]) => (a < b ? -1 : 1))))
}

const notValid = 'The task is not valid.'

function invalid(
  code: RoutingCode,
  message: string,
  { correlation = {}, errors }: { correlation?: Partial<RouteContext>; errors?: RequestFault[] } = {},
): InvalidTask {
  return { ok: false, code, message, ...(errors && { errors }), correlation }
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

export const isUuid = (value: unknown): value is string => typeof value === 'string' && isUuidText(value)
const isTraceId = (value: unknown): value is string =>
  typeof value === 'string' && (traceId.test(value) || isUuidText(value))

function correlationOf(value: unknown): Partial<RouteContext> {
  if (!isRecord(value)) return {}
  return {
    ...(isUuid(value.request_id) && { request_id: value.request_id }),
    ...(isTraceId(value.trace_id) && { trace_id: value.trace_id }),
  }
}

function correlationFaults({ request_id, trace_id, tenant_id }: RouteTask): RequestFault[] {
  const faults: RequestFault[] = []
  if (!isUuid(request_id)) faults.push({ path: '/request_id', message: 'must be a UUID' })
  if (trace_id !== undefined && !isTraceId(trace_id)) {
    faults.push({ path: '/trace_id', message: 'must be 32 hex digits or a UUID' })
  }
  if (tenant_id.trim() === '') faults.push({ path: '/tenant_id', message: 'must not be blank' })
  else if (isTooLong(tenant_id)) {
    faults.push({ path: '/tenant_id', message: `must not have more than ${limits.nameCodePoints} code points` })
  } else if (isUnstorable(tenant_id)) {
    faults.push({ path: '/tenant_id', message: 'must not contain a NUL character or a lone surrogate' })
  }
  return faults
}

function isTooLong(name: string): boolean {
  // A code point has at most two units: a megabyte need not be counted.
  return name.length > 2 * limits.nameCodePoints || [...name].length > limits.nameCodePoints
}
