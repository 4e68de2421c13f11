/** Drains with BullMQ on the Redis of `url`. Settings: `concurrency`. */
import { Queue, Worker } from 'bullmq'
import { DrainCount, jobOf, preload, printReport, readTask } from './drain-count.js'

const task = readTask()
const settings = task.settings as unknown as { concurrency: number }
const count = new DrainCount(task)
const { hostname, port } = new URL(task.url)
const connection = { host: hostname, port: Number(port || 6379), maxRetriesPerRequest: null }
const queue = new Queue('drain', { connection })
const insertPortion = 2_000

if (task.stage === 'preload') {
  await queue.obliterate({ force: true })
  const preloaded = await preload(task, insertPortion, async (numbers) => {
    await queue.addBulk(numbers.map((n) => ({ name: 'noop', data: jobOf(n) })))
  })
  await queue.close()
  printReport('preloaded', preloaded)
} else {
  count.started()
  const worker = new Worker('drain', async (job) => count.ran(job.data.n), {
    connection,
    concurrency: settings.concurrency,
  })
  worker.on('error', (error) => process.stderr.write(`BullMQ: ${error.message}\n`))
  const drained = await count.finish(async () => {
    const left = await queue.getJobCounts('wait', 'active', 'prioritized', 'delayed', 'failed')
    return Object.values(left).every((n) => n === 0)
  })
  await worker.close()
  await queue.close()
  printReport('drained', drained)
}
