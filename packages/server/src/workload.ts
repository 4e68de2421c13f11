/**
 * What a workload is to the server. serve.ts loops over them and knows nothing else of them; a workload knows the others only
 * through `offers`. Its settings are in its settings.ts, which config reads.
 */

import type { Alert, AlertName, ObjectiveName } from '@spillway/protocol/wire'
import type { Registry } from 'prom-client'
import type { ErrorForm, FastifyLike, Intake, Mount, OutputOf, SqlModule } from 'spillway/workload'
import type { TSchema } from 'typebox'
import type { Config } from './config/index.js'
import type { CheckState } from './health.js'
import type { Logger } from './logs.js'
import type { Buffers } from './traffic/buffers.js'

export interface Workload {
  readonly name: string
  /** Its tables and functions. */
  readonly sql?: SqlModule
  define(context: WorkloadContext): DefinedWorkload
}

export interface WorkloadContext {
  readonly config: Config
  readonly intake: Intake
  /** Of the store's tables, quoted for SQL. */
  readonly schema: string
  readonly log: Logger
  readonly registry: Registry
  readonly buffers: Buffers
  readonly version: string
  /** Whether callers are authenticated. */
  readonly isAuthenticated: boolean
  /** Whether only this machine can reach the server. */
  readonly isLoopback: boolean
  /** This server's own origin; empty before it listens. */
  origin(): string
  /** Of the workloads that were defined before. */
  readonly offers: Readonly<Partial<Offers>>
}

export interface DefinedWorkload {
  readonly offers?: Partial<Offers>
  /** Its part of /health, by the name of the dependency. */
  readonly checks?: Readonly<Record<string, () => CheckState>>
  /** Operation types whose queue the caller names: a key that is bound to queues is limited to its queues for these. */
  readonly namedTypes?: readonly string[]
  /** Called only in a process with the gateway role. */
  routes?(add: Routes): Promise<void>
  /** Called when the server listens; the store may be unreachable still. */
  start?(): void
  /** Ends waiting requests, takes no more work, and lets running work finish. The intake stops at the same time. */
  drain?(): void | Promise<void>
  /** Nothing runs any more, and the store is still open. */
  close?(): Promise<void>
}

/** What a workload does for others. */
export interface Offers {
  alerts: { report(change: AlertChange): void }
  objectives: { count(objective: ObjectiveName, good: number, total: number): void }
  /** The output of operations, for callers that follow one. */
  outputOf: OutputOf
}

/** A change of an alert, as it is reported. Name and labels identify the alert. */
export interface AlertChange extends Omit<Alert, 'alert_name' | 'timestamp' | 'labels' | 'annotations'> {
  name: AlertName
  labels: Readonly<Record<string, string>>
  /** Figures go here, never into labels: each value would be another alert. */
  annotations: Readonly<Record<string, number | string>>
}

export interface Routes {
  /** A POST that submits an operation: served by the framework and, for ordinary requests, by the short path. */
  mounted(route: MountedRoute): void
  /** Other routes, in a scope of their own. */
  plugin(routes: (app: FastifyLike) => Promise<void>): Promise<void>
}

export interface MountedRoute {
  readonly url: string
  readonly mount: Mount
  /** For the API description; the mount validates by itself. */
  readonly schema: { readonly body: TSchema; readonly [part: string]: unknown }
  /** Default: the server's. */
  readonly bodyLimitBytes?: number
  /** The error format that its clients expect. */
  readonly errorForm?: ErrorForm
}
