/** The public surface. What is not exported here may change at any time. */
import type { IntakeApi, IntakeOptions } from './intake-api.js'

export type { Permit } from './gates/gate.js'
export {
  type CapacityOptions,
  type ConnectionsOptions,
  capacity,
  connections,
  type Gate,
  type HaltOptions,
  halt,
  type PressureLevel,
  type PressureOptions,
  pressure,
  type RateOptions,
  rate,
} from './gates/index.js'
export type { FastifyRoute } from './http/fastify-binding.js'
export type { FetchHandler, FetchInfo } from './http/fetch-binding.js'
export type { TicketRoutesOptions } from './http/operations-routes.js'
export type { Viewer } from './http/viewer.js'
export type { IntakeApi, IntakeOptions, SubmitAllOptions, SubmitOptions } from './intake-api.js'
export { Ledger, type Verification, type WitnessedEvent } from './ledger/ledger.js'
export type { LaneName } from './operations/lane.js'
export { FailOperation, LeaveOperation, OperationAborted, RetryOperation } from './operations/outcome.js'
export type { Answer } from './pipeline/answer.js'
export type { ConnectionPool, PoolOptions } from './pipeline/connection-pool.js'
export type {
  ApplyItem,
  ApplyOptions,
  DefineOptions,
  Definition,
  EffectItem,
  IntakeRequest,
  IntakeUser,
  LimitedItem,
  Rejection,
  RunContext,
  RunOptions,
  SqlEffect,
} from './pipeline/define.js'
export type { Refusal } from './pipeline/refusal.js'
export type { IntakeLog, IntakeSettings } from './pipeline/settings.js'
export type { Standing } from './pipeline/standing.js'
export { type EmbeddedOptions, embedded } from './store/embedded-store.js'
export type { CancelOutcome, LedgerRow, Store, Tx } from './store/port.js'
export { type PostgresOptions, postgresStore as postgres } from './store/postgres/store.js'
export type { MetricRegistry } from './telemetry/families.js'
export { createMetrics, type Metrics } from './telemetry/metrics.js'

/** An intake on a store: `createIntake({ store: postgres({ url }) })` or `{ store: embedded() }`. */
export async function createIntake(options: IntakeOptions): Promise<IntakeApi> {
  const { openIntake } = await import('./intake-api.js')
  return openIntake(options)
}
