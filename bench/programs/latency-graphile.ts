/**
 * addJob → completed with graphile-worker in one process, woken by LISTEN/NOTIFY. Settings: `concurrentJobs`,
 * `maxPoolSize`. It does not report when a completion is durable (`job:complete` is emitted before), so the statement that
 * removes the job is watched on its way through the pool.
 */
import { Logger, run } from 'graphile-worker'
import pg from 'pg'
import { OpenLoop, printReport, readTask } from './latency-load.js'

const task = readTask()
const loop = new OpenLoop(task)
const settings = task.settings as { concurrentJobs: number; maxPoolSize: number }
const numbers = new Map<string, number>()

const pool = new pg.Pool({ connectionString: task.url, max: settings.maxPoolSize })
pool.on('error', (fault) => process.stderr.write(`${fault.message}\n`))
pool.on('connect', (client) => {
  const query = client.query.bind(client) as (...args: unknown[]) => unknown
  client.query = ((...args: unknown[]) => {
    const answer = query(...args)
    const [config] = args as [{ name?: string; values?: unknown[] }]
    if (config?.name?.startsWith('complete_job') === true) {
      const ids = [config.values?.[0]].flat()
      void (answer as Promise<unknown>).then(() => {
        for (const id of ids) {
          const n = numbers.get(String(id))
          numbers.delete(String(id))
          if (n !== undefined) loop.completed(n)
        }
      })
    }
    return answer
  }) as typeof client.query
})

const runner = await run({
  pgPool: pool,
  preset: {
    worker: { concurrentJobs: settings.concurrentJobs, logger: new Logger(() => () => undefined) },
  },
  noHandleSignals: true,
  parsedCronItems: [],
  taskList: {
    noop: (payload, { job }) => {
      const { n } = payload as { n: number }
      numbers.set(job.id, n)
      loop.ran(n)
    },
  },
})

const report = await loop.run(async (n) => {
  await runner.addJob('noop', { n, text: 'x'.repeat(80) })
})
await runner.stop()
await pool.end()
printReport(report)
