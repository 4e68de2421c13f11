/**
 * send → handler's end with pg-boss in one process. Settings: `notify` (LISTEN/NOTIFY wakes the workers; else they poll
 * every half second, its least), `localConcurrency`. Completed is taken to be the handler's end: pg-boss
 * reports nothing later, and the difference is small beside its waits.
 */
import { PgBoss } from 'pg-boss'
import { OpenLoop, printReport, readTask } from './latency-load.js'

const task = readTask()
const loop = new OpenLoop(task)
const settings = task.settings as { notify: boolean; localConcurrency: number }
const queue = 'latency'

const boss = new PgBoss({ connectionString: task.url, useListenNotify: settings.notify })
boss.on('error', (error) => process.stderr.write(`pg-boss: ${error.message}\n`))
await boss.start()
await boss.createQueue(queue, { notify: settings.notify })
await boss.work<{ n: number }>(
  queue,
  {
    batchSize: 100,
    localConcurrency: settings.localConcurrency,
    pollingIntervalSeconds: 0.5,
    notifyPollingIntervalSeconds: 0.5,
    burstWhenBatchFull: true,
  },
  async (jobs) => {
    for (const job of jobs) {
      loop.ran(job.data.n)
      loop.completed(job.data.n)
    }
  },
)

const report = await loop.run(async (n) => {
  const id = await boss.send(queue, { n, text: 'x'.repeat(80) })
  if (id === null) throw new Error(`pg-boss did not take submission ${n}`)
})
await boss.stop()
printReport(report)
