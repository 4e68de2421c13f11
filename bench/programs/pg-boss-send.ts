/** pg-boss behind the same handler: one `send` per request; and its `insert` of a hundred, in process. */
import { PgBoss } from 'pg-boss'
import { env, envNumber } from './env.js'
import { handlerApp, listen } from './handler-app.js'
import { onMeasure, rowsIn } from './measured.js'

const queue = 'bench'
const batch = 100

const boss = new PgBoss({
  connectionString: env('DATABASE_URL'),
  max: envNumber('POOL_MAX'),
  // Accepting only: maintenance and cron would be measured along.
  supervise: false,
  schedule: false,
})
boss.on('error', (fault) => console.error(fault))
await boss.start()
await boss.createQueue(queue)
await boss.createQueue('bulk')

const app = handlerApp(async (submitted) => {
  const id = await boss.send(queue, submitted)
  if (id === null) throw new Error('pg-boss did not take the job')
  return id
})

const jobs = Array.from({ length: batch }, (_, n) => ({
  data: {
    queue,
    partition: `lane-${n}`,
    payload: { url: 'http://127.0.0.1/demo/echo', body: { ref: 'x'.repeat(24) } },
  },
}))

onMeasure(app, 'insert', ({ seconds }) =>
  rowsIn(seconds, 2, async () => {
    await boss.insert('bulk', jobs)
    return batch
  }),
)

await listen(app, () => boss.stop({ graceful: false }))
