import { isTracing, parseTraceparent, withSpan } from '../metrics/trace.js'
import type { Attempt } from './attempt.js'
import type { Handler } from './lane-runner.js'

/** In a span of the request's trace, if the process has an OpenTelemetry SDK; else the handler unchanged. */
export function traced(
  type: string,
  run: (body: unknown, attempt: Attempt, text: string) => unknown,
): NonNullable<Handler['run']> {
  return (body, attempt, text) => {
    const parent = isTracing() ? parseTraceparent(attempt.traceparent) : null
    if (parent === null) return run(body, attempt, text)
    const attributes = { 'spillway.operation': attempt.id, 'spillway.attempt': attempt.attempt }
    return withSpan(`run ${type}`, { parent, attributes }, async () => run(body, attempt, text))
  }
}
