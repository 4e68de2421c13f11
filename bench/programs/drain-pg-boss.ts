/**
 * Drains with pg-boss. Settings: `batchSize`, `localConcurrency`, `pool` (connections), `partition` (a table of its own
 * for the queue).
 */
import { PgBoss } from 'pg-boss'
import { asking, DrainCount, type Job, jobOf, preload, printReport, readTask } from './drain-count.js'

interface Settings {
  batchSize: number
  localConcurrency: number
  pool: number
  partition: boolean
}

const task = readTask()
const settings = task.settings as unknown as Settings
const count = new DrainCount(task)
const queue = 'drain'
const insertPortion = 5_000

const boss = new PgBoss({ connectionString: task.url, max: settings.pool })
// Errors of its background work; those of the drain itself show as missing jobs.
boss.on('error', (error) => process.stderr.write(`pg-boss: ${error.message}\n`))
await boss.start()

if (task.stage === 'preload') {
  await boss.createQueue(queue, { partition: settings.partition })
  const preloaded = await preload(task, insertPortion, async (numbers) => {
    await boss.insert(
      queue,
      numbers.map((n) => ({ data: jobOf(n) })),
    )
  })
  await boss.stop()
  printReport('preloaded', preloaded)
} else {
  const empty = await asking(task.url, `NOT EXISTS (SELECT FROM pgboss.job WHERE state < 'completed')`)
  count.started()
  await boss.work<Job>(
    queue,
    {
      batchSize: settings.batchSize,
      localConcurrency: settings.localConcurrency,
      pollingIntervalSeconds: 0.5,
      // Without it a worker waits half a second between two portions.
      burstWhenBatchFull: true,
    },
    async (jobs) => {
      for (const job of jobs) count.ran(job.data.n)
    },
  )
  // Its workers end after they have completed what they hold. Asking instead would scan the whole table, many times.
  const drained = await count.finish(empty.ask, () => boss.offWork(queue))
  await boss.stop()
  await empty.end()
  printReport('drained', drained)
}
