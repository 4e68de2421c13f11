import type { Config } from '../../config/index.js'
import type { WorkloadContext } from '../../workload.js'
import type { createPetitionMetrics } from './metrics.js'

/** What all parts of the workload use. */
export interface PetitionsContext extends Pick<WorkloadContext, 'intake' | 'schema' | 'log' | 'isAuthenticated'> {
  settings: Config['petitions']
  metrics: ReturnType<typeof createPetitionMetrics>
}
