/** Petitions: exact capacity and rate, witnessed. Uses the same public API as a user's route (contract §3). */
import type { PetitionReceipt } from '@spillway/protocol/wire'
import type { Definition, IntakeApi } from 'spillway/workload'
import type { PetitionsOptions } from './options.js'
import { Overview } from './overview.js'
import { Petitions } from './petitions.js'
import { definePetition, type SubmitBody } from './submission.js'
import { Watch } from './watch.js'

export type { PetitionsOptions } from './options.js'
export { petitionRoutes } from './routes.js'
export { petitionPrefixes } from './submission.js'

const forgetEveryMs = 60_000

export interface PetitionsWorkload {
  definition: Definition<SubmitBody, PetitionReceipt>
  petitions: Petitions
  watch: Watch
  isAuthenticated: boolean
  close(): void
}

export function definePetitions(intake: IntakeApi, options: PetitionsOptions): PetitionsWorkload {
  const definition = definePetition(intake, options)
  const petitions = new Petitions(intake, options)
  const watch = new Watch({ changed: (waiting) => petitions.changed(waiting) })
  intake.onNotice('petition', (id) => watch.notice(id))
  const overview = new Overview(intake, petitions, options)
  const look = (): void => overview.notice()
  intake.onNotice('petition_overflow', look, look)
  overview.start()
  const stopSweep = intake.core.sweeps.add({
    name: 'petitions',
    everyMs: forgetEveryMs,
    batch: () => petitions.forgetBlocks(),
  })
  return {
    definition,
    petitions,
    watch,
    isAuthenticated: options.isAuthenticated,
    close: () => {
      void stopSweep()
      overview.stop()
      watch.close()
    },
  }
}
