/** A thousand jobs in one call: pg-boss's `insert`. */
import { PgBoss } from 'pg-boss'
import { bulkBodies, bulkSize } from './bulk-body.js'
import { env, envNumber } from './env.js'
import { bareApp, listen } from './handler-app.js'
import { onMeasure, rowsIn } from './measured.js'

const boss = new PgBoss({
  connectionString: env('DATABASE_URL'),
  max: envNumber('POOL_MAX'),
  // Accepting only: maintenance and cron would be measured along.
  supervise: false,
  schedule: false,
})
boss.on('error', (fault) => console.error(fault))
await boss.start()
await boss.createQueue('bulk')

const app = bareApp()
onMeasure(app, 'insert', ({ seconds }) =>
  rowsIn(seconds, 1, async () => {
    await boss.insert(
      'bulk',
      bulkBodies.map((data) => ({ data })),
    )
    return bulkSize
  }),
)

await listen(app, () => boss.stop({ graceful: false }))
