export { type CounterChild, CounterFamily, type HistogramChild, HistogramFamily } from './families.js'
export { createLogger, describeError, type Logger } from './logs.js'
export { type AttemptOutcome, createMetrics, type Metrics, type OperationCount, type PoolState } from './metrics.js'
export {
  continueTrace,
  formatTraceparent,
  newSpanId,
  newTraceId,
  parseTraceparent,
  type TraceContext,
  withSpan,
} from './trace.js'
