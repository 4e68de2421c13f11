/** The public API. Anything not exported here may change at any time. */
import type { Intake as WholeIntake } from './intake/intake.js'
import type { IntakeOptions } from './intake/open-intake.js'

export type { LaneName } from './core/ids.js'
export { OptionError } from './core/options.js'
export { FailOperation, LeaveOperation, OperationAborted, RetryOperation } from './core/outcome.js'
export type { IntakeLog, IntakeSettings } from './core/settings.js'
export type { ConnectionPool } from './fleet/connection-pool.js'
export { type CapacityOptions, capacity } from './gates/capacity.js'
export { connections } from './gates/connections.js'
export type { Gate, Permit } from './gates/gate.js'
export { halt } from './gates/halt.js'
export { pressure } from './gates/pressure.js'
export { type RateOptions, rate } from './gates/rate.js'
export type { FastifyRoute } from './http/fastify-binding.js'
export type { FetchHandler } from './http/fetch-binding.js'
export type { FetchTickets } from './http/fetch-tickets.js'
export type { NodeHandler } from './http/node-binding.js'
export type { NodeTickets } from './http/node-tickets.js'
export type { Viewer } from './http/viewer.js'
export type { Admission, AdmissionAnswer } from './intake/admission.js'
export type { Answer } from './intake/answer.js'
export type {
  ApplyItem,
  DefineOptions,
  Definition,
  IntakeRequest,
  IntakeUser,
  Rejection,
  RunContext,
  SqlEffect,
} from './intake/define.js'
export type { IntakeOptions } from './intake/open-intake.js'
export type { Refusal } from './intake/refusal.js'
export type { SubmitOptions } from './intake/submission.js'
export type { OperationReport } from './intake/tickets.js'
export type { Verification } from './ledger/ledger.js'
export type { MetricRegistry } from './metrics/families.js'
export { createMetrics, type Metrics } from './metrics/metrics.js'
export { type EmbeddedOptions, embedded } from './store/embedded-store.js'
export type { LedgerRow, Store, Tx } from './store/port.js'
export { type PostgresOptions, postgresStore as postgres } from './store/postgres/store.js'

/** What `createIntake` returns. All other members of the class are for our own packages and may change at any time. */
export type Intake = Pick<
  WholeIntake,
  | 'define'
  | 'admission'
  | 'route'
  | 'fetch'
  | 'express'
  | 'node'
  | 'guard'
  | 'ticketRoutes'
  | 'expressTickets'
  | 'nodeTickets'
  | 'fetchTickets'
  | 'submit'
  | 'submitAll'
  | 'submitMany'
  | 'enqueue'
  | 'enqueueMany'
  | 'schedule'
  | 'tickets'
  | 'deadLetters'
  | 'lanes'
  | 'forgetKey'
  | 'halt'
  | 'resume'
  | 'releaseCapacity'
  | 'transaction'
  | 'read'
  | 'statements'
  | 'ledger'
  | 'on'
  | 'onNotice'
  | 'pool'
  | 'instance'
  | 'refresh'
  | 'close'
  | 'metrics'
>

/** An intake on a store: `createIntake({ store: postgres({ url }) })` or `{ store: embedded() }`. */
export async function createIntake(options: IntakeOptions): Promise<Intake> {
  const { openIntake } = await import('./intake/open-intake.js')
  return openIntake(options)
}
