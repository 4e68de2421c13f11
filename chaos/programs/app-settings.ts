import type { Breakage } from '../breakage.js'
import type { Lane, Temper } from '../workload.js'

/** Handed over in the environment, as JSON. */
export interface AppSettings {
  seed: number
  databaseUrl: string
  sinkOrigin: string
  lanes: readonly Lane[]
  temper: Temper
  leaseMs: number
  directWaitMs: number
  drainMs: number
  concurrency: number
  poolMax: number
  /** False: a worker only. */
  listen: boolean
  breakage: Breakage | null
}

export const appSettingsName = 'CHAOS_APP'
