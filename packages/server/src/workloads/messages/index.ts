/** Messages: a partitioned queue behind the operation queue's load management (docs/guides/messages.md). */
import { PushRequest, SubmitHeaders } from '@spillway/protocol/schema'
import { limits } from '@spillway/protocol/wire'
import type { Intake } from 'spillway/workload'
import type { Workload } from '../../workload.js'
import { type Maintenance, maintenanceOf } from './admin/maintenance.js'
import { messageAdministrationRoutes } from './admin/routes.js'
import { markOf } from './consume/arrivals.js'
import { Consume } from './consume/consume.js'
import { messageRoutes } from './consume/routes.js'
import { messagesSql } from './generated/sql.js'
import { MessageSizes } from './message-sizes.js'
import { createMessageMetrics } from './metrics.js'
import type { MessagesOptions } from './options.js'
import { Push, pushType } from './push/push.js'
import { pushMount } from './push-mount.js'
import { Queues } from './queues.js'
import { Seal } from './seal.js'
import { messageSweep, sweepEveryMs, sweepStore } from './sweeper.js'

const pushSchema = {
  tags: ['messages'],
  summary: 'Push messages: 201 when all are stored, 202 when some have to wait their turn',
  headers: SubmitHeaders,
  body: PushRequest,
}

export const messages: Workload = {
  name: 'messages',
  sql: messagesSql,
  define: ({ config, intake, schema, log, registry, buffers }) => {
    const { encryptionKey, groupsMax, pushPendingMax } = config.messages
    const workload = defineMessages(intake, {
      schema,
      pendingMax: pushPendingMax,
      groupsMax,
      encryptionKey: encryptionKey === null ? null : Buffer.from(encryptionKey, 'hex'),
      pageBytesMax: config.server.pageBytesMax,
      buffers,
      log,
      metrics: createMessageMetrics(registry),
    })
    return {
      namedTypes: [pushType],
      routes: async (add) => {
        add.mounted({
          url: '/api/v1/push',
          mount: pushMount(intake, workload.push),
          schema: pushSchema,
          bodyLimitBytes: Math.max(limits.pushBodyBytes, config.server.bodyLimitBytes),
          errorForm: true,
        })
        await add.plugin(messageRoutes(workload))
        await add.plugin(messageAdministrationRoutes(workload))
      },
      drain: () => workload.close(),
    }
  },
}

export interface MessagesWorkload {
  intake: Intake
  options: MessagesOptions
  /** Null: there is no key. */
  seal: Seal | null
  queues: Queues
  push: Push
  consume: Consume
  maintenance: Maintenance
  /** Wakes waiting pops of this queue in this process. */
  wake(queue: string): void
  close(): Promise<void>
}

function defineMessages(intake: Intake, options: MessagesOptions): MessagesWorkload {
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
  const stopSweep = intake.sweeps.add({ name: 'messages', everyMs: sweepEveryMs, batch })
  return {
    intake,
    options,
    seal,
    queues,
    push,
    consume,
    maintenance: maintenanceOf(intake, options.schema, push.definition),
    wake: (queue) => consume.arrivals.came(new Set([markOf(queue)])),
    close: async () => {
      consume.close()
      await stopSweep()
    },
  }
}
