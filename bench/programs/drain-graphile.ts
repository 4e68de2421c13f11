/**
 * Drains with graphile-worker. Settings: `concurrentJobs`, `maxPoolSize`, `localQueueSize` (-1: none), `refetchDelayMs`
 * (-1: none), `completeJobBatchDelay` and `failJobBatchDelay` (-1: not batched).
 */
import { Logger, makeWorkerUtils, run } from 'graphile-worker'
import { asking, DrainCount, type Job, jobOf, preload, printReport, readTask } from './drain-count.js'

interface Settings {
  concurrentJobs: number
  maxPoolSize: number
  localQueueSize: number
  refetchDelayMs: number
  completeJobBatchDelay: number
  failJobBatchDelay: number
}

const task = readTask()
const settings = task.settings as unknown as Settings
const count = new DrainCount(task)
const logger = new Logger(() => () => undefined)
const insertPortion = 5_000

if (task.stage === 'preload') {
  const utils = await makeWorkerUtils({ connectionString: task.url, logger })
  await utils.migrate()
  const preloaded = await preload(task, insertPortion, async (numbers) => {
    await utils.addJobs(numbers.map((n) => ({ identifier: 'noop', payload: jobOf(n) })))
  })
  await utils.release()
  printReport('preloaded', preloaded)
} else {
  const empty = await asking(task.url, 'NOT EXISTS (SELECT FROM graphile_worker._private_jobs)')
  count.started()
  const runner = await run({
    preset: {
      worker: {
        connectionString: task.url,
        concurrentJobs: settings.concurrentJobs,
        maxPoolSize: settings.maxPoolSize,
        completeJobBatchDelay: settings.completeJobBatchDelay,
        failJobBatchDelay: settings.failJobBatchDelay,
        logger,
        ...(settings.localQueueSize > 0 && {
          localQueue: {
            size: settings.localQueueSize,
            ...(settings.refetchDelayMs >= 0 && { refetchDelay: { durationMs: settings.refetchDelayMs } }),
          },
        }),
      },
    },
    noHandleSignals: true,
    parsedCronItems: [],
    taskList: { noop: (payload) => count.ran((payload as Job).n) },
  })
  const drained = await count.finish(empty.ask)
  await runner.stop()
  await empty.end()
  printReport('drained', drained)
}
