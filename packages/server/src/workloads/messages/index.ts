/** Messages: a partitioned queue behind the operation queue's load management (contract §4). */
import type { IntakeApi } from 'spillway/workload'
import { markOf } from './arrivals.js'
import { Consume } from './consume.js'
import { Maintenance } from './maintenance.js'
import { MessageSizes } from './message-sizes.js'
import type { MessagesOptions } from './options.js'
import { Push } from './push.js'
import { Queues } from './queues.js'
import { Seal } from './seal.js'
import { messageSweep, sweepEveryMs, sweepStore } from './sweeper.js'
import { Transactions } from './transaction.js'

export { messageAdministrationRoutes } from './administration-routes.js'
export type { MessagesOptions } from './options.js'
export { pushType } from './push.js'
export { pushMount } from './push-mount.js'
export { messageRoutes } from './routes.js'

export interface MessagesWorkload {
  intake: IntakeApi
  options: MessagesOptions
  /** Null: there is no key. */
  seal: Seal | null
  queues: Queues
  push: Push
  consume: Consume
  transactions: Transactions
  maintenance: Maintenance
  /** Wakes waiting pops of this queue in this process. */
  wake(queue: string): void
  close(): Promise<void>
}

export function defineMessages(intake: IntakeApi, options: MessagesOptions): MessagesWorkload {
  const seal = options.encryptionKey === null ? null : new Seal(options.encryptionKey)
  const queues = new Queues(intake, options.schema)
  const sizes = new MessageSizes()
  const push = new Push(intake, options, queues, seal, sizes)
  const consume = new Consume(intake, options, seal, sizes)
  intake.onNotice(
    'mq',
    (marks) => consume.arrivals.came(new Set(marks.split(','))),
    () => consume.arrivals.missed(),
  )
  const batch = messageSweep(sweepStore(intake, options.schema))
  const stopSweep = intake.core.sweeps.add({ name: 'messages', everyMs: sweepEveryMs, batch })
  return {
    intake,
    options,
    seal,
    queues,
    push,
    consume,
    transactions: new Transactions(intake, options, push, consume),
    maintenance: new Maintenance(intake, options.schema, push.definition),
    wake: (queue) => consume.arrivals.came(new Set([markOf(queue)])),
    close: async () => {
      consume.close()
      await stopSweep()
    },
  }
}
