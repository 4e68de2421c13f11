/** graphile-worker behind the same handler: one `addJob` per request; and its `addJobs` of a hundred, in process. */
import { Logger, makeWorkerUtils } from 'graphile-worker'
import pg from 'pg'
import { env, envNumber } from './env.js'
import { handlerApp, listen } from './handler-app.js'
import { onMeasure, rowsIn } from './measured.js'

const batch = 100

const pool = new pg.Pool({ connectionString: env('DATABASE_URL'), max: envNumber('POOL_MAX') })
pool.on('error', (fault) => console.error(fault))
const utils = await makeWorkerUtils({
  pgPool: pool,
  logger: new Logger(() => (level, message) => {
    if (level === 'error') console.error(message)
  }),
})
await utils.migrate()

const app = handlerApp(async (submitted) => {
  // Without queueName: a queue per lane would keep order, and cost a row lock more.
  const job = await utils.addJob('bench', submitted)
  // The answer is to be as long as the others', whose id is a UUID.
  return job.id.padStart(36, '0')
})

const specs = Array.from({ length: batch }, (_, n) => ({
  identifier: 'bulk',
  payload: {
    queue: 'bench',
    partition: `lane-${n}`,
    payload: { url: 'http://127.0.0.1/demo/echo', body: { ref: 'x'.repeat(24) } },
  },
}))

onMeasure(app, 'add-jobs', ({ seconds }) =>
  rowsIn(seconds, 2, async () => {
    await utils.addJobs(specs)
    return batch
  }),
)

await listen(app, async () => {
  await utils.release()
  await pool.end()
})
