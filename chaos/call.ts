/** One request to a process of the run, and what became of it. */
import { type Dispatcher, request } from 'undici'
import { isRecord } from './answer-body.js'
import { now } from './clock.js'
import type { Call } from './records.js'
import type { Slot } from './slot.js'

export interface Answered {
  status: number
  headers: Record<string, string | string[] | undefined>
  body: unknown
}

export interface CallOptions {
  agent: Dispatcher
  method: 'GET' | 'POST'
  path: string
  headers?: Record<string, string>
  body?: unknown
  signal: AbortSignal
}

export async function call(slot: Slot, options: CallOptions): Promise<Answered> {
  const { agent, method, path, headers, body, signal } = options
  const answer = await request(`${slot.origin}${path}`, {
    dispatcher: agent,
    method,
    headers: { ...(body !== undefined && { 'content-type': 'application/json' }), ...headers },
    ...(body !== undefined && { body: JSON.stringify(body) }),
    signal,
  })
  return { status: answer.statusCode, headers: answer.headers, body: parsed(await answer.body.text()) }
}

/** The same, whatever its end. `cutAfterMs`: the caller leaves by itself then. */
export async function callAndRecord(
  slot: Slot,
  options: Omit<CallOptions, 'signal'>,
  { deadlineMs, cutAfterMs }: { deadlineMs: number; cutAfterMs: number | null },
): Promise<Call> {
  const made = { slot: slot.name, pid: slot.pid, sentAt: now() }
  const leave = new AbortController()
  const timer = setTimeout(() => leave.abort(), Math.min(cutAfterMs ?? deadlineMs, deadlineMs))
  try {
    const { status, headers, body } = await call(slot, { ...options, signal: leave.signal })
    const code = codeOf(body)
    return {
      ...made,
      ...{ endedAt: now(), end: 'answered', status, body },
      retryAfter: one(headers['retry-after']),
      location: one(headers.location),
      replayed: one(headers['idempotent-replayed']) === 'true',
      ...(code !== undefined && { code }),
    }
  } catch (fault) {
    const left = cutAfterMs === null ? 'deadline' : 'cut'
    return { ...made, endedAt: now(), end: leave.signal.aborted ? left : 'network', error: codeOrMessage(fault) }
  } finally {
    clearTimeout(timer)
  }
}

const codeOf = (body: unknown): string | undefined =>
  isRecord(body) && typeof body.code === 'string' ? body.code : undefined

function parsed(text: string): unknown {
  try {
    return JSON.parse(text)
  } catch {
    // Not JSON: recorded as it is, for the checker to judge.
    return text
  }
}

const one = (value: string | string[] | undefined): string | undefined => (Array.isArray(value) ? value[0] : value)

function codeOrMessage(fault: unknown): string {
  if (typeof fault === 'object' && fault !== null && 'code' in fault) return String(fault.code)
  return String(fault)
}
