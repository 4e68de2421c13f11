import { ProxyTracerProvider, type Span, type SpanStatus, type Tracer, trace } from '@opentelemetry/api'
import { afterEach, describe, expect, it } from 'vitest'
import {
  continueTrace,
  formatTraceparent,
  loadTracing,
  newSpanId,
  newTraceId,
  parseTraceparent,
  withSpan,
} from './trace.js'

const traceId = '4bf92f3577b34da6a3ce929d0e0e4736'
const spanId = '00f067aa0ba902b7'

describe('traceparent', () => {
  it('is read and written', () => {
    expect(parseTraceparent(`00-${traceId}-${spanId}-01`)).toEqual({ traceId, spanId, sampled: true })
    expect(parseTraceparent(`00-${traceId}-${spanId}-00`)?.sampled).toBe(false)
    expect(formatTraceparent({ traceId, spanId, sampled: true })).toBe(`00-${traceId}-${spanId}-01`)
    expect(formatTraceparent({ traceId, spanId, sampled: false })).toBe(`00-${traceId}-${spanId}-00`)
  })

  it('of a later version is read as far as known', () => {
    expect(parseTraceparent(`01-${traceId}-${spanId}-01-more`)?.traceId).toBe(traceId)
  })

  it.each([
    '',
    'rubbish',
    `ff-${traceId}-${spanId}-01`,
    `00-${traceId}-${spanId}-01-more`,
    `00-${traceId.toUpperCase()}-${spanId}-01`,
    `00-${'0'.repeat(32)}-${spanId}-01`,
    `00-${traceId}-${'0'.repeat(16)}-01`,
    `00-${traceId}-${spanId}`,
    `00-${traceId}-${spanId}-01\n`,
  ])('%j is refused', (header) => {
    expect(parseTraceparent(header)).toBeNull()
  })
})

describe('ids', () => {
  it('are well-formed and do not repeat, across refills of the pool', () => {
    const ids = Array.from({ length: 2_000 }, newTraceId)
    expect(new Set(ids).size).toBe(2_000)
    expect(ids.every((id) => /^[0-9a-f]{32}$/u.test(id))).toBe(true)
    expect(newSpanId()).toMatch(/^[0-9a-f]{16}$/u)
  })
})

describe('continueTrace', () => {
  it('stays in the trace of the caller with a span of its own', () => {
    const own = continueTrace(`00-${traceId}-${spanId}-00`)
    expect(own).toMatchObject({ traceId, sampled: false })
    expect(own.spanId).not.toBe(spanId)
  })

  it.each([undefined, 'rubbish'])('starts a trace from %j', (header) => {
    expect(parseTraceparent(formatTraceparent(continueTrace(header)))).not.toBeNull()
  })
})

describe('withSpan', () => {
  afterEach(() => trace.disable())

  it('just runs without an SDK', async () => {
    expect(trace.getTracerProvider()).toBeInstanceOf(ProxyTracerProvider)
    expect(await withSpan('x', { parent: continueTrace(undefined) }, async (span) => span)).toBeNull()
  })

  it('opens a span under the given parent, marks a failure and ends it', async () => {
    await loadTracing()
    const seen: { parent?: string | undefined; status?: SpanStatus; ended: boolean } = { ended: false }
    const span = {
      setStatus: (status: SpanStatus) => {
        seen.status = status
      },
      recordException: () => undefined,
      end: () => {
        seen.ended = true
      },
    } as unknown as Span
    const tracer = {
      startSpan: (_name: string, _options: unknown, parent: Parameters<typeof trace.getSpanContext>[0]) => {
        seen.parent = trace.getSpanContext(parent)?.spanId
        return span
      },
    } as unknown as Tracer
    trace.setGlobalTracerProvider({ getTracer: () => tracer })
    const failure = new Error('no')
    const run = withSpan('x', { parent: { traceId, spanId, sampled: true } }, async () => {
      throw failure
    })
    await expect(run).rejects.toBe(failure)
    expect(seen).toMatchObject({ parent: spanId, status: { code: 2 }, ended: true })
  })
})
