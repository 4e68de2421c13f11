import { isTracing, parseTraceparent, withSpan } from '../telemetry/trace.js'
import type { Handler } from './lane-run.js'
import type { Attempt } from './run.js'

/** In a span of the request's trace, where the process has an OpenTelemetry SDK; else the handler as it is. */
export function traced(
  type: string,
  run: (payload: unknown, attempt: Attempt) => unknown,
): NonNullable<Handler['run']> {
  return (payload, attempt) => {
    const parent = isTracing() ? parseTraceparent(attempt.traceparent) : null
    if (parent === null) return run(payload, attempt)
    const attributes = { 'spillway.operation': attempt.id, 'spillway.attempt': attempt.attempt }
    return withSpan(`run ${type}`, { parent, attributes }, async () => run(payload, attempt))
  }
}
