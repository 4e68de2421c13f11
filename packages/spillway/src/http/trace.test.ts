import { describe, expect, it } from 'vitest'
import { traceFor, traceIdOf } from './trace.js'

const traceId = '4bf92f3577b34da6a3ce929d0e0e4736'
const valid = `00-${traceId}-00f067aa0ba902b7-00`

describe('trace of a request', () => {
  it('keeps the trace id and sampling of a valid traceparent, with a span of its own', () => {
    expect(traceIdOf(valid)).toBe(traceId)
    const trace = traceFor(traceId, valid)
    expect(trace.traceparent).toMatch(new RegExp(`^00-${traceId}-[0-9a-f]{16}-00$`))
    expect(trace.traceparent).not.toContain('00f067aa0ba902b7')
  })

  it.each([undefined, '', 'nonsense', `ff-${traceId}-00f067aa0ba902b7-01`])('makes a new id for %j', (header) => {
    const made = traceIdOf(header)
    expect(made).toMatch(/^[0-9a-f]{32}$/)
    expect(traceIdOf(header)).not.toBe(made)
    expect(traceFor(made, header).traceparent).toMatch(new RegExp(`^00-${made}-[0-9a-f]{16}-01$`))
  })
})
