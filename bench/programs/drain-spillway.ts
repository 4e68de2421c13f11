/**
 * Drains with a Spillway library worker. Settings: `handler`: `run` (one call per operation, the default) or `apply`
 * (one call per portion of a lane, in one transaction with its completion).
 */
import { createIntake, postgres } from 'spillway'
import Type from 'typebox'
import { asking, DrainCount, type Job, jobOf, preload, printReport, readTask } from './drain-count.js'
import { warnings } from './drain-log.js'

const task = readTask()
const count = new DrainCount(task)
const type = 'drain.noop'
const body = Type.Object({ n: Type.Number(), text: Type.String() })
const lane = (job: Job): [string, string] => ['drain', String(job.n % task.lanes)]

/** Submissions under way at once: enough for full flushes, few enough to wait in line for. */
const submitting = 2_000
/** Room for the million that the scaling section keeps pending; the default is exactly that many. */
const pendingMax = 4_000_000

if (task.stage === 'preload') {
  const intake = await createIntake({ store: postgres({ url: task.url }), role: 'direct', pendingMax, log: warnings })
  const noop = intake.define(type, { body, lane, run: () => undefined })
  const preloaded = await preload(task, submitting, async (numbers) => {
    const answers = await Promise.all(numbers.map((n) => intake.submit(noop, jobOf(n), { respondAsync: true })))
    const refused = answers.find((answer) => answer.kind !== 'queued')
    if (refused !== undefined) throw new Error(`not queued: ${JSON.stringify(refused)}`)
  })
  await intake.close()
  printReport('preloaded', preloaded)
} else {
  const empty = await asking(task.url, 'NOT EXISTS (SELECT FROM spillway.ops)')
  const intake = await createIntake({ store: postgres({ url: task.url }), log: warnings })
  count.started()
  if (task.settings.handler === 'apply') {
    intake.define(type, {
      body,
      lane,
      apply: async (_tx, items) => {
        for (const item of items) count.ran(item.body.n)
        return items.map(() => null)
      },
    })
  } else {
    intake.define(type, { body, lane, run: (job) => count.ran(job.n) })
  }
  const drained = await count.finish(empty.ask)
  await intake.close()
  await empty.end()
  printReport('drained', drained)
}
