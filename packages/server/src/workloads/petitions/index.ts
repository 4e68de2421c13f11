/** Petitions: exact capacity and rate, witnessed. Uses the same public API as a user's route (docs/guides/petitions.md). */
import { PetitionReceipt, Problem, Queued, SubmitHeaders, SubmitPetition } from '@spillway/protocol/schema'
import { mountOf } from 'spillway/workload'
import type { Workload } from '../../workload.js'
import type { PetitionsContext } from './context.js'
import { petitionsSql } from './generated/sql.js'
import { createPetitionMetrics } from './metrics.js'
import { Overview } from './overview.js'
import { changedPetitions, forgetBlocks } from './petitions.js'
import { petitionRoutes } from './routes.js'
import { definePetition, petitionPrefixes } from './submission.js'
import { Watch } from './watch.js'

const forgetEveryMs = 60_000

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
    const context: PetitionsContext = { intake, schema, log, isAuthenticated, settings: config.petitions, metrics }
    const definition = definePetition(context)
    const watch = new Watch({ changed: (waiting) => changedPetitions(context, waiting) })
    intake.onNotice('petition', (id) => watch.notice(id))
    const overview = new Overview(context)
    const look = (): void => overview.notice()
    intake.onNotice('petition_overflow', look, look)
    const stopSweep = intake.sweeps.add({
      name: 'petitions',
      everyMs: forgetEveryMs,
      batch: () => forgetBlocks(context),
    })
    return {
      routes: async (add) => {
        const submit = mountOf(intake, definition)
        for (const url of petitionPrefixes) add.mounted({ url, mount: submit, schema: submitSchema })
        await add.plugin(petitionRoutes({ ...context, watch, pageBytesMax: config.server.pageBytesMax }))
      },
      drain: () => {
        void stopSweep()
        overview.stop()
        watch.close()
      },
    }
  },
}
