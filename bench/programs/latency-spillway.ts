/**
 * Accept → completed in one process: a library intake that accepts and works. Settings: `path`:
 *
 * - `queued`: `respondAsync`, so that every operation goes through the queue. Completed: the moment this process learns
 *   that the settling transaction has committed. The library notifies its own waiters (`waiters.hint`), which costs
 *   nothing; asking for each ticket would be a query more per operation.
 * - `waited`: the same with `waitMs`. Completed: `submit` answers with the result, as a caller sees it.
 * - `direct`: run at once. Completed: `submit` answers with the result, which it does after the commit.
 */
import { postgres } from 'spillway'
import { openIntake } from 'spillway/workload'
import Type from 'typebox'
import { warnings } from './drain-log.js'
import { OpenLoop, printReport, readTask } from './latency-load.js'

const task = readTask()
const loop = new OpenLoop(task)
const path = task.settings.path as 'queued' | 'waited' | 'direct'
const waitMs = 10_000
const askAfterMs = 1_000

const intake = await openIntake({ store: postgres({ url: task.url }), log: warnings })
const numbers = new Map<string, number>()
const noop = intake.define('latency.noop', {
  body: Type.Object({ n: Type.Number(), text: Type.String() }),
  lane: (job) => ['latency', String(job.n % task.lanes)],
  run: (job, { id }) => {
    if (path === 'queued') numbers.set(id, job.n)
    loop.ran(job.n)
  },
})

let asking: NodeJS.Timeout | undefined
if (path === 'queued') {
  const { waiters } = intake
  const hint = waiters.hint.bind(waiters)
  waiters.hint = (id) => {
    seen(id)
    hint(id)
  }
  // If the answer of a settlement is lost, there is no notification, and waiters have to poll. So do we, less often:
  // operations found this way were completed earlier.
  asking = setInterval(async () => {
    const late = [...numbers].filter(([, n]) => loop.ageMs(n) > askAfterMs).map(([id]) => id)
    if (late.length === 0) return
    const tickets = await intake.store.finished(late).catch((fault: unknown) => {
      warnings.warn({ err: fault }, 'could not ask for what is late; asked again')
      return []
    })
    for (const { id } of tickets) seen(id)
  }, askAfterMs)
}

function seen(id: string): void {
  const n = numbers.get(id)
  if (n === undefined) return
  numbers.delete(id)
  loop.completed(n)
}

const options = {
  queued: { respondAsync: true },
  waited: { respondAsync: true, waitMs },
  // Where its lane is busy it is queued, and waited for.
  direct: { waitMs },
}[path]
const expected = path === 'queued' ? 'queued' : 'done'

const report = await loop.run(async (n) => {
  const answer = await intake.submit(noop, { n, text: 'x'.repeat(80) }, options)
  if (answer.kind === 'refused') return loop.refused(n)
  if (answer.kind !== expected) throw new Error(`submission ${n} was answered ${JSON.stringify(answer)}`)
  if (path !== 'queued') loop.completed(n)
})
clearInterval(asking)
await intake.close()
printReport(report)
