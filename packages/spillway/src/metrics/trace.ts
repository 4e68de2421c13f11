import { randomFillSync } from 'node:crypto'
import type { Attributes, Span } from '@opentelemetry/api'

type OpenTelemetry = typeof import('@opentelemetry/api')

/** An optional peer: null until `loadTracing`, and if it is not installed. */
let openTelemetry: OpenTelemetry | null = null
const sampledFlag = 1

/** Call it before the first span. Spans are made if OpenTelemetry's API is installed and an SDK is registered. */
export async function loadTracing(): Promise<void> {
  openTelemetry ??= await import('@opentelemetry/api').catch(() => null)
}

/** The position of a request or an operation in its trace (W3C Trace Context). */
export interface TraceContext {
  /** 32 lower-case hex digits, not all zero. Also the answer's X-Request-Id. */
  readonly traceId: string
  /** 16 lower-case hex digits, not all zero. */
  readonly spanId: string
  readonly sampled: boolean
}

// One system call and one conversion for 256 trace ids: requesting 16 bytes each time costs some µs.
const pool = Buffer.allocUnsafe(4_096)
let digits = ''
let used = 0

function randomHex(bytes: number): string {
  if (used + 2 * bytes > digits.length) {
    digits = randomFillSync(pool).toString('hex')
    used = 0
  }
  const hex = digits.slice(used, used + 2 * bytes)
  used += 2 * bytes
  // All zero means "none" on the wire. It comes up once in 2^64 span ids.
  return hex.startsWith('00000000') && /^0+$/u.test(hex) ? randomHex(bytes) : hex
}

export function newTraceId(): string {
  return randomHex(16)
}

export function newSpanId(): string {
  return randomHex(8)
}

const traceparent = /^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$/u
const zeroTrace = '0'.repeat(32)
const zeroSpan = '0'.repeat(16)

/** null for invalid headers, as the recommendation defines them; a later version is read as far as we know it. */
export function parseTraceparent(header: string): TraceContext | null {
  const [, version, traceId, spanId, flags, rest] = traceparent.exec(header) ?? []
  if (version === undefined || traceId === undefined || spanId === undefined || flags === undefined) return null
  if (version === 'ff' || (version === '00' && rest !== undefined)) return null
  if (traceId === zeroTrace || spanId === zeroSpan) return null
  return { traceId, spanId, sampled: (Number.parseInt(flags, 16) & sampledFlag) !== 0 }
}

export function formatTraceparent({ traceId, spanId, sampled }: TraceContext): string {
  return `00-${traceId}-${spanId}-${sampled ? '01' : '00'}`
}

/** Our position in the caller's trace, or in a new one if the caller's is missing or invalid. */
export function continueTrace(header: string | undefined): TraceContext {
  const parent = header === undefined ? null : parseTraceparent(header)
  if (parent === null) return { traceId: newTraceId(), spanId: newSpanId(), sampled: true }
  return { traceId: parent.traceId, spanId: newSpanId(), sampled: parent.sampled }
}

/** Whether the process has registered an OpenTelemetry SDK. Without one a span only costs time. */
export function isTracing(): boolean {
  return tracingApi() !== null
}

function tracingApi(): OpenTelemetry | null {
  if (openTelemetry === null) return null
  const provider = openTelemetry.trace.getTracerProvider()
  const isRegistered =
    !(provider instanceof openTelemetry.ProxyTracerProvider) || provider.getDelegateTracer('spillway') !== undefined
  return isRegistered ? openTelemetry : null
}

/** Runs the work inside a child span of the given context; without an SDK just runs it. */
export async function withSpan<T>(
  name: string,
  options: { parent: TraceContext; attributes?: Attributes },
  run: (span: Span | null) => Promise<T>,
): Promise<T> {
  const api = tracingApi()
  if (api === null) return run(null)
  const { context, trace, TraceFlags, SpanStatusCode } = api
  const { traceId, spanId, sampled } = options.parent
  const parent = trace.setSpanContext(context.active(), {
    traceId,
    spanId,
    traceFlags: sampled ? TraceFlags.SAMPLED : TraceFlags.NONE,
    isRemote: true,
  })
  const span = trace.getTracer('spillway').startSpan(name, { attributes: options.attributes ?? {} }, parent)
  try {
    return await context.with(trace.setSpan(parent, span), () => run(span))
  } catch (error) {
    span.setStatus({ code: SpanStatusCode.ERROR })
    if (error instanceof Error) span.recordException({ name: error.name, message: error.message })
    throw error
  } finally {
    span.end()
  }
}
