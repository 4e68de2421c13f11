/** Petitions: exact capacity and rate, witnessed. Uses the same public API as a user's route (docs/guides/petitions.md). */
import { PetitionReceipt, Problem, Queued, SubmitHeaders, SubmitPetition } from '@spillway/protocol/schema'
import type { PetitionReceipt as Receipt } from '@spillway/protocol/wire'
import { type Definition, type Intake, mountOf } from 'spillway/workload'
import type { Config } from '../../config/index.js'
import type { Workload } from '../../workload.js'
import { petitionsSql } from './generated/sql.js'
import { createPetitionMetrics } from './metrics.js'
import type { PetitionsOptions, PetitionsSettings } from './options.js'
import { Overview } from './overview.js'
import { Petitions } from './petitions.js'
import { petitionRoutes } from './routes.js'
import { definePetition, petitionPrefixes, type SubmitBody } from './submission.js'
import { Watch } from './watch.js'

/** A plain schema: the mount builds the answer, so the route does not type it. */
const submitSchema = {
  tags: ['petitions'],
  summary: 'Submit a petition',
  headers: SubmitHeaders,
  body: SubmitPetition,
  response: { 201: PetitionReceipt, 202: Queued, '4xx': Problem, '5xx': Problem },
}

export const petitions: Workload = {
  name: 'petitions',
  sql: petitionsSql,
  define: ({ config, intake, schema, log, registry, isAuthenticated }) => {
    const metrics = createPetitionMetrics(registry)
    const settings = settingsOf(config.petitions)
    const workload = definePetitions(intake, { settings, schema, isAuthenticated, log, metrics })
    return {
      routes: async (add) => {
        const submit = mountOf(intake, workload.definition)
        for (const url of petitionPrefixes) add.mounted({ url, mount: submit, schema: submitSchema })
        await add.plugin(petitionRoutes(intake, workload, config.server.pageBytesMax))
      },
      drain: () => workload.close(),
    }
  },
}

function settingsOf(petitions: Config['petitions']): PetitionsSettings {
  return {
    ...petitions,
    queueCacheTtlMs: petitions.queueCacheTtl * 1_000,
    typePerHour: {
      GENERAL: petitions.rateGeneralPerHour,
      CESSATION: petitions.rateCessationPerHour,
      GRIEVANCE: petitions.rateGrievancePerHour,
      COLLABORATION: petitions.rateCollaborationPerHour,
      META: petitions.rateMetaPerHour,
    },
  }
}

const forgetEveryMs = 60_000

export interface PetitionsWorkload {
  definition: Definition<SubmitBody, Receipt>
  petitions: Petitions
  watch: Watch
  isAuthenticated: boolean
  close(): void
}

function definePetitions(intake: Intake, options: PetitionsOptions): PetitionsWorkload {
  const definition = definePetition(intake, options)
  const petitions = new Petitions(intake, options)
  const watch = new Watch({ changed: (waiting) => petitions.changed(waiting) })
  intake.onNotice('petition', (id) => watch.notice(id))
  const overview = new Overview(intake, petitions, options)
  const look = (): void => overview.notice()
  intake.onNotice('petition_overflow', look, look)
  overview.start()
  const stopSweep = intake.sweeps.add({
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
