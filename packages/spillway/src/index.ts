/** The public API. Anything not exported here may change at any time. */
import type { IntakeApi, IntakeOptions } from './intake/intake-api.js'

export type { LaneName } from './core/lane.js'
export type { OperationReport } from './core/operation-status.js'
export { FailOperation, LeaveOperation, OperationAborted, RetryOperation } from './core/outcome.js'
export type { IntakeLog, IntakeSettings } from './core/settings.js'
export type { ConnectionPool, PoolOptions } from './fleet/connection-pool.js'
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
export type { Answer } from './intake/answer.js'
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
} from './intake/define.js'
export type { IntakeApi, IntakeOptions, SubmitAllOptions, SubmitOptions } from './intake/intake-api.js'
export type { Refusal } from './intake/refusal.js'
export { Ledger, type Verification, type WitnessedEvent } from './ledger/ledger.js'
export type { MetricRegistry } from './metrics/families.js'
export { createMetrics, type Metrics } from './metrics/metrics.js'
export { type EmbeddedOptions, embedded } from './store/embedded-store.js'
export type { CancelOutcome, LedgerRow, Store, Tx } from './store/port.js'
export { type PostgresOptions, postgresStore as postgres } from './store/postgres/store.js'

/** An intake on a store: `createIntake({ store: postgres({ url }) })` or `{ store: embedded() }`. */
export async function createIntake(options: IntakeOptions): Promise<IntakeApi> {
  const { openIntake } = await import('./intake/intake-api.js')
  return openIntake(options)
}
