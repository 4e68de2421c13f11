/**
 * Exports for our own workloads and the ready server, beyond the public API. For packages of this repository: it may change
 * at any time.
 */

import './http/typebox.js'

export { codeOf, retryConflicts } from './accept/conflict-retry.js'
export { Flush } from './accept/flush.js'
export { digestUuid, isUuid, type LaneName, laneOf, newOperationId } from './core/ids.js'
export type { StatusReport } from './core/operation-status.js'
export { FailOperation, LeaveOperation, OperationAborted, RetryOperation } from './core/outcome.js'
export type { IntakeLog } from './core/settings.js'
export { claimsQueued, intakeDefaults } from './core/settings.js'
export type { ConnectionPool } from './fleet/connection-pool.js'
export { capacity } from './gates/capacity.js'
export type { Gate, Permit } from './gates/gate.js'
export { halt } from './gates/halt.js'
export { pressure } from './gates/pressure.js'
export { clockMinuteRate, rate } from './gates/rate.js'
export { bodyFormFault, bodyTooLarge } from './http/body-form.js'
export { CarriedJson, carry, each, jsonOf, memberTexts, withoutRepeated } from './http/carried-json.js'
export {
  answerClientFault,
  answerOf,
  type ConnectionCap,
  capConnections,
  discardRest,
  goneSignal,
  guardRequests,
  refuseTunnels,
  whenGone,
} from './http/connections.js'
export { mountedRoute } from './http/fastify-binding.js'
export { type FastifyLike, ticketRoutes } from './http/fastify-tickets.js'
export { answerFault, faultProblem, internalFault, ProblemError } from './http/faults.js'
export { pointerStep, presentablePointer, type RequestFault } from './http/json-pointer.js'
export {
  appliedPreferences,
  type Entered,
  type Entry,
  failureAsResult,
  type Gone,
  type Mount,
  type MountHooks,
  mountAdmission,
  mountOf,
  type Parsed,
  type Preferences,
  parseIdempotencyKey,
  parsePreferences,
  rateHeaders,
  refusalWire,
  ticketPath,
  toWire,
  type Wire,
} from './http/mount.js'
export type { OutputOf } from './http/operation-stream.js'
export { operationView } from './http/operation-view.js'
export {
  cursorOf,
  fitPage,
  invalidCursor,
  type Page,
  type PageBounds,
  type Pagination,
  paginationOf,
  placeOf,
} from './http/pages.js'
export {
  type ErrorForm,
  encodeProblem,
  headerProblem,
  type Problem,
  pathOf,
  sendProblem,
  urlProblem,
} from './http/problem.js'
export { isReservedQueue, mayUseQueue, reservedQueuePrefix } from './http/queue-names.js'
export { refuseUntilReady } from './http/readiness.js'
export { isUnstorable, parseStrictJson } from './http/strict-json.js'
export { type Trace, traceFor, traceIdOf } from './http/trace.js'
export { compileValidator, validatorCompiler } from './http/validation.js'
export { type Role, roles } from './http/viewer.js'
export type { Admission, AdmissionAnswer } from './intake/admission.js'
export { type Answer, queuedBody } from './intake/answer.js'
export type {
  Definition,
  EffectItem,
  IntakeRequest,
  IntakeUser,
  Rejection,
  RunContext,
  SqlEffect,
} from './intake/define.js'
export { Intake } from './intake/intake.js'
export { openIntake } from './intake/open-intake.js'
export type { Refusal } from './intake/refusal.js'
export type { Submission, SubmitAllOptions, SubmitOptions } from './intake/submission.js'
export { canonicalJson } from './ledger/canonical.js'
export type { Verification } from './ledger/ledger.js'
export type { SweptBatch } from './maintenance/sweeps.js'
export {
  type CounterChild,
  CounterFamily,
  type GaugeChild,
  type GaugeFamily,
  type HistogramChild,
  HistogramFamily,
  type MetricRegistry,
  otherLabel,
  register,
} from './metrics/families.js'
export {
  type AttemptOutcome,
  createMetrics,
  durationBuckets,
  type OperationCount,
  type PoolState,
} from './metrics/metrics.js'
export { Door } from './pressure/door.js'
export { LatencyWindow } from './pressure/latency-window.js'
export { LevelHold } from './pressure/level-hold.js'
export { RouterPressure } from './pressure/router-pressure.js'
export { type CutRows, cutRows, leftOutSql, listedErrorSql, listedSql, pageSql } from './store/page-sql.js'
export type { LedgerRow, Tx } from './store/port.js'
export { openPool } from './store/postgres/connect.js'
export { coreSql } from './store/postgres/generated/sql.js'
export { MigrationError, migrate, pendingSteps, readRecord, type SqlModule } from './store/postgres/migrate.js'
export { findReach, type Reach } from './store/postgres/reach.js'
export { isPinned } from './store/postgres/session.js'
export { postgresStore } from './store/postgres/store.js'
export { DueRing } from './streams/due-ring.js'
export type { StreamWriter } from './streams/log-writer.js'
export { LogWriter } from './streams/log-writer.js'
export type { LogName, StreamEntry, StreamRegistry } from './streams/port.js'
export {
  type Append,
  type Cursor,
  type EndKind,
  LogFault,
  type StreamKey,
  type StreamLog,
  type StreamRecord,
} from './streams/port.js'
export type { Follower } from './streams/relay.js'
export { Relay } from './streams/relay.js'
export { type Periodic, periodic } from './time/periodic.js'
export { withDeadline } from './time/with-deadline.js'
